"""*Rejoin*: what an island has learnt is put on whatever anchor the run has come to.

Rule 1: what of the saved work has counted, only rosters say.
Rule 2: an update of an earlier life that stands in the open round is waited for. Until
        its outcome is there, what it may hold is held back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.errors import OutcomeLost
from atoll.exchange import Exchange
from atoll.island.held_back import HeldBack
from atoll.island.remaking import remade
from atoll.island.saved import SavedFragment, SavedUpdate
from atoll.island.slot import Slot
from atoll.island.view import ParameterView
from atoll.protocol import JoinReply
from atoll.protocol.island_rejoin import Left, Since, counted_in, what_is_left
from atoll.weights import FragmentState
from atoll.weights.layout import F32
from atoll.wire import Header, Roster, update_digest


@dataclass(frozen=True)
class Kept:
    """What became of one fragment's saved work."""

    left: Left
    settled_steps: int
    settled_tokens: int


def rejoin(
    exchange: Exchange,
    view: ParameterView,
    joined: JoinReply,
    slot: Slot,
    saved: SavedFragment,
    *,
    progress: tuple[int, int],
) -> Kept:
    """Put what is left of a fragment's work on the slot's anchor, and into the view.

    `progress` counts the inner steps and tokens of all lives, as the slot does from
    here on.
    """
    saved = remade(joined, slot, saved)
    past = _Past(exchange, slot.index, joined.island, slot.state)
    left = _left(past, joined, slot, saved)
    difference, residual = _work(saved, left)
    settled = _settled(saved, left, progress)
    opened = joined.position.rounds[slot.index]
    loaded = np.empty(slot.layout.elements, np.float32)
    slot.layout.load(slot.state.anchor, loaded)
    is_spoken_for = slot.index in joined.spoken_for and slot.state.round + 1 == opened
    if is_spoken_for and difference is not None:
        slot.held_back = _held_back(slot, view, saved, left, progress)
        view.write(slot.index, slot.state.anchor)
        slot.settle(*progress)
        return Kept(left, *settled)
    if difference is not None:
        loaded += difference
    if slot.residual is not None and residual is not None:
        slot.residual[:] = residual
    view.write(slot.index, loaded)
    slot.settle(*settled)
    return Kept(left, *settled)


class _Past:
    """What a fragment's rounds came to, as far as the run knows."""

    def __init__(
        self, exchange: Exchange, fragment: int, island: str, state: FragmentState
    ) -> None:
        self._exchange, self._fragment, self._island = exchange, fragment, island
        self._state = state

    def knows(self, round: int, digest: bytes) -> bool:
        """Return whether the state after a round was this one."""
        if round == self._state.round:
            return self._state.digest == digest
        after = self._header(round + 1)
        return after is not None and after.base == digest

    def counted(self, round: int, digest: bytes) -> Since | None:
        """Return what a round that is over counted of the island; None: refused it."""
        header = self._header(round)
        roster = header.roster if header else None
        return counted_in(roster or Roster(()), self._island, digest)

    def _header(self, round: int) -> Header | None:
        if not 0 < round <= self._state.round:
            return None
        try:
            outcome = self._exchange.outcome(self._fragment, round, wait_s=0.0)
        except OutcomeLost:
            return None
        return outcome.agreed.header if outcome else None


def _left(past: _Past, joined: JoinReply, slot: Slot, saved: SavedFragment) -> Left:
    digest, since, is_refused = _digest(saved.update), Since.NOTHING, False
    counted = joined.counted[slot.index] if joined.counted else None
    latest = counted.round if counted else 0
    opened = joined.position.rounds[slot.index]
    if slot.index in joined.spoken_for and opened <= slot.state.round:
        # It has closed since the run answered.
        latest = opened if past.counted(opened, digest) in _COUNTED else latest
    if latest > saved.round:
        since = past.counted(latest, digest) or Since.ANOTHER
    elif saved.update is not None:
        is_refused = past.counted(saved.update.round, digest) is None
    return what_is_left(
        since,
        is_refused=is_refused,
        is_base_known=past.knows(saved.round, saved.digest),
    )


_COUNTED = (Since.SAVED, Since.ANOTHER)


def _work(saved: SavedFragment, left: Left) -> tuple[F32 | None, F32 | None]:
    """Return the difference and the residual that are left."""
    match left:
        case Left.ALL:
            return saved.difference, saved.residual
        case Left.SINCE:
            assert saved.update is not None
            return _since(saved), saved.update.residual_after
        case Left.NONE | Left.LOST:
            return None, None


def _since(saved: SavedFragment) -> F32:
    assert saved.update is not None
    assert saved.difference is not None
    return saved.difference - saved.update.base


def _settled(
    saved: SavedFragment, left: Left, progress: tuple[int, int]
) -> tuple[int, int]:
    if left is Left.ALL:
        return saved.settled_steps, saved.settled_tokens
    if left is Left.SINCE:
        assert saved.update is not None
        return saved.update.inner_steps, saved.update.tokens
    return progress


def _held_back(
    slot: Slot,
    view: ParameterView,
    saved: SavedFragment,
    left: Left,
    progress: tuple[int, int],
) -> HeldBack:
    """Return what is put back when the update that stands does not count.

    If it is the saved update itself, what came since its seal is put back.
    """
    difference, residual = _work(saved, left)
    assert difference is not None
    held = HeldBack(
        round=slot.state.round + 1,
        difference=difference,
        residual=residual,
        settled=_settled(saved, left, progress),
        progress=progress,
        put=lambda values: _put(view, slot.index, values),
    )
    update = saved.update
    if left is Left.ALL and update is not None and update.round == held.round:
        held.frame, held.at_seal = update.frame, update.base
        held.residual_after = update.residual_after
        held.at_seal_settled = (update.inner_steps, update.tokens)
    return held


def _put(view: ParameterView, fragment: int, difference: F32) -> None:
    local = np.empty_like(difference)
    view.read(fragment, local)
    local += difference
    view.write(fragment, local)


def _digest(update: SavedUpdate | None) -> bytes:
    frame = update.frame if update else None
    return update_digest(frame.header) if frame else b""
