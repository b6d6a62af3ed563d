"""What the machine wants remembered, as the journal records it; `restore` reads it."""

from __future__ import annotations

from atoll.journal import EpochSet, Joined, Left, MoveSet, PauseSet
from atoll.protocol.events import Epoch, Leave, Pausing, Staying
from atoll.protocol.membership import Member
from atoll.protocol.run_state import Move


def record_of(
    change: Member | Leave | Epoch | Pausing | Move | Staying,
) -> Joined | Left | EpochSet | PauseSet | MoveSet:
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
        case Move(target=target, nonce=nonce, is_over=is_over):
            return MoveSet(target=target, nonce=nonce, is_over=is_over)
        case Staying():
            return MoveSet()
