"""Islands of one run that deals out rows in a bucket, in one thread."""

from __future__ import annotations

from atoll import RunSettings
from atoll.data import Ask, Claim, DataSpec, RowLedger, Spans
from atoll.exchange.bucket import BucketReader, StoreExchange, documents, keys
from atoll.exchange.bucket.dealer import RowReader
from atoll.exchange.bucket.documents import ControlDocument, packed
from atoll.exchange.bucket.view import BEAT_S, LEASE_S
from atoll.protocol import Heartbeat, HeldRound, JoinReply
from atoll.store import MemoryStore, Store
from atoll.testing.dealer_contract import dealing_settings
from atoll.testing.fixtures import StoreRun, enter, roster_of, update_of
from atoll.wire import FrameKind, Roster, TrainingProgress

ROWS = 95
"""In units of ten: nine whole ones and a half."""


def asynchronous_dealing() -> RunSettings:
    """Return settings of an asynchronous run that deals out units of ten rows."""
    tables = dealing_settings(start_islands=1).to_dict()
    tables["sync"] = tables["sync"] | {"mode": "async"}
    tables["async"] = {"grace_s": 2.0, "buffer": 2, "staleness": "none"}
    return RunSettings.from_dict(tables)


class Reef:
    """Islands of one run that deals out rows, in one thread."""

    def __init__(
        self,
        *names: str,
        settings: RunSettings | None = None,
        store: Store | None = None,
        rows: int | None = ROWS,
        end_rounds: int | None = None,
    ) -> None:
        self.store = store or MemoryStore()
        self.rows = rows
        settings = settings or dealing_settings(
            start_islands=len(names), end_rounds=end_rounds
        )
        self.run = StoreRun(self.store, settings)
        self.time = self.run.time
        self.exchanges: dict[str, StoreExchange] = {}
        self.joined: dict[str, JoinReply] = {}
        self.numbers: dict[str, int] = {}
        for name in names:
            self.enter(name)
        for name in names:
            self.open(name)
        self.time.sleep(BEAT_S)  # each reads the documents of the others

    def enter(self, name: str, *, store: Store | None = None) -> JoinReply:
        """Let an island join, or join again after it was killed."""
        before = self.exchanges.get(name)
        if before is not None:
            kill(before)
        self.run.store = store or self.store
        exchange = self.run(key=name.encode())
        self.joined[name] = enter(exchange, name)
        self.exchanges[name] = exchange
        self.numbers[name] = self.joined[name].last_claim
        return self.joined[name]

    def open(self, name: str, *, rows: int | None = None) -> DataSpec:
        joined = self.joined[name]
        return self.exchanges[name].open_data(
            name, joined.incarnation, DataSpec(rows=rows or self.rows)
        )

    def claim(self, name: str, *, want: int = 1, number: int | None = None) -> Claim:
        """Let an island claim rows; a claim without rows does not use its number."""
        joined = self.joined[name]
        number = number or self.numbers[name] + 1
        claim = self.exchanges[name].claim(
            Ask(island=name, incarnation=joined.incarnation, number=number, want=want)
        )
        if claim.spans:
            self.numbers[name] = max(number, self.numbers[name])
        return claim

    def publish(
        self,
        name: str,
        spans: Spans,
        *,
        round: int,
        kind: FrameKind = FrameKind.UPDATE,
    ) -> None:
        """Publish an update with rows, based on the run's present state."""
        exchange, joined = self.exchanges[name], self.joined[name]
        progress = TrainingProgress(inner_steps=round, tokens=0, cursor=spans.pack())
        exchange.publish(
            update_of(exchange, joined, 1.0, round=round, kind=kind, progress=progress)
        )

    def hold(self, name: str) -> None:
        """Let an island take the outcomes, and say so."""
        header = self.exchanges[name].state(0).header
        self.exchanges[name].heartbeat(
            Heartbeat(
                island=name,
                incarnation=self.joined[name].incarnation,
                step=1,
                holds=(HeldRound(header.round, header.base),),
            )
        )

    def kill(self, name: str) -> None:
        """End an island without a farewell; the others see it silent."""
        kill(self.exchanges[name])
        self.time.sleep(LEASE_S + 3 * BEAT_S)

    def evict(self, name: str) -> None:
        """Let an operator evict an island."""
        observer = self.reader()
        number = len(observer.view.controls) + 1
        document = ControlDocument(
            run=observer.run,
            action="evict",
            values={},
            island=name,
            incarnation=self.joined[name].incarnation,
        )
        key = keys.control(number)
        assert self.store.put_new(key, packed(documents.CONTROL, document, key))
        self.time.sleep(BEAT_S)

    def roster(self, name: str, round: int) -> Roster:
        return roster_of(self.exchanges[name], round)

    def reader(self) -> BucketReader:
        """Return a reader that has never read the run before."""
        return BucketReader.open(self.store, self.time, url="a test's store")

    def ledger(self, name: str | None = None) -> RowLedger:
        """Return the ledger as an island has it, or a reader that begins now."""
        reader = self.exchanges[name]._reader if name else self.reader()
        for fragment in range(len(reader.view.layout)):
            reader.read_rosters(fragment)
        rows_in(reader).read()
        ledger = reader.view.state.ledger
        assert ledger is not None
        return ledger


def rows_in(reader: BucketReader) -> RowReader:
    """Return the part of a reader that folds the ledger."""
    assert reader.rows is not None
    return reader.rows


def rows_of(reef: Reef, name: str) -> RowReader:
    """Return that of an island."""
    return rows_in(reef.exchanges[name]._reader)


def kill(exchange: StoreExchange) -> None:
    """End the heartbeats of an island, as a kill of its process does."""
    exchange._lease.member = None


def total_of(ledger: RowLedger) -> int:
    """Return the sum of all states, which is the number of turns."""
    counts = ledger.counts
    return (
        counts.trained
        + counts.partly
        + counts.refused
        + counts.in_hand
        + (counts.free or 0)
    )
