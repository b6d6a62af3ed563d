"""The ledger of rows and its claims move with their run, in both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator import Service
from atoll.coordinator.move import receive
from atoll.data import Ask, DataSpec, RowLedger, Spans
from atoll.errors import CorruptError, RunMoved
from atoll.exchange import CoordinatorExchange, Frame
from atoll.exchange.bucket import BucketReader
from atoll.exchange.bucket.move import MovedRun, MoveOut
from atoll.island.join import FollowingExchange, RunLocation
from atoll.protocol import JoinReply, JoinRequest
from atoll.protocol.events import MoveCompleted, MoveRequested
from atoll.simulate import SimDisk
from atoll.store import MemoryStore
from atoll.testing.dealer_contract import dealing_settings
from atoll.testing.fixtures import MODEL, enter, roster_of, update_of
from atoll.wire import TrainingProgress
from tests.exchange.bucket.dealt import ROWS, Reef
from tests.exchange.bucket.test_move_out import travelled
from tests.exchange.test_contract import DirectLine
from tests.exchange.test_relocation import NONCE, URL, Journey

STORE_URL, TARGET = "a test's store", "https://harbour:7700"


def ask(joined: JoinReply, number: int) -> Ask:
    return Ask(island=joined.island, incarnation=joined.incarnation, number=number)


def published(
    exchange: FollowingExchange, joined: JoinReply, spans: Spans, *, round: int
) -> Frame:
    progress = TrainingProgress(inner_steps=round, tokens=0, cursor=spans.pack())
    frame = update_of(exchange, joined, 1.0, round=round, progress=progress)
    exchange.publish(frame)
    return frame


def in_bucket(journey: Journey) -> RowLedger:
    reader = BucketReader.open(journey.store, journey.time, url=URL)
    reader.read_rosters(0)
    assert reader.rows is not None
    reader.rows.read()
    ledger = reader.view.state.ledger
    assert ledger is not None
    return ledger


def test_the_ledger_moves_into_a_bucket() -> None:
    """Claims, counted rows and rows in hand are there as they were."""
    service = Service.create(
        SimDisk(), dealing_settings(start_islands=1), run="run", now_s=0.0
    )
    journey = Journey(service, MemoryStore())
    a = journey.island("a")
    joined = enter(a, "a")
    a.open_data("a", 1, DataSpec(rows=ROWS, fingerprint="c0ffee"))
    first = a.claim(ask(joined, 1)).spans
    published(a, joined, first, round=1)
    assert roster_of(a, 1).counted
    second = a.claim(ask(joined, 2)).spans
    before = service.state.ledger

    journey.move()

    assert in_bucket(journey) == before
    assert a.claim(ask(joined, 2)).spans == second  # the answer was lost, say
    third = a.claim(ask(joined, 3)).spans
    assert not third & (first | second)
    published(a, joined, second | third, round=2)
    roster_of(a, 2)
    assert in_bucket(journey).counts.trained == 30


class Departure:
    """A run that leaves its bucket, and the coordinator that it reaches."""

    def __init__(self, reef: Reef) -> None:
        self.reef, self.disk = reef, SimDisk()
        self.out = MoveOut.open(reef.store, reef.time, url=STORE_URL)
        self.service: Service | None = None

    def begin(self) -> None:
        self.out.begin(TARGET, NONCE)

    def belongings(self) -> MovedRun:
        return travelled(self.out.belongings())

    state = property(lambda self: self.out.state)
    agreed = property(lambda self: self.out.agreed)
    parts = property(lambda self: self.out.parts)

    def complete(self) -> Service:
        receive(self.disk, self)
        assert self.out.settle()
        self.service = Service.open(self.disk, now_s=0.0)
        return self.service

    def following(self, name: str) -> FollowingExchange:
        """Return an island's exchange, which follows the run."""

        def open(target: str) -> RunLocation:
            assert self.service is not None
            line = DirectLine(self.service)
            return CoordinatorExchange(line, key=name.encode(), nonce=b"n")

        return FollowingExchange(
            self.reef.exchanges[name], open, pause=self.reef.time.sleep
        )


def test_the_ledger_moves_out_of_a_bucket() -> None:
    """A coordinator continues with it, also after a restart."""
    reef = Reef("a", "b", end_rounds=9)
    first, other = reef.claim("a").spans, reef.claim("b").spans
    reef.publish("a", first, round=1)
    reef.publish("b", other.head(3), round=1)
    reef.roster("a", 1)
    second = reef.claim("a").spans
    before = reef.ledger()
    departure = Departure(reef)
    departure.begin()

    service = departure.complete()

    assert service.state.ledger == before
    assert Service.open(departure.disk, now_s=0.0).state.ledger == before
    assert before.holdings["a"] == second
    assert before.counts.trained == 13


def test_a_claim_during_a_move_is_answered_where_the_run_is() -> None:
    """The log has ended: no claim is made that the move has not read."""
    reef = Reef("a", "b", end_rounds=9)
    reef.claim("a")
    departure = Departure(reef)
    departure.begin()
    number = len(list(reef.store.items("claims/")))
    exchange = reef.exchanges["a"]

    def complete() -> None:
        if departure.service is None:
            departure.complete()

    reef.time.every(1.0, complete)

    with pytest.raises(RunMoved):
        exchange.claim(ask(reef.joined["a"], 2))

    assert len(list(reef.store.items("claims/"))) == number
    assert departure.service is not None
    ledger = departure.service.state.ledger
    assert ledger is not None
    assert ledger.last_claim("a") == 1


def test_claims_go_on_after_a_move_was_given_up() -> None:
    """And a second move reads them as well."""
    reef = Reef("a", "b", end_rounds=9)
    first = reef.claim("a").spans
    departure = Departure(reef)
    departure.begin()
    assert departure.out.stay()

    second = reef.claim("a").spans
    assert second
    assert not first & second
    again = Departure(reef)
    again.out.begin(TARGET, "1e" * 16)

    ledger = again.complete().state.ledger
    assert ledger is not None
    assert ledger.holdings["a"] == first | second


def test_a_ledger_of_other_rounds_is_refused() -> None:
    """Rows that a roster has settled would count again."""
    reef = Reef("a", "b", end_rounds=9)
    departure = Departure(reef)
    departure.begin()
    belongings = departure.out.belongings()
    assert belongings.rows is not None
    wrong = replace(belongings, rows=replace(belongings.rows, rounds=(7,)))
    departure.belongings = lambda: wrong  # type: ignore[method-assign]

    with pytest.raises(CorruptError, match=r"after rounds \(7,\) comes along with"):
        departure.complete()


def test_a_round_trip_keeps_every_row() -> None:
    """Out of a bucket, trained at a coordinator, and into another bucket."""
    reef = Reef("a", end_rounds=9)
    first = reef.claim("a").spans
    reef.publish("a", first, round=1)
    reef.roster("a", 1)
    departure = Departure(reef)
    departure.begin()
    service = departure.complete()
    line = DirectLine(service)
    a = CoordinatorExchange(line, key=b"a2", nonce=b"n")
    joined = a.join(JoinRequest(model=MODEL, island="b"))
    second = a.claim(ask(joined, 1)).spans
    assert not first & second
    ledger = service.state.ledger
    service.change(MoveRequested(URL, NONCE), 100.0)
    journey = Journey(service, MemoryStore())
    journey.bring().settle()
    service.change(MoveCompleted(URL), 100.0)

    assert in_bucket(journey) == ledger
