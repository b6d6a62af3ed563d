"""When a run ends, and what else operators change while it goes on.

A run ends with a last round: by its settings, by the tokens that counted, or because an
operator says so; the lowest of them is the last. Rounds beyond it end without opening.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from atoll.errors import UsageError
from atoll.protocol.events import (
    Action,
    Epoch,
    NewValues,
    Pausing,
    Remember,
    Result,
    Saving,
    Say,
    Stopping,
)
from atoll.protocol.rounds import Phase
from atoll.protocol.run_state import CoordinatorState
from atoll.protocol.values import changed
from atoll.settings import EPOCH_KEYS, RunSettings

END_ROUNDS = "run.end_rounds"
END_TOKENS = "run.end_tokens"
DECAY_ROUND = "run.decay_round"

NO_ROUND = 0
"""The last round of a run that was stopped before any update: no setting says that, and
the epoch that does has no other value."""


def end_by_tokens(state: CoordinatorState) -> CoordinatorState:
    """Return the state with a last round, if `end_tokens` have been counted.

    A last round by `end_rounds` or by an operator stays, if it is not later.
    """
    last, by_tokens = state.last_round, last_by_tokens(state)
    if by_tokens is None or (last is not None and last <= by_tokens):
        return state
    return changed(state, last_round=by_tokens)


def last_by_tokens(state: CoordinatorState) -> int | None:
    """Return the round with which `end_tokens` ends the run; None before that."""
    limit = state.settings.run.end_tokens
    if limit is None or not state.rounds or state.counted.tokens < limit:
        return None
    return _furthest(state)


def _furthest(state: CoordinatorState) -> int:
    """Return the highest round that anybody has published for."""
    return max(
        round.number + 1 if round.ahead else round.number - (not round.staged)
        for round in state.rounds
    )


def set_values(state: CoordinatorState, event: NewValues, now_s: float) -> Result:
    """Put new values in force, as the next epoch."""
    fixed = sorted(event.values.keys() - EPOCH_KEYS)
    if fixed:
        raise UsageError(
            f"{fixed[0]} cannot change while a run goes on. "
            f"What can: {', '.join(sorted(EPOCH_KEYS))}."
        )
    settings = state.settings.with_values(event.values)
    epoch = Epoch(state.epoch + 1, event.values)
    last = state.last_round
    if END_ROUNDS in event.values:
        last = settings.run.end_rounds
        _require_not_passed(state, last)
    elif END_TOKENS in event.values and last != NO_ROUND:
        last = settings.run.end_rounds  # the tokens are compared again below
    if DECAY_ROUND in event.values:
        _require_ahead(state, settings, last)
    state = changed(state, settings=settings, epoch=epoch.number, last_round=last)
    return bounded(end_by_tokens(state), now_s), [Remember(epoch)]


def _require_not_passed(state: CoordinatorState, last: int | None) -> None:
    furthest = _furthest(state) if state.rounds else 0
    if last is not None and last < furthest:
        raise UsageError(
            f"run.end_rounds={last} is over: round {furthest} has been published. "
            f"Give {furthest} or more."
        )


def _require_ahead(
    state: CoordinatorState, settings: RunSettings, last: int | None
) -> None:
    """Return if every island learns of a decay before it comes to its first step.

    It does with the outcome of the round before; with overlap it has made steps of the
    next round by then.
    """
    first = 1
    if state.rounds:
        opened = min(round.number for round in state.rounds)
        first = opened + 1 + (settings.sync.overlap_steps > 0)
    decay = settings.run.decay_round
    if decay is not None and decay < first:
        raise UsageError(
            f"run.decay_round={decay} is not ahead of every island. "
            f"Give {first} or more."
        )
    if decay is not None and last is not None and decay > last:
        raise UsageError(
            f"run.decay_round={decay} is beyond the run's last round, {last}. "
            f"Give {last} or less, or set run.end_rounds as well."
        )


def bounded(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """Return the state with no round open beyond the last, and none ended before it."""
    last, live = state.last_round, state.members.live(now_s)
    has_begun = any(round.number > 1 or round.staged for round in state.rounds)
    rounds = []
    for round in state.rounds:
        is_over = last is not None and round.number > last
        if is_over and round.phase in (Phase.WAITING, Phase.OPEN):
            round = changed(round, phase=Phase.ENDED)
        elif round.phase is Phase.ENDED and not is_over:
            phase = Phase.OPEN if has_begun else Phase.WAITING
            round = changed(round, phase=phase, opened_s=now_s, candidates=live)
        rounds.append(round)
    return changed(state, rounds=tuple(rounds))


def stop(state: CoordinatorState, event: Stopping, now_s: float) -> Result:
    """End with the rounds that are under way; that they are the last is an epoch."""
    last = _furthest(state) if state.rounds else NO_ROUND
    values = {END_ROUNDS: last}
    actions: list[Action]
    if last == NO_ROUND:
        epoch = Epoch(state.epoch + 1, values)
        state, actions = changed(state, epoch=epoch.number), [Remember(epoch)]
    else:
        state, actions = set_values(state, NewValues(values), now_s)
    state = bounded(changed(state, last_round=last), now_s)
    return state, [*actions, Say(state.position(now_s))]


def end_of(
    settings: RunSettings, epochs: Iterable[Mapping[str, Any]]
) -> tuple[RunSettings, int | None]:
    """Return the settings after the values of `epochs`, and the last round by them."""
    last = settings.run.end_rounds
    for values in epochs:
        if values.get(END_ROUNDS) == NO_ROUND:
            last = NO_ROUND
            continue
        settings = settings.with_values(values)
        if END_ROUNDS in values:
            last = settings.run.end_rounds
    return settings, last


def pause(state: CoordinatorState, event: Pausing, now_s: float) -> Result:
    """Let no round close, or let them close again."""
    state = changed(state, is_paused=event.is_paused)
    return state, [Remember(event), Say(state.position(now_s))]


def save(state: CoordinatorState, event: Saving, now_s: float) -> Result:
    """Let islands save themselves: their next heartbeat tells them."""
    state = changed(state, saves=state.saves + 1)
    return state, [Say(state.position(now_s))]
