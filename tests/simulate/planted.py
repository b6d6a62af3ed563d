"""Bugs of the kind that other systems have, planted on purpose.

Each replaces a method for as long as its context lasts; nothing outside the tests can
reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from atoll.coordinator import Service, service
from atoll.coordinator.commit import Committer
from atoll.data.spans import union
from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import OutcomeCall
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.memory import WholeMemory
from atoll.island.receipts import ReceiptReader
from atoll.island.saved_state import AppliedOutcome
from atoll.journal import Journal, replay
from atoll.journal.log import RecordLog
from atoll.journal.records import ClaimRecord
from atoll.protocol import Reception, coordinator_state, rows
from atoll.protocol.events import CloseRound
from atoll.protocol.island import FragmentSync, decide
from atoll.protocol.membership import Member, Members
from atoll.wire import Header, Roster, RosterEntry, Verdict, update_digest

Bug = Callable[[], AbstractContextManager[object]]
Key = tuple[int, int, str]
"""Fragment, round and island of an update."""


@contextmanager
def replaced(
    owner: type | ModuleType, name: str, method: Callable[..., Any]
) -> Iterator[None]:
    """Let `owner.name` be `method`, which gets the real one as its first argument."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *words, **named: method(real, *words, **named))
    try:
        yield
    finally:
        setattr(owner, name, real)


@contextmanager
def retried_update_applied_twice() -> Iterator[None]:
    """An update that comes again, because its answer was lost, is added again."""
    staged: set[Key] = set()
    retried: set[Key] = set()

    def publish(
        real: Any, service: Service, frame: Frame, *more: Any, **named: Any
    ) -> Any:
        reception = real(service, frame, *more, **named)
        header = frame.header
        key = (header.fragment, header.round, header.island)
        if reception is Reception.STAGED:
            (retried if key in staged else staged).add(key)
        return reception

    def reduced(
        real: Any, committer: Committer, close: CloseRound, *more: Any, **named: Any
    ) -> Any:
        entries = [
            replace(entry, weight=2 * entry.weight)
            if (close.fragment, close.round, entry.island) in retried
            else entry
            for entry in close.roster.entries
        ]
        twice = replace(close, roster=Roster(tuple(entries)))
        agreed = real(committer, twice, *more, **named)
        return Frame(replace(agreed.header, roster=close.roster), agreed.body)

    with (
        replaced(Service, "_publish", publish),
        replaced(Committer, "_reduced", reduced),
    ):
        yield


def commit_answered_before_the_flush() -> AbstractContextManager[object]:
    """A record is appended, everybody is told, and a power cut takes it back."""

    def commit(real: Any, journal: Journal, *words: Any, **named: Any) -> None:
        with replaced(RecordLog, "sync", lambda real, log: None):
            real(journal, *words, **named)

    return replaced(Journal, "commit", commit)


def lease_not_fenced_by_incarnation() -> AbstractContextManager[object]:
    """Whoever has the name of a member is that member."""

    def require(real: Any, members: Members, island: str, incarnation: int) -> Member:
        member = members.known.get(island)
        latest = member.incarnation if member else incarnation
        found: Member = real(members, island, latest)
        return found

    return replaced(Members, "require", require)


def carried_update_keeps_its_new_residual() -> AbstractContextManager[object]:
    """What the codec left of an update that missed its round is kept all the same."""

    def settle(
        real: Any,
        memory: WholeMemory,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        verdict: Verdict,
    ) -> None:
        is_missed = verdict is Verdict.LATE and sealed.residual_after is not None
        real(memory, slot, sealed, Verdict.COUNTED if is_missed else verdict)

    return replaced(WholeMemory, "settle_residual", settle)


@contextmanager
def roster_decided_twice() -> Iterator[None]:
    """A late update is added to the roster of a round that was committed without."""
    late: dict[tuple[int, int], Header] = {}

    def publish(
        real: Any, service: Service, frame: Frame, *more: Any, **named: Any
    ) -> Any:
        reception = real(service, frame, *more, **named)
        if reception is Reception.COMMITTED:
            late[frame.header.fragment, frame.header.round] = frame.header
        return reception

    def outcome(
        real: Any, service: Service, call: OutcomeCall, now_s: float
    ) -> Outcome | None:
        told: Outcome | None = real(service, call, now_s)
        header = late.get((call.fragment, call.round))
        return told if told is None or header is None else _with_late(told, header)

    with ExitStack() as stack:
        stack.enter_context(replaced(Service, "_publish", publish))
        stack.enter_context(replaced(Service, "_outcome", outcome))
        yield


