"""Islands that a test drives by hand against a coordinator process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from atoll.exchange import CoordinatorExchange, Outcome
from atoll.protocol import JoinReply
from atoll.security import Role
from atoll.testing.fixtures import enter, update_of
from atoll.wire import Roster
from tests.coordinator.apart import Apart
from tests.coordinator.serving import asking

WAIT_S = 10.0


class HandIsland:
    """One island, which publishes what a test gives it."""

    def __init__(self, exchange: CoordinatorExchange, name: str) -> None:
        self.exchange, self.name = exchange, name
        self.joined: JoinReply = enter(exchange, name)

    def publish(self, value: float, *, round: int, **fields: Any) -> None:
        """Publish an update of three equal values."""
        frame = update_of(self.exchange, self.joined, value, round=round, **fields)
        self.exchange.publish(frame)

    def outcome(self, round: int) -> Outcome:
        """Return the outcome of a round, when it is there."""
        found = self.exchange.outcome(0, round, wait_s=WAIT_S)
        assert isinstance(found, Outcome)
        return found

    def roster(self, round: int) -> Roster:
        """Return the roster of a round, when it is over."""
        roster = self.outcome(round).agreed.header.roster
        assert roster is not None
        return roster


@contextmanager
def islands_of(coordinator: Apart, *names: str) -> Iterator[list[HandIsland]]:
    """Join islands of these names, each with a line and a key of its own."""
    with ExitStack() as stack:
        made = []
        for name in names:
            line = stack.enter_context(coordinator.line())
            key = name.encode()
            exchange = CoordinatorExchange(line, key=key, nonce=key)
            made.append(HandIsland(exchange, name))
        yield made


def status_of(coordinator: Apart) -> dict[str, Any]:
    """Return the coordinator's status, as an operator sees it."""
    heard = asking(coordinator, "GET /status", role=Role.OPERATOR)
    found: dict[str, Any] = json.loads(heard.body)
    return found
