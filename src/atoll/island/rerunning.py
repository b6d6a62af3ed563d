"""Rounds that an island makes again, because it went on from a checkpoint.

Rule 1: a round that was over then is taken by itself, at the step at which the life
        before took it, and the rounds after it are not known yet.
Rule 2: an update that an earlier life of the same work has counted, and that this life
        does not make again to the byte, holds this life's work too: it must not count
        twice, so that the work is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from atoll.island.slot import Sealed, Slot
from atoll.protocol import Position, Taken
from atoll.protocol.island_state import Book
from atoll.wire import RosterEntry, Verdict


def why_spent(
    slot: Slot,
    sealed: Sealed,
    entry: RosterEntry | None,
    digest: bytes,
    *,
    through: int,
) -> str:
    """Return why the work of an update is in the anchor already; empty if it is not.

    `digest` is the update's own, and `through` the last round that is taken with it.
    """
    if not slot.origin:
        return ""
    if sealed.round < slot.counted_through <= through:
        return (
            f"rounds up to {through} are taken together, because what came between is "
            f"kept no more, and round {slot.counted_through} counted an earlier life"
        )
    is_another = entry is not None and entry.digest != digest
    if entry is None or not is_another or entry.verdict is not Verdict.COUNTED:
        return ""
    if entry.incarnation < slot.origin:
        return ""
    return (
        f"round {sealed.round} counted another update of incarnation "
        f"{entry.incarnation}: this life did not make the same one again"
    )


def seen_from(
    position: Position, slots: Sequence[Slot], books: Sequence[Book], taken: Taken
) -> Position:
    """Return where the run was when the life before took an outcome.

    Of a round that is made again, those after it have not been heard of.
    """
    if not any(slot.over_through for slot in slots):
        return position
    rounds = list(position.rounds)
    for slot, book in zip(slots, books, strict=True):
        own = book.flight.round if book.flight else book.taken + 1
        if slot.index == taken.fragment:
            own = taken.through + 1
        if slot.is_over(own):
            rounds[slot.index] = min(rounds[slot.index], own)
    return replace(position, rounds=tuple(rounds))