def _with_late(told: Outcome, late: Header) -> Outcome:
    header = told.agreed.header
    assert header.roster is not None
    entry = RosterEntry(
        island=late.island,
        incarnation=late.incarnation,
        digest=update_digest(late),
        weight=late.weight,
        verdict=Verdict.COUNTED,
        inner_steps=late.progress.inner_steps,
        tokens=late.progress.tokens,
    )
    others = [each for each in header.roster.entries if each.island != late.island]
    entries = sorted([*others, entry], key=lambda each: each.island)
    again = replace(header, roster=Roster(tuple(entries)))
    return replace(told, agreed=Frame(again, told.agreed.body))


@contextmanager
def refused_updates_are_not_listed() -> Iterator[None]:
    """An asynchronous run forgets that a roster lists an update that was refused."""

    def listed_updates(real: Any, roster: Roster, **named: Any) -> Any:
        return real(Roster(tuple(roster.counted)), **named)

    with (
        replaced(coordinator_state, "listed_updates", listed_updates),
        replaced(replay, "listed_updates", listed_updates),
    ):
        yield


def share_from_rounds() -> AbstractContextManager[object]:
    """A round fills one place of a buffer, however many updates it counts."""

    def buffer_share(real: Any, ages: Sequence[int], **named: Any) -> float:
        share: float = real(ages[:1], **named)
        return share

    # `atoll.weights.reduce` is the function of that name.
    module = import_module("atoll.weights.reduce")
    return replaced(module, "buffer_share", buffer_share)


def adopts_at_the_first_outcome() -> AbstractContextManager[object]:
    """An island takes the first outcome after its seal for its update's receipt."""

    def note(
        real: Any,
        reader: ReceiptReader,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        book: FragmentSync,
        outcome: Outcome,
    ) -> None:
        real(reader, slot, sealed, book, outcome)
        if sealed.receipt is not None or sealed.frame is None:
            return
        sealed.listed = through = slot.state.round
        sealed.receipt = AppliedOutcome(
            decision=decide(book, Verdict.COUNTED, through=through, listed=through),
            verdict=Verdict.COUNTED,
            reason="",
            through=through,
            position=outcome.position,
        )

    return replaced(ReceiptReader, "_note", note)


def claim_answered_before_it_is_durable() -> AbstractContextManager[object]:
    """A claim is answered, and a power cut takes its record back."""

    def note(real: Any, journal: Journal, record: object) -> None:
        if not isinstance(record, ClaimRecord):
            real(journal, record)
            return
        with replaced(RecordLog, "sync", lambda real, log: None):
            real(journal, record)

    return replaced(Journal, "note", note)


def staged_rows_are_dealt_again() -> AbstractContextManager[object]:
    """The rows of an island that has gone are dealt while its update is staged."""
    return replaced(rows, "_stands", lambda real, state, island: False)


def restart_returns_counted_rows() -> AbstractContextManager[object]:
    """A coordinator that starts again takes counted rows for free ones."""

    def restore(real: Any, *words: Any, **named: Any) -> Any:
        restored = real(*words, **named)
        ledger = restored.state.ledger
        if ledger is not None:
            ledger = replace(ledger, free=ledger.free | union(ledger.counted))
        return replace(restored, state=replace(restored.state, ledger=ledger))

    return replaced(service, "restore", restore)


BUGS: dict[str, Bug] = {
    "a retried update applied twice": retried_update_applied_twice,
    "a commit answered before the flush": commit_answered_before_the_flush,
    "a lease not fenced by incarnation": lease_not_fenced_by_incarnation,
    "a carried update that keeps its new residual": (
        carried_update_keeps_its_new_residual
    ),
    "a roster decided twice": roster_decided_twice,
    "a refused update that is not listed": refused_updates_are_not_listed,
    "a share from rounds instead of updates": share_from_rounds,
    "an outcome taken for a receipt": adopts_at_the_first_outcome,
    "a claim answered before it is durable": claim_answered_before_it_is_durable,
    "a row dealt while its update is staged": staged_rows_are_dealt_again,
    "a counted row returned by a restart": restart_returns_counted_rows,
}
