"""Islands that bring updates and take outcomes, and train nothing.

All of them bring the same body, and one copy of the state is kept for all: what an
island costs here is what it costs the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from atoll.exchange import CoordinatorExchange, Frame, Outcome
from atoll.exchange.calls import JoinCall, OutcomeCall, PublishCall
from atoll.exchange.over_http import HttpTransport
from atoll.island.numpy_model import vector_model
from atoll.protocol import JoinReply, JoinRequest, ModelSpec
from atoll.settings import RunSettings
from atoll.weights import FragmentState, lay_out, seal, terms_of
from atoll.wire import FrameKind, Header, with_body

S = TypeVar("S")
T = TypeVar("T")

AT_ONCE = 4
"""Islands that move a body at the same time."""

SMALL = 1e-3
WAIT_S = 2.0
"""How long a question for an outcome may stay open."""

PATTERN = 2**20
"""Elements after which values repeat: random numbers take their time."""


def model_of(elements: int) -> ModelSpec:
    """Return a model of one tensor."""
    return vector_model({"w": (elements,)})


def some_values(elements: int) -> np.ndarray:
    """Return values as weights and their changes have them."""
    pattern = np.random.default_rng(0).standard_normal(PATTERN, np.float32)
    return np.resize(pattern * np.float32(SMALL), elements)


def sealed(run: str, settings: RunSettings, elements: int) -> Frame:
    """Return an update that every island brings, but for its name and round."""
    (layout,) = lay_out(model_of(elements), settings)
    up = terms_of(layout, settings).up
    body = np.empty(up.body_bytes(elements), np.uint8)
    norm = seal(layout, None, some_values(elements), body, up=up)
    header = Header(
        kind=FrameKind.UPDATE,
        run=run,
        fragment=0,
        round=1,
        island="any",
        incarnation=1,
        base=bytes(16),
        codec=up.name,
        elements=elements,
        norm=norm,
    )
    return Frame(with_body(header, body), body)


@dataclass(frozen=True)
class Islands:
    """Those who take part by now, and the state that all of them hold."""

    line: HttpTransport
    elements: int
    joined: list[JoinReply]
    update: Frame
    state: FragmentState

    @classmethod
    def found(cls, line: HttpTransport, elements: int) -> Islands:
        """Join as the first, and bring the run its weights."""
        exchange = CoordinatorExchange(line, key=key_of(0), nonce=b"1")
        model = model_of(elements)
        joined = exchange.join(JoinRequest(model=model, island=name_of(0)))
        assert joined.is_founder
        (layout,) = lay_out(model, joined.settings)
        outer = terms_of(layout, joined.settings).outer
        state = FragmentState.found(some_values(elements), outer.optimizer)
        who = {"island": joined.island, "incarnation": joined.incarnation}
        founding = state.to_frame(run=joined.run, fragment=0, outer=outer, **who)  # type: ignore[arg-type]
        exchange.publish(Frame(*founding))
        update = sealed(joined.run, joined.settings, elements)
        return cls(line, elements, [joined], update, state)

    def join(self, count: int) -> None:
        """Let more islands take part, until there are so many."""
        for number in range(len(self.joined), count):
            request = JoinRequest(model=model_of(self.elements), island=name_of(number))
            exchange = CoordinatorExchange(self.line, key=key_of(number), nonce=b"1")
            self.joined.append(exchange.join(request))

    def take_state(self, times: int) -> None:
        """Take the run's state as late islands do, and compare it with ours."""

        def take(_: int) -> bool:
            exchange = CoordinatorExchange(self.line, key=b"-", nonce=b"1")
            return exchange.state(0).header.base == self.state.digest

        assert all(self._each(take, range(times)))

    def round(self, count: int) -> None:
        """Let the first `count` publish, and everybody take the outcome."""
        number = self.state.round + 1

        def publish(each: JoinReply) -> None:
            header = replace(
                self.update.header,
                round=number,
                base=self.state.digest,
                island=each.island,
                incarnation=each.incarnation,
            )
            self.line.call(PublishCall(Frame(header, self.update.body)))

        self._each(publish, self.joined[:count])
        agreed = self._outcome(number)
        self._each(lambda _: self._outcome(number).header, self.joined[1:])
        assert agreed.header.roster is not None
        assert len(agreed.header.roster.counted) == count
        self.state.apply(agreed.header, agreed.body)

    def _outcome(self, number: int) -> Frame:
        while True:
            reply = self.line.call(OutcomeCall(0, number, WAIT_S))
            if isinstance(reply, Outcome):
                return reply.agreed

    def _each(self, act: Callable[[S], T], over: Iterable[S]) -> list[T]:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(act, over))


def joining(number: int, elements: int) -> JoinCall:
    """Return the call by which an island joins that beats on its own."""
    request = JoinRequest(model=model_of(elements), island=name_of(number))
    return JoinCall(request, key_of(number), b"1")


def key_of(number: int) -> bytes:
    """Return an island's key."""
    return str(number).encode()


def name_of(number: int) -> str:
    """Return an island's name; all are equally long."""
    return f"island-{number:04d}"
