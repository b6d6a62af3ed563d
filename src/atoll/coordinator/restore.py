"""What a coordinator is after a restart: exactly what its journal says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from atoll.errors import CorruptError
from atoll.exchange import Frame
from atoll.journal import Journal, Recorded
from atoll.protocol.counted import Counted, CountedUpdates
from atoll.protocol.ending import end_by_tokens, end_of
from atoll.protocol.membership import LEASE_S, Member, Members
from atoll.protocol.rounds import KNOWN_BASES, Phase, Round
from atoll.protocol.run_state import CoordinatorState, Move
from atoll.settings import RunSettings
from atoll.weights import FragmentState, Layout, lay_out, terms_of
from atoll.wire import Header

Key = tuple[int, int, str]
"""Fragment, round and island: what an update is counted by."""


@dataclass(frozen=True)
class Restored:
    """Everything that a coordinator holds in memory."""

    state: CoordinatorState
    layout: Layout
    weights: list[FragmentState]
    spool: dict[Key, Frame]


def restore(journal: Journal, *, now_s: float) -> Restored:
    """Return the coordinator of a journal.

    Every journalled member counts as live for one lease from now on: who was there
    before the restart is waited for until it can have spoken.
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
        last_round=last_round,
        is_paused=recorded.is_paused,
        move=_move(recorded),
    )
    headers = {key: frame.header for key, frame in spool.items()}
    # Which round is the last is told by the rounds; how they stand, by the last one.
    for _ in range(2):
        rounds = tuple(
            _round(recorded, state, layout, index, headers, now_s)
            for index in range(len(weights))
        )
        state = end_by_tokens(replace(state, rounds=rounds))
    return Restored(state, layout, weights, spool)


def _settings(recorded: Recorded) -> tuple[RunSettings, int | None]:
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


def _move(recorded: Recorded) -> Move | None:
    move = recorded.move
    if move is None:
        return None
    return Move(target=move.target, nonce=move.nonce, is_over=move.is_over)


def _members(recorded: Recorded, now_s: float) -> Members:
    return Members(
        {
            each.island: Member(
                island=each.island,
                incarnation=each.incarnation,
                slot=each.slot,
                key=each.key_digest,
                nonce=each.nonce,
                lease_until_s=now_s + LEASE_S,
                has_left=each.has_left,
                left_because=each.reason,
                is_heard=False,
                unheard_until_s=now_s + LEASE_S,
            )
            for each in recorded.members.values()
        }
    )


def _counted(recorded: Recorded) -> CountedUpdates:
    fragments = range(len(recorded.fragments))
    islands = sorted({island for _, island in recorded.counted})
    by_island = {
        island: tuple(_last_counted(recorded, index, island) for index in fragments)
        for island in islands
    }
    return CountedUpdates(by_island)


def _last_counted(recorded: Recorded, fragment: int, island: str) -> Counted | None:
    last = recorded.counted.get((fragment, island))
    if last is None:
        return None
    return Counted(round=last.round, inner_steps=last.inner_steps, tokens=last.tokens)


def _round(
    recorded: Recorded,
    state: CoordinatorState,
    layout: Layout,
    index: int,
    headers: Mapping[Key, Header],
    now_s: float,
) -> Round:
    fragment = recorded.fragments[index]
    number = fragment.round + 1
    is_last = state.last_round is not None and fragment.round >= state.last_round
    has_started = any(each.round for each in recorded.fragments)
    phase = Phase.OPEN if has_started else Phase.WAITING
    return Round(
        fragment=index,
        number=number,
        phase=Phase.ENDED if is_last else phase,
        base=fragment.digest,
        bases=tuple(fragment.digests.values())[-KNOWN_BASES:],
        outer=terms_of(layout[index], state.settings).outer,
        opened_s=now_s,
        candidates=state.members.live(now_s),
        staged=_staged(headers, index, number),
        ahead=_staged(headers, index, number + 1),
    )


def _staged(headers: Mapping[Key, Header], index: int, round: int) -> dict[str, Header]:
    return {
        island: header
        for (fragment, number, island), header in headers.items()
        if (fragment, number) == (index, round)
    }
