"""A model of three trained values, a frozen base and a table of whole numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from atoll.exchange import Exchange, Frame
from atoll.exchange.base import FoundingExchange, in_parts
from atoll.protocol import JoinReply, JoinRequest, ModelSpec, TensorSpec
from atoll.testing.fixtures import MODEL as TRAINED
from atoll.testing.fixtures import OUTER
from atoll.weights import FragmentState
from atoll.wire import blake3_digest

BASE = np.arange(12, dtype=np.float32).tobytes()
TABLE = np.arange(5, dtype=np.int64).tobytes()


def constant(name: str, values: bytes, dtype: str, *shape: int) -> TensorSpec:
    digest = blake3_digest(values).hex()
    return TensorSpec(
        name=name, shape=shape, dtype=dtype, role="constant", digest=digest
    )


SPECS = (
    constant("base", BASE, "float32", 4, 3),
    constant("table", TABLE, "int64", 5),
    constant("nothing", b"", "float32", 0),
)
MODEL = ModelSpec((*TRAINED.tensors, *SPECS))


class Held:
    """Constants in memory. Implements `Constants`."""

    def __init__(self, values: Mapping[str, bytes] | None = None, size: int = 7):
        self.values = values or {"base": BASE, "table": TABLE}
        self._size = size
        self.asked: list[tuple[str, int]] = []

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[memoryview]:
        self.asked.append((constant.name, first))
        for part in in_parts(self.values[constant.name], first):
            for at in range(0, len(part), self._size):
                yield part[at : at + self._size]


def begin(exchange: Exchange, island: str = "a") -> JoinReply:
    """Join as a founder, and bring nothing yet."""
    joined = exchange.join(JoinRequest(model=MODEL, island=island))
    assert joined.is_founder
    return joined


def found(exchange: FoundingExchange, held: Held, island: str = "a") -> JoinReply:
    """Found a run with its constants."""
    joined = begin(exchange, island)
    exchange.keep(joined, MODEL, held)
    settle(exchange, joined)
    return joined


def settle(exchange: Exchange, joined: JoinReply) -> None:
    """Give the run its first weights, which are zeros."""
    state = FragmentState.found(np.zeros(3, np.float32), "sgd")
    header, body = state.to_frame(
        run=joined.run,
        fragment=0,
        outer=OUTER,
        island=joined.island,
        incarnation=joined.incarnation,
    )
    exchange.publish(Frame(header, body))
