"""*Rejoin*: what an island has learnt is put on whatever anchor the run has come to.

Rule 1: what of the saved work has counted, only rosters say.
Rule 2: an update of an earlier life that stands in the open round is waited for. Until
        its outcome is there, what it may hold is held back.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import OutcomeLost
from atoll.exchange import Exchange
from atoll.island.held_back import HeldBack
from atoll.island.leftover import REMAINS, settled_left
from atoll.island.memory import Memory
from atoll.island.remaking import remade
from atoll.island.saved import SavedFragment, SavedUpdate
from atoll.island.slot import Slot
from atoll.protocol import JoinReply
from atoll.protocol.island_rejoin import Left, Since, counted_in, what_is_left
from atoll.weights import FragmentState
from atoll.wire import Header, Roster, update_digest


@dataclass(frozen=True)
class Kept:
    """What became of one fragment's saved work."""

    left: Left
    settled_steps: int
    settled_tokens: int


def rejoin(
    exchange: Exchange,
    memory: Memory,
    joined: JoinReply,
    slot: Slot,
    saved: SavedFragment,
    *,
    progress: tuple[int, int],
) -> Kept:
    """Put what is left of a fragment's work on the anchor that the slot has begun with.

    `progress` counts the inner steps and tokens of all lives, as the slot does from
    here on.
    """
    saved = remade(joined, memory, slot, saved)
    past = _Past(exchange, slot.index, joined.island, slot.state)
    left = _left(past, joined, slot, saved)
    settled = settled_left(saved, left, progress)
    opened = joined.position.rounds[slot.index]
    is_spoken_for = slot.index in joined.spoken_for and slot.state.round + 1 == opened
    if is_spoken_for and left in REMAINS:
        slot.held_back = HeldBack(
            round=opened, saved=saved, most=left, progress=progress
        )
        slot.settle(*progress)
        return Kept(left, *settled)
    memory.leave_over(slot, saved, left)
    memory.give(slot, saved, left)
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


def _digest(update: SavedUpdate | None) -> bytes:
    frame = update.frame if update else None
    return update_digest(frame.header) if frame else b""
