"""The live weights: copied out at a seal, and changed by an outcome.

Everything here runs on the thread that trains, between two of its steps.
"""

from __future__ import annotations

from atoll.island.background import Background
from atoll.island.buffers import Buffers
from atoll.island.ledger import Ledger
from atoll.island.slot import Sealed, Slot
from atoll.island.tally import Tally
from atoll.island.view import ParameterView
from atoll.protocol import How
from atoll.settings import SyncSection
from atoll.weights import adopt


class Live:
    """What a framework trains, as seals and outcomes see it."""

    def __init__(
        self,
        view: ParameterView,
        sync: SyncSection,
        ledger: Ledger,
        tally: Tally,
        *,
        buffers: Buffers,
        background: Background,
    ) -> None:
        self._view, self._sync = view, sync
        self._ledger, self._tally = ledger, tally
        self._buffers, self._background = buffers, background

    def seal(self, slot: Slot, round: int, *, is_awaited: bool = False) -> Sealed:
        """Return an update that holds all up to here, its bytes still to be made."""
        local = self._buffers.vector(slot.layout.elements)
        self._view.read(slot.index, local)
        return Sealed(
            round=round,
            base=local,
            inner_steps=self._tally.inner_steps,
            tokens=self._tally.tokens,
            weight=self._ledger.weight(slot),
            arrival=self._background.promise(),
            is_awaited=is_awaited,
        )

    def take(self, slot: Slot, sealed: Sealed, how: How) -> None:
        """Take the slot's anchor into the live weights, as an outcome says."""
        way = self._way(how)
        is_untrained = sealed.inner_steps == self._tally.inner_steps
        if way == "replace" or (way == "rebase" and is_untrained):
            self._view.write(slot.index, slot.state.anchor)
        else:
            self._adopt(slot, sealed, way)
        self.forget(sealed)

    def forget(self, sealed: Sealed) -> None:
        """Let an update's memory serve others."""
        self._buffers.give_back(sealed.base)

    def _adopt(self, slot: Slot, sealed: Sealed, way: str) -> None:
        local = self._buffers.vector(slot.layout.elements)
        self._view.read(slot.index, local)
        adopt(
            slot.layout,
            way,
            slot.state.anchor,
            local,
            sealed.base,
            keep_local=self._sync.keep_local,
        )
        self._view.write(slot.index, local)
        self._buffers.give_back(local)

    def _way(self, how: How) -> str:
        match how:
            case How.ADOPT:
                return self._sync.adopt
            case How.REBASE:
                return "rebase"
            case How.CARRY:
                return "carry"
            case How.DROP | How.REFUSE:
                return "replace"
