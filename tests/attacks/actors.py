"""Islands that an attack is made by or made against, at a coordinator process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from atoll.exchange import CoordinatorExchange, Outcome
from atoll.exchange.calls import Call, Reply
from atoll.exchange.over_http import HttpTransport
from atoll.protocol import Heartbeat, HeldRound, JoinReply
from atoll.security import Role
from atoll.testing.fixtures import enter, update_of
from tests.coordinator.apart import Apart
from tests.coordinator.serving import asking
from tests.http.loopback import PATIENCE_S

NEVER_S = 3600.0
"""A heartbeat only when a test says so."""


class Redirected:
    """A line that goes on at another coordinator process. Implements `Line`."""

    def __init__(self, inner: HttpTransport) -> None:
        self.inner = inner
        self.runtime = inner.runtime

    def call(self, call: Call) -> Reply:
        return self.inner.call(call)


@dataclass
class Actor:
    """One life of an island."""

    line: Redirected
    exchange: CoordinatorExchange
    joined: JoinReply

    @property
    def island(self) -> str:
        return self.joined.island

    def beat(
        self, *holds: HeldRound, waits_for: tuple[int, int] | None = None
    ) -> Heartbeat:
        """Return a beat of this life."""
        return Heartbeat(
            island=self.island,
            incarnation=self.joined.incarnation,
            step=0,
            waits_for=waits_for,
            holds=holds,
        )

    def publish(self, value: float, round: int) -> None:
        """Publish an update of three equal values."""
        frame = update_of(self.exchange, self.joined, value, round=round)
        self.exchange.publish(frame)

    def outcome(self, round: int) -> Outcome:
        """Return the outcome of a round that closes in a moment."""
        for _ in range(int(PATIENCE_S)):
            outcome = self.exchange.outcome(0, round, wait_s=1.0)
            if outcome is not None:
                return outcome
        raise AssertionError(f"round {round} did not close")


@contextmanager
def acting(served: Apart, *names: str) -> Iterator[list[Actor]]:
    """Return islands that have joined, each with a line of its own."""
    with ExitStack() as stack:
        yield [_join(Redirected(stack.enter_context(served.line())), n) for n in names]


@contextmanager
def redirected(served: Apart, *actors: Actor) -> Iterator[None]:
    """Let islands go on at a coordinator process that has taken another's place."""
    with ExitStack() as stack:
        for actor in actors:
            line = stack.enter_context(served.line())
            line.proofs, actor.line.inner = actor.line.inner.proofs, line
        yield


def _join(line: Redirected, name: str) -> Actor:
    exchange = CoordinatorExchange(
        line, key=name.encode(), nonce=b"1", heartbeat_s=NEVER_S
    )
    return Actor(line, exchange, enter(exchange, name))


def status_of(served: Apart) -> dict[str, Any]:
    """Return what the coordinator tells operators."""
    said: dict[str, Any] = json.loads(
        asking(served, "GET /status", role=Role.OPERATOR).body
    )
    return said


def events_of(served: Apart, name: str) -> list[dict[str, Any]]:
    """Return the events of a name that have been written down."""
    lines = (served.directory / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == name]
