"""What a round costs is bounded, and counted."""

from __future__ import annotations

import pytest

from atoll.exchange import Exchange
from atoll.exchange.bucket import StoreExchange
from atoll.exchange.bucket.pauses import GROWTH, LONGEST_S, Pauses
from atoll.protocol import JoinReply
from atoll.store import Counted, MemoryStore
from atoll.testing.one_fragment import enter, plain_settings, update_of
from atoll.testing.store_runs import StoreRun

OF_A_ROUND = 12
"""Of an island, when the others publish at once: put, list, roster, its outcome."""

OF_AN_ISLAND = 3
"""More for each other island: its update's head, its part, its shard of the mean."""


class Beach:
    """Islands of one run, each with its own count of requests."""

    def __init__(self, islands: int) -> None:
        self.store = MemoryStore()
        run = StoreRun(self.store, plain_settings(start_islands=islands))
        self.counts: list[Counted] = []
        self.exchanges: list[Exchange] = []
        self.joined: list[JoinReply] = []
        for number in range(islands):
            run.store = counted = Counted(self.store)
            exchange = run(key=b"%d" % number)
            self.counts.append(counted)
            self.exchanges.append(exchange)
            self.joined.append(enter(exchange, f"i{number}"))


@pytest.mark.parametrize("islands", [2, 3, 5, 8])
def test_a_round_costs_so_many_requests_and_a_few_for_each_island(islands: int) -> None:
    """Nobody waits: what is left are puts, lists and reads that a round needs."""
    beach = Beach(islands)
    frames = [
        update_of(exchange, joined, 1.0)
        for exchange, joined in zip(beach.exchanges, beach.joined, strict=True)
    ]
    before = [counted.requests for counted in beach.counts]
    for exchange, frame in zip(beach.exchanges, frames, strict=True):
        exchange.publish(frame)
    for exchange in beach.exchanges:
        assert isinstance(exchange, StoreExchange)
        outcome = StoreExchange.outcome(exchange, 0, 1, wait_s=0.0)  # at once
        assert outcome is not None

    for counted, earlier in zip(beach.counts, before, strict=True):
        spent = counted.requests.since(earlier)
        assert spent.total <= OF_A_ROUND + OF_AN_ISLAND * islands


def test_looks_become_seldom() -> None:
    """A minute of waiting costs about thirty looks, and each one after it twenty."""
    pauses, now_s, looks = Pauses(), 0.0, []
    pauses.begin(0, now_s)
    while now_s < 180.0:
        now_s += pauses.left_s(0, now_s)
        looks.append(now_s)
        pauses.looked(0, now_s)

    assert sum(at_s <= 60.0 for at_s in looks) <= 35
    assert sum(120.0 < at_s <= 180.0 for at_s in looks) <= 60.0 / LONGEST_S + 1
    assert GROWTH > 1.0
