"""Handlers of operators' requests: settings, stop, pause, save and move.

A run ends with a last round: by its settings, by the tokens that counted, or because an
operator stops it; the lowest of them is the last. Rounds beyond it end without opening.
The end by tokens is decided once, and is an epoch, as that of an operator is. The
fragments of an asynchronous run end with a round each, because they do not keep step:
when the run is to end, the open round of each fragment becomes its last.

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


def decide_end(
    state: CoordinatorState, now_s: float, *, is_restored: bool = False
) -> events.Result:
    """Make the end durable, once the run has counted or committed enough.

    After a restart updates may be lost that were staged for the open rounds: with
    `is_restored` these are the last.
    """
    if not state.rounds or state.is_observed or is_end_near(state):
        return state, []
    if state.settings.sync.mode == "async":
        return end_each(state, now_s) if is_to_end(state) else (state, [])
    if not _has_tokens(state):
        return state, []
    last = _open_through(state) if is_restored else _furthest(state)
    values = {END_ROUNDS: last}
    epoch = events.Epoch(state.epoch + 1, values)
    settings = state.settings.with_values(values)
    state = changed(state, settings=settings, epoch=epoch.number, last_round=last)
    return bounded(state, now_s), [events.Persist(epoch)]


def is_to_end(state: CoordinatorState) -> bool:
    """Return whether the open rounds of an asynchronous run are to be its last."""
    if not state.rounds or is_end_near(state):
        return False
    open_round = min(round.number for round in state.rounds)
    is_over = state.last_round is not None and open_round >= state.last_round
    return is_over or _has_tokens(state)


def last_by_tokens(state: CoordinatorState) -> int | None:
    """Return the round with which `end_tokens` ends a run earlier; None: with none."""
    if not state.rounds or not _has_tokens(state):
        return None
    last = _furthest(state)
    return last if state.last_round is None or last < state.last_round else None


def is_end_near(state: CoordinatorState) -> bool:
    """Return whether the last rounds are open or over: none before them is the last."""
    if state.last_rounds is not None:
        return True
    if state.last_round is None:
        return False
    if state.settings.sync.mode == "async":
        return state.last_round == NO_ROUND
    return state.last_round <= _open_through(state)


def _has_tokens(state: CoordinatorState) -> bool:
    limit = state.settings.run.end_tokens
    return limit is not None and state.counted.tokens >= limit


def _furthest(state: CoordinatorState) -> int:
    """Return the highest round that any island has published for."""
    return max(
        round.number + 1 if round.ahead else round.number - (not round.staged)
        for round in state.rounds
    )


def _open_through(state: CoordinatorState) -> int:
    """Return the highest round that any island can have published for."""
    numbers = [round.number + bool(round.ahead) for round in state.rounds]
    return max(numbers, default=NO_ROUND)


def end_each(state: CoordinatorState, now_s: float) -> events.Result:
    """Make the open round of each fragment its last; of one that closes, the next.

    If no island is live, none will publish for a round without updates.
    """
    has_live = bool(state.members.live(now_s))
    last_rounds = tuple(
        round.number + (round.phase is Phase.CLOSING or bool(round.ahead))
        if has_live or round.staged
        else round.number - 1
        for round in state.rounds
    )
    if state.last_rounds is not None:
        last_rounds = tuple(map(min, last_rounds, state.last_rounds))
    state = changed(state, last_rounds=last_rounds)
    return bounded(state, now_s), [events.Persist(events.LastRounds(last_rounds))]


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
    last, last_rounds = state.last_round, state.last_rounds
    actions: list[events.Action] = [events.Persist(epoch)]
    if END_ROUNDS in event.values:
        last = settings.run.end_rounds
        _require_not_passed(state, last)
        if last_rounds is not None:
            last_rounds = None
            actions.append(events.Persist(events.LastRounds(())))
    elif END_TOKENS in event.values:
        _require_end_ahead(state, settings)
    if DECAY_ROUND in event.values:
        _require_ahead(state, settings, last)
    state = changed(
        state,
        settings=settings,
        epoch=epoch.number,
        last_round=last,
        last_rounds=last_rounds,
    )
    state, endings = decide_end(bounded(state, now_s), now_s)
    return state, [*actions, *endings]


def _require_end_ahead(state: CoordinatorState, settings: RunSettings) -> None:
    """Return unless the end is decided, and the limit of tokens would be another."""
    limit = settings.run.end_tokens
    if not is_end_near(state) or (limit and limit <= state.counted.tokens):
        return
    last = max(state.last_rounds or (state.last_round or NO_ROUND,))
    value = "none" if limit is None else limit
    raise UsageError(
        f"run.end_tokens={value} has no effect: the end of the run is decided, and "
        f"round {last} is the last. To continue: "
        f"set run.end_tokens={value} run.end_rounds=none."
    )


def _require_not_passed(state: CoordinatorState, last: int | None) -> None:
    if state.rounds and state.settings.sync.is_async:
        first = min(round.number for round in state.rounds)
        if last is not None and last < first:
            raise UsageError(
                f"run.end_rounds={last} is over: every fragment has committed round "
                f"{first - 1}. Give {first} or more."
            )
        return
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
    has_begun = any(round.number > 1 or round.staged for round in state.rounds)
    rounds = []
    for round in state.rounds:
        last = state.last_of(round.fragment)
        is_over = last is not None and round.number > last
        if round.is_last != (round.number == last):
            since_s = None if round.is_last else now_s
            round = changed(round, last_since_s=since_s)
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
    if state.settings.sync.is_async and _is_stoppable(state, now_s):
        state, actions = end_each(state, now_s)
        return state, [*actions, events.Respond(state.position(now_s))]
    if state.last_rounds is not None:
        return state, [events.Respond(state.position(now_s))]
    last = _furthest(state) if state.rounds else NO_ROUND
    values = {END_ROUNDS: last}
    if last == NO_ROUND:
        epoch = events.Epoch(state.epoch + 1, values)
        state, actions = changed(state, epoch=epoch.number), [events.Persist(epoch)]
    else:
        state, actions = set_values(state, events.SettingsChanged(values), now_s)
    state = bounded(changed(state, last_round=last), now_s)
    return state, [*actions, events.Respond(state.position(now_s))]


def _is_stoppable(state: CoordinatorState, now_s: float) -> bool:
    """Return whether an asynchronous run has rounds that can be its last.

    Once they are decided a repeated stop ends those that no live island is left for.
    """
    if not state.rounds or state.last_round == NO_ROUND:
        return False
    has_live = bool(state.members.live(now_s))
    if state.last_rounds is not None:
        return not has_live
    has_updates = any(round.number > 1 or round.staged for round in state.rounds)
    return has_updates or (state.has_started and has_live)


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


ASYNC_STAYS = (
    "An asynchronous run cannot move yet: an island finds its update in the rosters "
    "of many rounds, which do not move along. Export its weights, and begin a new run "
    "with them."
)


def _require_movable(state: CoordinatorState, now_s: float) -> None:
    if state.settings.sync.mode == "async":
        raise UsageError(ASYNC_STAYS)
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
