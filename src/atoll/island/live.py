"""The live weights: copied out at a seal, and changed by an outcome.

Everything here runs on the thread that trains, between two of its steps.
"""

from __future__ import annotations

from itertools import count

from atoll.island.background import Background
from atoll.island.ledger import Ledger
from atoll.island.memory import Memory
from atoll.island.slot import Sealed, Slot
from atoll.island.tally import Tally
from atoll.island.ways import way_of
from atoll.protocol import How
from atoll.settings import SyncSection


class Live:
    """What a framework trains, as seals and outcomes see it."""

    def __init__(
        self,
        memory: Memory,
        sync: SyncSection,
        ledger: Ledger,
        tally: Tally,
        *,
        background: Background,
    ) -> None:
        self._memory, self._sync = memory, sync
        self._ledger, self._tally = ledger, tally
        self._background, self._numbers = background, count()

    def seal(self, slot: Slot, round: int, *, is_awaited: bool = False) -> Sealed:
        """Return an update that holds all up to here, its bytes still to be made."""
        number = next(self._numbers)
        return Sealed(
            number=number,
            round=round,
            base=self._memory.hold(slot, number),
            inner_steps=self._tally.inner_steps,
            tokens=self._tally.tokens,
            weight=self._ledger.weight(slot),
            arrival=self._background.promise(),
            is_awaited=is_awaited,
        )

    def take(self, slot: Slot, sealed: Sealed, how: How) -> None:
        """Take the slot's anchor into the live weights, as an outcome says."""
        way = way_of(how, self._sync)
        is_untrained = sealed.inner_steps == self._tally.inner_steps
        if way == "rebase" and is_untrained:
            way = "replace"
        self._memory.take(slot, sealed, way, keep_local=self._sync.keep_local)
        self.forget(sealed)
        if slot.held_back is not None and slot.held_back.left is not None:
            self.give_back(slot)

    def give_back(self, slot: Slot) -> None:
        """Put saved work into the live weights that waited for an outcome."""
        held = slot.held_back
        if held is None:
            return
        if held.left is None:
            self._memory.leave_over(slot, held.saved, held.remains)
        self._memory.give(slot, held.saved, held.remains)
        slot.settle(*held.settled)
        slot.held_back = None

    def forget(self, sealed: Sealed) -> None:
        """Let an update's memory serve others."""
        self._memory.forget(sealed)
