"""What a round costs is bounded, and counted."""

from __future__ import annotations

import numpy as np
import pytest

from atoll import RunSettings
from atoll.exchange import Exchange, Frame
from atoll.exchange.bucket import StoreExchange, documents, keys
from atoll.exchange.bucket.create import found_run
from atoll.exchange.bucket.documents import fetch
from atoll.exchange.bucket.exchange import GROWTH, LONGEST_S, PollBackoff
from atoll.exchange.bucket.outcomes import GRACE_S
from atoll.exchange.bucket.view import BEAT_S
from atoll.protocol import Heartbeat, HeldRound, JoinReply, ModelSpec
from atoll.store import CountedStore, MemoryStore, RangedStore, Store
from atoll.testing import vector_model
from atoll.testing.fixtures import (
    MODEL,
    OUTER,
    StoreRun,
    enter,
    plain_settings,
    update_of,
)
from atoll.weights import FragmentState
from atoll.wire import PIECE_ELEMENTS, FrameKind, Header, with_body

OF_A_ROUND = 12
"""Of an island, when the others publish at once: put, list, roster, its outcome."""

OF_AN_ISLAND = 3
"""More for each other island: its update's head, its part, its shard of the mean."""

OF_A_WINDOW = 6
"""Of an asynchronous island: its update, a look at the open round, and its roster."""

OF_ONE_ROUND = 5
"""More for each round with one update that closed meanwhile: roster, next control, head
and body of the update; and the document of an island that is missing."""

PIECES = 4


class Beach:
    """Islands of one run, each with its own count of requests."""

    def __init__(
        self,
        islands: int,
        *,
        model: ModelSpec = MODEL,
        settings: RunSettings | None = None,
    ) -> None:
        self.store = MemoryStore()
        settings = settings or plain_settings(start_islands=islands)
        run = StoreRun(self.store, settings)
        self.time = run.time
        if model is not MODEL:
            founded_with_zeros(self.store)
        self.counts: list[CountedStore] = []
        self.exchanges: list[Exchange] = []
        self.joined: list[JoinReply] = []
        for number in range(islands):
            counted = CountedStore(self.store)
            run.store = RangedStore(
                counted
            )  # as islands have it: a read may be several
            exchange = run(key=b"%d" % number)
            self.counts.append(counted)
            self.exchanges.append(exchange)
            self.joined.append(enter(exchange, f"i{number}", model=model))

    def holds(self, number: int, round: int) -> None:
        """Let an island say which state it has made, as it does with each outcome."""
        joined = self.joined[number]
        other = self.exchanges[number - 1]
        assert isinstance(other, StoreExchange)
        base = StoreExchange.state(other, 0).header.base  # its requests do not count
        beat = Heartbeat(
            island=joined.island,
            incarnation=joined.incarnation,
            step=1,
            holds=(HeldRound(round, base),),
        )
        self.exchanges[number].heartbeat(beat)

    def lets_count(self, number: int, *, round: int) -> None:
        """Let an island close a round with its update alone."""
        exchange, joined = self.exchanges[number], self.joined[number]
        exchange.publish(update_of(exchange, joined, 1.0, round=round))
        assert isinstance(exchange, StoreExchange)
        assert StoreExchange.outcome(exchange, 0, round, wait_s=0.0) is not None


@pytest.mark.parametrize("islands", [2, 3, 5, 8, 16])
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


@pytest.mark.parametrize("islands", [2, 3, 5, 8])
def test_a_window_of_an_asynchronous_island_costs_so_many_requests(
    islands: int,
) -> None:
    """Every other island has closed a round meanwhile: each update is read."""
    settings = RunSettings.from_dict(
        {
            "run": {"start_islands": islands},
            "sync": {"mode": "async"},
            "async": {"grace_s": 0.0},
            "wire": {"up": "fp32", "down": "fp32"},
            "outer": {"optimizer": "sgd", "lr": 1.0},
        }
    )
    beach = Beach(islands, settings=settings)
    beach.time.sleep(BEAT_S)
    slow, joined = beach.exchanges[0], beach.joined[0]
    assert isinstance(slow, StoreExchange)
    own = update_of(slow, joined, 1.0)
    for number in range(1, islands):
        beach.lets_count(number, round=number)
    before = beach.counts[0].requests
    slow.publish(own)
    for round in range(1, islands):
        assert StoreExchange.outcome(slow, 0, round, wait_s=0.0) is not None
    beach.holds(0, islands - 1)
    assert StoreExchange.outcome(slow, 0, islands, wait_s=0.0) is not None

    spent = beach.counts[0].requests.since(before)
    assert spent.total <= OF_A_WINDOW + OF_ONE_ROUND * islands


LARGE = vector_model({"w": (PIECES * PIECE_ELEMENTS,)})


def founded_with_zeros(store: Store) -> None:
    """Give a run its first weights, as `atoll init --init` does."""
    document = fetch(store, documents.SETTINGS, keys.SETTINGS)
    state = FragmentState.found(np.zeros(PIECES * PIECE_ELEMENTS, np.float32), "sgd")
    frame = state.to_frame(run=document.run, fragment=0, outer=OUTER)
    found_run(store, document, LARGE, [Frame(*frame)])


def large_update(joined: JoinReply, base: bytes) -> Frame:
    """Return an update of so many pieces that each of four islands makes a part."""
    body = np.zeros(PIECES * PIECE_ELEMENTS, np.float32).view(np.uint8)
    header = Header(
        kind=FrameKind.UPDATE,
        run=joined.run,
        fragment=0,
        round=1,
        island=joined.island,
        incarnation=joined.incarnation,
        base=base,
        elements=PIECES * PIECE_ELEMENTS,
    )
    return Frame(with_body(header, body), body)


def test_who_waits_for_parts_of_a_mean_asks_for_one_of_them() -> None:
    """Three owners have died: seconds later the parts are made, and not before."""
    beach = Beach(PIECES, model=LARGE)
    base = beach.exchanges[0].state(0).header.base
    for exchange, joined in zip(beach.exchanges, beach.joined, strict=True):
        exchange.publish(large_update(joined, base))
    alive, counted = beach.exchanges[0], beach.counts[0]
    assert isinstance(alive, StoreExchange)
    before, begun_s = counted.requests, beach.time.now_s()
    assert StoreExchange.outcome(alive, 0, 1, wait_s=0.0) is not None

    spent, waited_s = counted.requests.since(before), beach.time.now_s() - begun_s
    assert (PIECES - 1) * GRACE_S <= waited_s <= PIECES * GRACE_S
    most = OF_A_ROUND + OF_AN_ISLAND * PIECES
    # What others should have made, and each look of a wait.
    assert spent.total <= most + PIECES * PIECES + 2 * waited_s


def test_looks_become_seldom() -> None:
    """A minute of waiting costs about thirty looks, and each one after it twenty."""
    pauses, now_s, looks = PollBackoff(), 0.0, []
    pauses.begin(0, now_s)
    while now_s < 180.0:
        now_s += pauses.remaining_s(0, now_s)
        looks.append(now_s)
        pauses.polled(0, now_s)

    assert sum(at_s <= 60.0 for at_s in looks) <= 35
    assert sum(120.0 < at_s <= 180.0 for at_s in looks) <= 60.0 / LONGEST_S + 1
    assert GROWTH > 1.0
