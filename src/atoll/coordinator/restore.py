"""From a journal to the state of a coordinator, and from its changes to records.

The restored state is exactly the recorded one; `record_of` is the inverse for one
change of the state machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.data import DataSpec
from atoll.errors import CorruptError
from atoll.exchange import Frame
from atoll.journal import (
    ClaimRecord,
    DataRecord,
    EndSetRecord,
    EpochRecord,
    JoinedRecord,
    Journal,
    LeftRecord,
    MoveRecord,
    Note,
    PauseRecord,
    RecordedRun,
    ReleasedRecord,
)
from atoll.protocol.coordinator_state import CoordinatorState, CountedUpdates, Move
from atoll.protocol.events import (
    Change,
    Epoch,
    LastRounds,
    Leave,
    MoveCancelled,
    PauseRequested,
    RowsDealt,
    RowsReleased,
)
from atoll.protocol.membership import LEASE_S, Member, Members
from atoll.protocol.messages import CountedWork
from atoll.protocol.operators import end_of
from atoll.protocol.rounds import KNOWN_BASES, Phase, Round
from atoll.settings import RunSettings
from atoll.weights import FragmentState, Layout, lay_out, terms_of
from atoll.wire import Header

Key = tuple[int, int, str]
"""Fragment, round and island of an update."""


@dataclass(frozen=True)
class RestoredRun:
    """The memory of a coordinator."""

    state: CoordinatorState
    layout: Layout
    weights: list[FragmentState]
    spool: dict[Key, Frame]


def restore(journal: Journal, *, now_s: float) -> RestoredRun:
    """Return the coordinator of a journal.

    Every journalled member counts as live for one lease from now on: the run waits for
    members of the time before the restart until they can have reported.
    """
    recorded = journal.recorded
    settings, last_round = _settings(recorded)
    layout = lay_out(recorded.model, settings) if recorded.model else ()
    weights = [journal.state(index) for index in range(len(recorded.fragments))]
    spool = {key: Frame(*journal.staged(*key)) for key in recorded.staged}
    assert recorded.created is not None
    state = CoordinatorState(
        run=recorded.created.run,
        settings=settings,
        epoch=len(recorded.epochs),
        members=_members(recorded, now_s),
        model=recorded.model,
        counted=_counted(recorded),
        windows=recorded.windows,
        ledger=recorded.ledger,
        last_round=last_round,
        last_rounds=recorded.last_rounds,
        is_paused=recorded.is_paused,
        move=_move(recorded),
    )
    headers = {key: frame.header for key, frame in spool.items()}
    rounds = tuple(
        _round(recorded, state, layout, index, headers, now_s)
        for index in range(len(weights))
    )
    return RestoredRun(replace(state, rounds=rounds), layout, weights, spool)


def _settings(recorded: RecordedRun) -> tuple[RunSettings, int | None]:
    created = recorded.created
    assert created is not None
    settings = RunSettings.from_dict(created.settings)
    if settings.fingerprint != created.fingerprint:
        raise CorruptError(
            f"The journal's settings have fingerprint {settings.fingerprint[:12]}, and "
            f"the run was created with {created.fingerprint[:12]}. "
            "Use the version of atoll that created the run."
        )
    return end_of(settings, [epoch.values for epoch in recorded.epochs])


def _move(recorded: RecordedRun) -> Move | None:
    move = recorded.move
    if move is None:
        return None
    return Move(target=move.target, nonce=move.nonce, is_over=move.is_over)


def _members(recorded: RecordedRun, now_s: float) -> Members:
    return Members(
        {
            member.island: Member(
                island=member.island,
                incarnation=member.incarnation,
                slot=member.slot,
                key=member.key_digest,
                nonce=member.nonce,
                lease_until_s=now_s + LEASE_S,
                has_left=member.has_left,
                left_because=member.reason,
                is_heard=False,
                unheard_until_s=now_s + LEASE_S,
            )
            for member in recorded.members.values()
        }
    )


def _counted(recorded: RecordedRun) -> CountedUpdates:
    fragments = range(len(recorded.fragments))
    islands = sorted({island for _, island in recorded.counted})
    by_island = {
        island: tuple(_last_counted(recorded, index, island) for index in fragments)
        for island in islands
    }
    return CountedUpdates(by_island, dict(recorded.listed))


def _last_counted(
    recorded: RecordedRun, fragment: int, island: str
) -> CountedWork | None:
    last = recorded.counted.get((fragment, island))
    if last is None:
        return None
    return CountedWork(
        round=last.round, inner_steps=last.inner_steps, tokens=last.tokens
    )


def _round(
    recorded: RecordedRun,
    state: CoordinatorState,
    layout: Layout,
    index: int,
    headers: Mapping[Key, Header],
    now_s: float,
) -> Round:
    fragment = recorded.fragments[index]
    number = fragment.round + 1
    last = state.last_of(index)
    is_over = last is not None and number > last
    has_started = any(other.round for other in recorded.fragments)
    phase = Phase.OPEN if has_started else Phase.WAITING
    is_async = state.settings.sync.is_async
    if is_async:
        staged, ahead = _standing(state.counted, headers, index, number)
    else:
        staged = _staged(headers, index, number)
        ahead = _staged(headers, index, number + 1)
    return Round(
        fragment=index,
        number=number,
        phase=Phase.ENDED if is_over else phase,
        base=fragment.digest,
        bases=tuple(fragment.digests.values())[-KNOWN_BASES:],
        outer=terms_of(layout[index], state.settings).outer,
        opened_s=now_s,
        candidates=state.members.live(now_s),
        staged=staged,
        ahead=ahead,
        is_async=is_async,
        last_since_s=now_s if number == last else None,
        lost_through=fragment.lost_through,
    )


def _staged(headers: Mapping[Key, Header], index: int, round: int) -> dict[str, Header]:
    return {
        island: header
        for (fragment, number, island), header in headers.items()
        if (fragment, number) == (index, round)
    }


def _standing(
    counted: CountedUpdates, headers: Mapping[Key, Header], index: int, number: int
) -> tuple[dict[str, Header], dict[str, Header]]:
    """Return the first standing update of each island, and the second ones.

    Only in an asynchronous run; the first of an island has the lower label.
    """
    staged: dict[str, Header] = {}
    ahead: dict[str, Header] = {}
    for (fragment, _, island), header in sorted(headers.items()):
        listed = counted.listed.get((index, island))
        if fragment != index or (listed is not None and listed.covers(header)):
            continue
        is_second = island in staged or header.round > number
        (ahead if is_second else staged)[island] = header
    return staged, ahead


def record_of(
    change: Change,
) -> Note:
    """Return the record of a change."""
    match change:
        case Member():
            return JoinedRecord(
                island=change.island,
                incarnation=change.incarnation,
                slot=change.slot,
                key_digest=change.key,
                nonce=change.nonce,
            )
        case Leave(island, incarnation, reason):
            return LeftRecord(island=island, incarnation=incarnation, reason=reason)
        case Epoch(number, values):
            return EpochRecord(number=number, values=values)
        case LastRounds(rounds):
            return EndSetRecord(rounds=rounds)
        case PauseRequested(is_paused):
            return PauseRecord(is_paused=is_paused)
        case Move(target=target, nonce=nonce, is_over=is_over):
            return MoveRecord(target=target, nonce=nonce, is_over=is_over)
        case MoveCancelled():
            return MoveRecord()
        case DataSpec(rows=rows, fingerprint=fingerprint):
            return DataRecord(rows=rows or 0, fingerprint=fingerprint)
        case RowsDealt(island, number, spans):
            return ClaimRecord(island=island, number=number, packed=spans.pack())
        case RowsReleased(island):
            return ReleasedRecord(island=island)
