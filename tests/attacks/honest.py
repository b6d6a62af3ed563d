"""An honest island that takes part in a run while somebody attacks its coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.clock import SystemClock
from atoll.exchange import CoordinatorExchange, Outcome
from atoll.exchange.over_http import HttpLine
from atoll.http import Caller
from atoll.protocol import Beat, Reception
from atoll.testing.one_fragment import enter, update_of
from tests.coordinator.apart import Apart
from tests.coordinator.serving import bearer

GIVES_UP_S = 12.0
"""Less than any attack here holds what it has taken: 20 s at least on 0.1.0."""


@contextmanager
def honest_line(apart: Apart) -> Iterator[HttpLine]:
    """Give a line on which every call must be answered before an attack lets go."""
    caller = Caller(
        *apart.address, timeout_s=GIVES_UP_S, connect_timeout_s=GIVES_UP_S, max_kept=4
    )
    headers = {"Authorization": bearer(apart.directory)}
    line = HttpLine(caller, clock=SystemClock(), headers=headers)
    line.give_up_after(GIVES_UP_S)
    try:
        yield line
    finally:
        line.close()


def take_part(apart: Apart, island: str = "honest", *, rounds: int = 2) -> None:
    """Join, beat, publish and take outcomes.

    Raises:
        Unreachable: something was not answered within `GIVES_UP_S`.
    """
    with honest_line(apart) as line:
        exchange = CoordinatorExchange(line, key=b"key", nonce=b"nonce")
        joined = enter(exchange, island)
        beat = Beat(island=island, incarnation=joined.incarnation, step=0)
        first = joined.position.rounds[0] if joined.position.rounds else 1
        for number in range(first, first + rounds):
            exchange.heartbeat(beat, at_once=True)
            update = update_of(exchange, joined, 1.0, round=number)
            assert exchange.publish(update) is Reception.STAGED
            await_outcome(exchange, number)


def await_outcome(exchange: CoordinatorExchange, number: int) -> Outcome:
    until_s = time.monotonic() + GIVES_UP_S
    while time.monotonic() < until_s:
        outcome = exchange.outcome(0, number, wait_s=1.0)
        if outcome is not None:
            return outcome
    raise AssertionError(f"round {number} was not committed in {GIVES_UP_S:g} s")
