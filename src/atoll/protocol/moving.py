"""A run that goes elsewhere: what its coordinator does meanwhile, and ever after.

Rule 1: from `Moving` on nothing changes that would have to come along: no round closes,
        nobody joins, publishes or leaves. Who asks for it is told to ask again.
Rule 2: from `Moved` on every island is told where the run is, for good. Before that
        `Staying` undoes it, for who has made sure that the run is not there.
Rule 3: all three are durable before they are answered, and safe to repeat.
"""

from __future__ import annotations

from atoll.errors import Refused, RunMoved, Unreachable, UsageError
from atoll.protocol.events import (
    Beaten,
    Event,
    Founded,
    Gathered,
    Joining,
    Leave,
    Moved,
    Moving,
    NewValues,
    Offered,
    Pausing,
    Recovered,
    Remember,
    Result,
    Saving,
    Say,
    Staying,
    Stopping,
    Stored,
)
from atoll.protocol.recovery import all_heard
from atoll.protocol.run_state import CoordinatorState, Move
from atoll.protocol.values import changed

_OF_ISLANDS = (Joining, Founded, Beaten, Offered, Stored, Gathered, Leave, Recovered)
_OF_OPERATORS = (NewValues, Stopping, Pausing, Saving)


def require_here(state: CoordinatorState) -> None:
    """Return unless the run has gone elsewhere.

    Raises:
        RunMoved: it has, and where it is.
    """
    move = state.move
    if move is not None and move.is_over:
        raise RunMoved(
            f"Run {state.run!r} has moved to {move.target}. It goes on there.",
            target=move.target,
        )


def require_staying(state: CoordinatorState) -> None:
    """Return unless the run is elsewhere, or on its way.

    Raises:
        RunMoved: it is elsewhere.
        Unreachable: it is on its way: ask again.
    """
    require_here(state)
    if state.move is not None:
        raise Unreachable(f"The run is on its way to {state.move.target}. Ask again.")


def require_still(state: CoordinatorState, event: Event) -> None:
    """Return if an event may change a run that is on its way, or is not.

    Raises:
        RunMoved: the run is elsewhere.
        Unreachable: it is on its way: ask again.
        Refused: the same, to an operator.
    """
    move = state.move
    if move is None:
        return
    if isinstance(event, _OF_OPERATORS):
        raise Refused(
            f"The run {'has moved' if move.is_over else 'is on its way'} to "
            f"{move.target}. Control it there."
        )
    if not isinstance(event, _OF_ISLANDS):
        return
    if isinstance(event, Beaten):
        require_here(state)
    else:
        require_staying(state)


def move(state: CoordinatorState, event: Moving, now_s: float) -> Result:
    """Hold everything, so that it can be taken elsewhere."""
    if state.move is not None:
        _require_same(state.move, event.target)
        return state, [Say(state.position(now_s))]
    _require_movable(state, now_s)
    under_way = Move(target=event.target, nonce=event.nonce)
    state = changed(state, move=under_way)
    return state, [Remember(under_way), Say(state.position(now_s))]


def _require_movable(state: CoordinatorState, now_s: float) -> None:
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
            "The coordinator has restarted, and does not know yet what its islands "
            "have. Ask again in some seconds."
        )


def moved(state: CoordinatorState, event: Moved, now_s: float) -> Result:
    """Send everybody where the run is."""
    if state.move is None:
        raise UsageError("The run is not on its way anywhere. Move it first.")
    _require_same(state.move, event.target)
    if state.move.is_over:
        return state, [Say(state.position(now_s))]
    over = changed(state.move, is_over=True)
    state = changed(state, move=over)
    return state, [Remember(over), Say(state.position(now_s))]


def stay(state: CoordinatorState, event: Staying, now_s: float) -> Result:
    """Go on here after all."""
    if state.move is None:
        return state, [Say(state.position(now_s))]
    _require_same(state.move, event.target)
    require_here(state)
    state = changed(state, move=None)
    return state, [Remember(event), Say(state.position(now_s))]


def _require_same(move: Move, target: str) -> None:
    if move.target != target:
        raise UsageError(
            f"The run {'has moved' if move.is_over else 'is on its way'} to "
            f"{move.target}, and not to {target}."
        )
