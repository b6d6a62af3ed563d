"""What the machine wants remembered, as the journal records it; `restore` reads it."""

from __future__ import annotations

from atoll.journal import EpochSet, Joined, Left, PauseSet
from atoll.protocol.events import Epoch, Leave, Pausing
from atoll.protocol.membership import Member


def record_of(
    change: Member | Leave | Epoch | Pausing,
) -> Joined | Left | EpochSet | PauseSet:
    """Return the record of a change."""
    match change:
        case Member():
            return Joined(
                island=change.island,
                incarnation=change.incarnation,
                slot=change.slot,
                key_digest=change.key,
                nonce=change.nonce,
            )
        case Leave(island, incarnation, reason):
            return Left(island=island, incarnation=incarnation, reason=reason)
        case Epoch(number, values):
            return EpochSet(number=number, values=values)
        case Pausing(is_paused):
            return PauseSet(is_paused=is_paused)
