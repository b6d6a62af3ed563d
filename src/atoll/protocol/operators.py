"""Handlers of operators' requests: settings, stop, pause, save and move.

A run ends with a last round: by its settings, by the tokens that counted, or because an
operator stops it; the lowest of them is the last. Rounds beyond it end without opening.

A run that moves to another place:
Rule 1: from `MoveRequested` on no island joins, publishes or leaves; the answer to
        such a request is to ask again. Rounds with updates that no island will send
        again close immediately, even below the quorum, and no other round closes:
        their islands publish at the new place.
Rule 2: from `MoveCompleted` on every island is redirected to the new place permanently.
        Before that `MoveCancelled` undoes the move, for an operator who has made sure
        that the run has not arrived.
Rule 3: all three are durable before they are answered, and safe to repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from atoll.errors import Refused, Unreachable, UsageError
from atoll.protocol import events
from atoll.protocol.coordinator_state import CoordinatorState, Move, all_heard
from atoll.protocol.rounds import Phase
from atoll.protocol.tables import changed
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
    """Return the highest round that any island has published for."""
    return max(
        round.number + 1 if round.ahead else round.number - (not round.staged)
        for round in state.rounds
    )


def set_values(
    state: CoordinatorState, event: events.SettingsChanged, now_s: float
) -> events.Result:
    """Put new values in force, as the next epoch."""
    fixed = sorted(event.values.keys() - EPOCH_KEYS)
    if fixed:
        raise UsageError(
            f"{fixed[0]} cannot change during a run. "
            f"Settings that can: {', '.join(sorted(EPOCH_KEYS))}."
        )
    settings = state.settings.with_values(event.values)
    epoch = events.Epoch(state.epoch + 1, event.values)
    last = state.last_round
    if END_ROUNDS in event.values:
        last = settings.run.end_rounds
        _require_not_passed(state, last)
    elif END_TOKENS in event.values and last != NO_ROUND:
        last = settings.run.end_rounds  # the tokens are compared again below
    if DECAY_ROUND in event.values:
        _require_ahead(state, settings, last)
    state = changed(state, settings=settings, epoch=epoch.number, last_round=last)
    return bounded(end_by_tokens(state), now_s), [events.Persist(epoch)]


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
    last = state.last_round
    has_begun = any(round.number > 1 or round.staged for round in state.rounds)
    rounds = []
    for round in state.rounds:
        is_over = last is not None and round.number > last
        if is_over and round.phase in (Phase.WAITING, Phase.OPEN):
            round = changed(round, phase=Phase.ENDED)
        elif round.phase is Phase.ENDED and not is_over:
            round = round.opening(state.members, now_s)
            if not has_begun:
                round = changed(round, phase=Phase.WAITING)
        rounds.append(round)
    return changed(state, rounds=tuple(rounds))


def stop(
    state: CoordinatorState, event: events.StopRequested, now_s: float
) -> events.Result:
    """End with the open rounds; a new epoch makes them the last."""
    last = _furthest(state) if state.rounds else NO_ROUND
    values = {END_ROUNDS: last}
    actions: list[events.Action]
    if last == NO_ROUND:
        epoch = events.Epoch(state.epoch + 1, values)
        state, actions = changed(state, epoch=epoch.number), [events.Persist(epoch)]
    else:
        state, actions = set_values(state, events.SettingsChanged(values), now_s)
    state = bounded(changed(state, last_round=last), now_s)
    return state, [*actions, events.Respond(state.position(now_s))]


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


def pause(
    state: CoordinatorState, event: events.PauseRequested, now_s: float
) -> events.Result:
    """Let no round close, or let them close again."""
    state = changed(state, is_paused=event.is_paused)
    return state, [events.Persist(event), events.Respond(state.position(now_s))]


def save(
    state: CoordinatorState, event: events.SaveRequested, now_s: float
) -> events.Result:
    """Let islands save: they get the request with their next heartbeat."""
    state = changed(state, saves=state.saves + 1)
    return state, [events.Respond(state.position(now_s))]


_OF_ISLANDS = (
    events.JoinRequested,
    events.Founded,
    events.HeartbeatReceived,
    events.UpdateOffered,
    events.UpdateStored,
    events.UpdatesGathered,
    events.Leave,
    events.DataOpened,
    events.RowsClaimed,
    events.Recovered,
)
_OF_OPERATORS = (
    events.SettingsChanged,
    events.StopRequested,
    events.PauseRequested,
    events.SaveRequested,
)


def require_staying(state: CoordinatorState) -> None:
    """Return unless the run has moved, or is moving.

    Raises:
        RunMoved: it has moved.
        Unreachable: it is moving: ask again.
    """
    state.require_here()
    if state.move is not None:
        raise Unreachable(f"The run is moving to {state.move.target}. Ask again.")


def require_still(state: CoordinatorState, event: events.Event) -> None:
    """Return if the run is not moving, or if the event may change a moving run.

    Raises:
        RunMoved: the run has moved.
        Unreachable: it is moving: ask again.
        Refused: the same, to an operator.
    """
    move = state.move
    if move is None:
        return
    if isinstance(event, _OF_OPERATORS):
        raise Refused(
            f"The run {'has moved' if move.is_over else 'is moving'} to "
            f"{move.target}. Control it there."
        )
    if not isinstance(event, _OF_ISLANDS):
        return
    if isinstance(event, events.HeartbeatReceived):
        state.require_here()
    else:
        require_staying(state)


def move(
    state: CoordinatorState, event: events.MoveRequested, now_s: float
) -> events.Result:
    """Stop the run, so that it can be moved."""
    if state.move is not None:
        _require_same(state.move, event.target)
        return state, [events.Respond(state.position(now_s))]
    _require_movable(state, now_s)
    under_way = Move(target=event.target, nonce=event.nonce)
    state = changed(state, move=under_way)
    return state, [events.Persist(under_way), events.Respond(state.position(now_s))]


def _require_movable(state: CoordinatorState, now_s: float) -> None:
    if state.settings.sync.is_async:
        raise UsageError(
            "An asynchronous run cannot move yet: an island finds its update in the "
            "rosters of many rounds, which do not move along. Export its weights, and "
            "begin a new run with them."
        )
    if state.settings.data.is_dealt:
        raise UsageError(
            "A run with data.order='run' cannot move yet: its ledger of rows does not "
            "move along. Export its weights, and begin a new run with them."
        )
    if state.model is None:
        raise UsageError(
            "The run has no weights yet, so that nothing can move. "
            "Make it where it shall be: `atoll init URL RUN.toml`."
        )
    rounds = range(len(state.rounds))
    if not all_heard(state.members, now_s) or any(
        state.lost_state(fragment, now_s) for fragment in rounds
    ):
        raise Unreachable(
            "The coordinator has restarted, and does not know yet the holdings of its "
            "islands. Ask again in some seconds."
        )


def moved(
    state: CoordinatorState, event: events.MoveCompleted, now_s: float
) -> events.Result:
    """Redirect every island to the run's new place."""
    if state.move is None:
        raise UsageError("The run is not moving. Move it first.")
    _require_same(state.move, event.target)
    if state.move.is_over:
        return state, [events.Respond(state.position(now_s))]
    over = changed(state.move, is_over=True)
    state = changed(state, move=over)
    return state, [events.Persist(over), events.Respond(state.position(now_s))]


def stay(
    state: CoordinatorState, event: events.MoveCancelled, now_s: float
) -> events.Result:
    """Cancel the move and continue here."""
    if state.move is None:
        return state, [events.Respond(state.position(now_s))]
    _require_same(state.move, event.target)
    state.require_here()
    state = changed(state, move=None)
    return state, [events.Persist(event), events.Respond(state.position(now_s))]


def _require_same(move: Move, target: str) -> None:
    if move.target != target:
        raise UsageError(
            f"The run {'has moved' if move.is_over else 'is moving'} to "
            f"{move.target}, and not to {target}."
        )
