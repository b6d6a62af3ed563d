"""Bugs of runs in a bucket, planted on purpose: each is a rule of it that is broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from atoll.data import RowLedger, Spans
from atoll.data.spans import union
from atoll.exchange.bucket import exchange, keys
from atoll.exchange.bucket.claims import CLAIM
from atoll.exchange.bucket.dealer import RowReader
from atoll.exchange.bucket.documents import (
    ROSTER,
    MemberDocument,
    RosterDocument,
    packed,
)
from atoll.exchange.bucket.exchange import RoundCloser
from atoll.exchange.bucket.member import LateUpdates, MemberLease
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.states import States
from atoll.exchange.bucket.view import MemberView, UpdateView
from atoll.protocol.events import MemberSeen
from atoll.wire import Header
from tests.simulate.planted import BUGS, Bug, replaced

ASYNC_BUGS = (
    "a refused update that is not listed",
    "a share from rounds instead of updates",
    "an outcome taken for a receipt",
)
"""Rules of asynchronous rounds, whoever closes them."""


def closes_by_what_it_saw_before() -> AbstractContextManager[object]:
    """A round is closed by the last look at it, and looked at afterwards."""

    def close_if_due(
        real: Any, closing: RoundCloser, fragment: int, **named: Any
    ) -> None:
        document = closing._due(fragment) if closing._reader.founded else None
        if document is not None:
            closing._close(document)
            return
        real(closing, fragment, **named)

    return replaced(RoundCloser, "close_if_due", close_if_due)


def counts_what_no_successor_names() -> AbstractContextManager[object]:
    """Whoever has the name of a member speaks for it, whichever life it was."""

    def is_accepted(real: Any, updates: UpdateView, header: Header) -> bool:
        return header.island in updates._view.documents

    return replaced(UpdateView, "_is_accepted", is_accepted)


def leaves_behind_what_farewells_name() -> AbstractContextManager[object]:
    """What somebody left in a round that is closed by now is thought to be settled."""

    def republish(real: Any, leftovers: LateUpdates, fragment: int) -> None:
        leftovers._settled.update(leftovers.unseen(fragment))

    return replaced(LateUpdates, "republish", republish)


@contextmanager
def lives_by_the_writers_clock() -> Iterator[None]:
    """A heartbeat says when it was made, and a lease runs from then."""
    written: dict[tuple[str, int, int], float] = {}

    def put(real: Any, living: MemberLease, member: MemberDocument) -> None:
        beat = member.beat
        said = (beat.island, beat.incarnation, member.beats)
        written[said] = living._runtime.now_s()
        real(living, member)

    def apply(
        real: Any, known: MemberView, document: MemberDocument, now_s: float
    ) -> None:
        real(known, document, now_s)
        view, beat = known._view, document.beat
        said_s = written.get((beat.island, beat.incarnation, document.beats))
        member = view.state.members.known.get(beat.island)
        if member is not None and said_s is not None:
            member = replace(member, lease_until_s=said_s + view.lease_s)
            view.advance(MemberSeen(member), now_s)

    with ExitStack() as stack:
        stack.enter_context(replaced(MemberLease, "_put", put))
        stack.enter_context(replaced(MemberView, "apply", apply))
        yield


def collects_rosters() -> AbstractContextManager[object]:
    """What only older rounds needed is removed, and their rosters with it."""

    def remove(real: Any, states: States, prefix: str, **named: Any) -> None:
        real(states, prefix, **{**named, "retained": ""})

    return replaced(States, "_remove", remove)


def puts_rosters_over_others() -> AbstractContextManager[object]:
    """A roster is put whether there is one or not."""

    def put_over(real: Any, reader: BucketReader, document: RosterDocument) -> None:
        key = keys.roster(document.fragment, document.round)
        reader.store.put(key, packed(ROSTER, document, key))
        real(reader, document)

    return replaced(exchange, "put_roster", put_over)


@contextmanager
def trains_counted_rows_again() -> Iterator[None]:
    """An island that returns trains all rows of its name, and no closer judges them."""

    def to_train(real: Any, ledger: RowLedger, island: str, *_: Any) -> Spans:
        turns = [spans for _, spans in ledger.claims.get(island, ())]
        return union(turns)

    with ExitStack() as stack:
        stack.enter_context(replaced(RowLedger, "to_train", to_train))
        stack.enter_context(replaced(RowLedger, "fault", lambda *_: ""))
        yield


@contextmanager
def puts_claims_over_others() -> Iterator[None]:
    """A claim replaces the entry that another island has put first."""

    def put(real: Any, rows: RowReader, document: Any, number: int) -> bool:
        key = keys.claim(number)
        rows._store.put(key, packed(CLAIM, document, key))
        real(rows, document, number)
        return True

    with replaced(RowReader, "put", put):
        yield


STORE_BUGS: dict[str, Bug] = {
    "a closer that does not look again": closes_by_what_it_saw_before,
    "an earlier life's update that nobody names": counts_what_no_successor_names,
    "a leftover that nobody brings": leaves_behind_what_farewells_name,
    "liveness by a writer's clock": lives_by_the_writers_clock,
    "a collection that takes rosters": collects_rosters,
    "a roster put over another": puts_rosters_over_others,
    "a return that trains counted rows": trains_counted_rows_again,
    "a claim put over another": puts_claims_over_others,
    **{name: BUGS[name] for name in ASYNC_BUGS},
}
