"""An honest island that takes part in a run while somebody attacks its coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from atoll.exchange import CoordinatorExchange, Exchange, Frame, Outcome
from atoll.exchange.over_http import HttpTransport
from atoll.http import HttpClient
from atoll.island.numpy_model import vector_model
from atoll.protocol import Heartbeat, JoinReply, JoinRequest, ModelSpec, Reception
from atoll.testing.fixtures import OUTER
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, with_body
from tests.coordinator.apart import Apart
from tests.coordinator.serving import bearer

GIVES_UP_S = 12.0
"""Less than any attack here holds what it has taken: 20 s at least on 0.1.0."""


@contextmanager
def honest_line(apart: Apart) -> Iterator[HttpTransport]:
    """Give a line on which every call must be answered before an attack lets go."""
    caller = HttpClient(
        *apart.address, timeout_s=GIVES_UP_S, connect_timeout_s=GIVES_UP_S, max_idle=4
    )
    headers = {"Authorization": bearer(apart.directory)}
    line = HttpTransport(caller, headers=headers)
    line.close_after(GIVES_UP_S)
    try:
        yield line
    finally:
        line.close()


def take_part(
    apart: Apart, island: str = "honest", *, rounds: int = 2, elements: int = 3
) -> None:
    """Join, beat, publish, take outcomes and the state.

    Raises:
        Unreachable: something was not answered within `GIVES_UP_S`.
    """
    with honest_line(apart) as line:
        exchange = CoordinatorExchange(line, key=b"key", nonce=b"nonce")
        joined = enter(exchange, island, elements=elements)
        beat = Heartbeat(island=island, incarnation=joined.incarnation, step=0)
        for number in range(1, rounds + 1):
            exchange.heartbeat(beat, at_once=True)
            update = update_of(exchange, joined, round=number, elements=elements)
            assert exchange.publish(update) is Reception.STAGED
            await_outcome(exchange, number)


def model_of(elements: int) -> ModelSpec:
    return vector_model({"w": (elements,)})


def enter(exchange: Exchange, island: str, *, elements: int) -> JoinReply:
    """Join, and found the run with zeros if nobody has."""
    joined = exchange.join(JoinRequest(model=model_of(elements), island=island))
    if joined.is_founder:
        state = FragmentState.found(np.zeros(elements, np.float32), "sgd")
        founding = state.to_frame(
            run=joined.run,
            fragment=0,
            outer=OUTER,
            island=island,
            incarnation=joined.incarnation,
        )
        exchange.publish(Frame(*founding))
    return joined


def update_of(
    exchange: Exchange, joined: JoinReply, *, round: int, elements: int
) -> Frame:
    """Return an update of ones, on the state that the run has now."""
    body = np.ones(elements, np.float32).view(np.uint8)
    header = Header(
        kind=FrameKind.UPDATE,
        run=joined.run,
        fragment=0,
        round=round,
        island=joined.island,
        incarnation=joined.incarnation,
        base=exchange.state(0).header.base,
        elements=elements,
        norm=float(np.sqrt(elements)),
    )
    return Frame(with_body(header, body), body)


def await_outcome(exchange: CoordinatorExchange, number: int) -> Outcome:
    until_s = time.monotonic() + GIVES_UP_S
    while time.monotonic() < until_s:
        outcome = exchange.outcome(0, number, wait_s=1.0)
        if outcome is not None:
            return outcome
    raise AssertionError(f"round {number} was not committed in {GIVES_UP_S:g} s")
