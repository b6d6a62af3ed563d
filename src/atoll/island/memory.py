"""The memory of an island's weights: anchor, velocity and residual of its fragments.

`Memory` is the port; `WholeMemory` keeps all weights in this process. Host buffers are
reused, because the first touch of fresh memory costs more than a copy.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np

from atoll import kernels
from atoll.errors import UsageError
from atoll.exchange import Frame
from atoll.island.base import ParameterView
from atoll.island.fragment import IslandFragment, UpdateInFlight
from atoll.island.saved_state import (
    SavedFragment,
    SavedIsland,
    difference_left,
    residual_left,
)
from atoll.island.snapshot import as_work, fragments_of
from atoll.protocol import JoinReply
from atoll.protocol.island import RemainingWork
from atoll.settings import RunSettings, SyncSection
from atoll.weights import FragmentLayout, FragmentState, Layout, Terms, adopt, seal
from atoll.weights.layout import F32
from atoll.wire import Verdict, state_digest


class Memory(Protocol):
    """Live weights, anchor, velocity and residual of an island's fragments.

    The host is the only caller. It calls `hold` and `take`, which touch the live
    weights, from the thread that trains, between inner steps. There is one method for
    each operation on all values of a fragment.
    """

    def lay_out(self, layout: Layout, joined: JoinReply) -> None:
        """Set the layout of the fragments. Called first, at every join."""
        ...

    def begin(
        self,
        index: int,
        layout: FragmentLayout,
        terms: Terms,
        state: FragmentState | None,
    ) -> IslandFragment:
        """Return a fragment in the run's state, and write it to the live weights.

        With None the run is founded: the live weights become the anchor.
        """
        ...

    def hold(self, slot: IslandFragment, number: int) -> F32:
        """Copy the live weights, for a sealed update of this number."""
        ...

    def take(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        mode: str,
        *,
        keep_local: float,
    ) -> None:
        """Adopt an outcome into the live weights by `mode`: see `weights.adopt`."""
        ...

    def forget(self, sealed: UpdateInFlight) -> None:
        """Make the buffers of an update available again."""
        ...

    def measure(self, slot: IslandFragment) -> bytes:
        """Return the digest of the state, computed from its present bytes."""
        ...

    def seal(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        *,
        seed: int,
        decay: float,
        is_difference: bool,
    ) -> tuple[np.ndarray, float]:
        """Return body and norm of an update, and store its new residual.

        Raises:
            NonFinite: naming the parameter.
        """
        ...

    def keep_loaded(self, slot: IslandFragment, sealed: UpdateInFlight) -> None:
        """Set an update's base to the anchor as loaded: its work is to be carried."""
        ...

    def apply(self, slot: IslandFragment, agreed: Frame) -> None:
        """Apply the outer step of a verified outcome: see `FragmentState.apply`."""
        ...

    def replace(self, slot: IslandFragment, state: FragmentState) -> None:
        """Replace the state of a fragment by the run's."""
        ...

    def settle(
        self, slot: IslandFragment, sealed: UpdateInFlight, verdict: Verdict
    ) -> None:
        """Settle the residual by an update's verdict, and release its buffers."""
        ...

    def since(
        self,
        slot: IslandFragment,
        flying: UpdateInFlight,
        rest: UpdateInFlight,
        *,
        is_settled: bool,
    ) -> None:
        """Reduce `rest` to the work since `flying` was sealed.

        Unless `flying` is settled, its residual goes with the rest.
        """
        ...

    def has_left_over(self, slot: IslandFragment) -> bool:
        """Return whether the residual has anything that is not in flight."""
        ...

    def whole(self, slot: IslandFragment) -> FragmentState:
        """Return the state of the whole fragment, for sending or reading."""
        ...

    def saving(
        self,
        slots: Sequence[IslandFragment],
        sync: SyncSection,
        *,
        trained: tuple[int, int],
        is_exact: bool,
    ) -> list[SavedFragment]:
        """Return the fragments of this process for a checkpoint: see `fragments_of`.

        Called by the thread that trains, which holds the slots' locks.
        """
        ...

    def as_work(self, saved: SavedIsland, sync: SyncSection) -> SavedIsland:
        """Return the work of an exactly saved island, whose live weights are loaded."""
        ...

    def require_fitting(self, layout: Layout, saved: Sequence[SavedFragment]) -> None:
        """Return if the saved vectors have this layout.

        Raises:
            UsageError: they have another layout.
        """
        ...

    def resume(
        self, index: int, layout: FragmentLayout, terms: Terms, saved: SavedFragment
    ) -> IslandFragment:
        """Return a fragment in its saved state, with its update in flight.

        The live weights are those of the checkpoint already.
        """
        ...

    def remake(
        self, slot: IslandFragment, saved: SavedFragment, *, seed: int, decay: float
    ) -> tuple[np.ndarray, float]:
        """Return body and norm of a saved update, and store its new residual.

        Raises:
            NonFinite: naming the parameter.
        """
        ...

    def give(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        """Add the remaining part of saved work to the live weights."""
        ...

    def leave_over(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        """Set the residual to that of the remaining work, if there is any."""
        ...


class WholeMemory:
    """All of the weights in this process. Implements `Memory`."""

    def __init__(self, view: ParameterView) -> None:
        self._view, self.buffers = view, HostBuffers()
        self._layout: Layout = ()

    def lay_out(self, layout: Layout, joined: JoinReply) -> None:
        self._view.lay_out(layout)
        self._layout = layout

    def begin(
        self,
        index: int,
        layout: FragmentLayout,
        terms: Terms,
        state: FragmentState | None,
    ) -> IslandFragment:
        if state is None:
            anchor = np.empty(layout.elements, np.float32)
            self._view.read(index, anchor)
            state = FragmentState.found(anchor, terms.outer.optimizer)
        else:
            self._view.write(index, state.anchor)
        residual = np.zeros(layout.elements, np.float32) if terms.has_feedback else None
        return IslandFragment(
            index=index, layout=layout, state=state, up=terms.up, residual=residual
        )

    def hold(self, slot: IslandFragment, number: int) -> F32:
        local = self.buffers.vector(slot.layout.elements)
        self._view.read(slot.index, local)
        return local

    def take(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        mode: str,
        *,
        keep_local: float,
    ) -> None:
        if mode == "replace":
            self._view.write(slot.index, slot.state.anchor)
            return
        local = self.buffers.vector(slot.layout.elements)
        self._view.read(slot.index, local)
        adopt(
            slot.layout,
            mode,
            slot.state.anchor,
            local,
            sealed.base,
            keep_local=keep_local,
        )
        self._view.write(slot.index, local)
        self.buffers.give_back(local)

    def forget(self, sealed: UpdateInFlight) -> None:
        self.buffers.give_back(sealed.base)

    def measure(self, slot: IslandFragment) -> bytes:
        state = slot.state
        return state_digest(state.anchor, state.moments, state.count)

    def seal(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        *,
        seed: int,
        decay: float,
        is_difference: bool,
    ) -> tuple[np.ndarray, float]:
        elements = slot.layout.elements
        body = self.buffers.body(slot.up.body_bytes(elements))
        if slot.residual is not None:
            sealed.residual_after = self.buffers.vector(elements)
        try:
            norm = seal(
                slot.layout,
                None if is_difference else slot.state.anchor,
                sealed.base,
                body,
                up=slot.up,
                seed=seed,
                residual=slot.residual,
                residual_after=sealed.residual_after,
                decay=decay,
            )
        except BaseException:
            self.buffers.give_back(body)
            raise
        return body, norm

    def keep_loaded(self, slot: IslandFragment, sealed: UpdateInFlight) -> None:
        slot.layout.load(slot.state.anchor, sealed.base)

    def apply(self, slot: IslandFragment, agreed: Frame) -> None:
        slot.state.apply(agreed.header, agreed.body)

    def replace(self, slot: IslandFragment, state: FragmentState) -> None:
        slot.state = state

    def settle(
        self, slot: IslandFragment, sealed: UpdateInFlight, verdict: Verdict
    ) -> None:
        self.settle_residual(slot, sealed, verdict)
        if sealed.frame is not None and sealed.frame.header.elements:
            self.buffers.give_back(sealed.frame.body)

    def since(
        self,
        slot: IslandFragment,
        flying: UpdateInFlight,
        rest: UpdateInFlight,
        *,
        is_settled: bool,
    ) -> None:
        if not is_settled:
            slot.residual = flying.residual_after
        np.subtract(flying.base, rest.base, out=rest.base)

    def has_left_over(self, slot: IslandFragment) -> bool:
        return slot.has_left_over()

    def whole(self, slot: IslandFragment) -> FragmentState:
        return slot.state

    def saving(
        self,
        slots: Sequence[IslandFragment],
        sync: SyncSection,
        *,
        trained: tuple[int, int],
        is_exact: bool,
    ) -> list[SavedFragment]:
        return fragments_of(slots, self._view, sync, trained=trained, is_exact=is_exact)

    def as_work(self, saved: SavedIsland, sync: SyncSection) -> SavedIsland:
        trained = saved.inner_steps, saved.tokens
        work = as_work(saved.fragments, self._layout, self._view, sync, trained=trained)
        return replace(saved, is_exact=False, fragments=work)

    def require_fitting(self, layout: Layout, saved: Sequence[SavedFragment]) -> None:
        require_sizes([fragment.elements for fragment in layout], saved)

    def resume(
        self, index: int, layout: FragmentLayout, terms: Terms, saved: SavedFragment
    ) -> IslandFragment:
        anchor, *moments = saved.vectors
        state = FragmentState(anchor, moments, round=saved.round, count=saved.count)
        return IslandFragment(
            index=index,
            layout=layout,
            state=state,
            up=terms.up,
            residual=saved.residual,
            sealed=resumed_update(index, saved),
        )

    def remake(
        self, slot: IslandFragment, saved: SavedFragment, *, seed: int, decay: float
    ) -> tuple[np.ndarray, float]:
        with remaking(slot, saved) as sealed:
            return self.seal(slot, sealed, seed=seed, decay=decay, is_difference=True)

    def give(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        difference = difference_left(saved, remaining)
        if difference is None:
            return
        local = np.empty(slot.layout.elements, np.float32)
        self._view.read(slot.index, local)
        local += difference
        self._view.write(slot.index, local)

    def leave_over(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        residual = residual_left(saved, remaining)
        if slot.residual is not None and residual is not None:
            slot.residual = residual.copy()

    def settle_residual(
        self, slot: IslandFragment, sealed: UpdateInFlight, verdict: Verdict
    ) -> None:
        """Keep the new residual if the update counted, else the one before it.

        The verdict decides, not the decision about the work: an update that counted
        many rounds ago contains the old residual, though the work since is dropped.
        """
        if slot.residual is None:
            return
        if verdict is Verdict.COUNTED:
            slot.residual, sealed.residual_after = sealed.residual_after, slot.residual
        elif verdict is Verdict.REFUSED:
            slot.residual[:] = 0.0
        self.buffers.give_back(sealed.residual_after)
        sealed.residual_after = None


class HostBuffers:
    """A pool of vectors. Any thread may call it."""

    def __init__(self) -> None:
        self._free: dict[tuple[type, int], list[np.ndarray]] = defaultdict(list)
        self._lock = threading.Lock()

    def vector(self, elements: int) -> F32:
        """Return an uninitialised fp32 vector."""
        return self._take(np.float32, elements)

    def body(self, size_bytes: int) -> np.ndarray:
        """Return an uninitialised byte vector."""
        return self._take(np.uint8, size_bytes)

    def give_back(self, *buffers: np.ndarray | None) -> None:
        """Make buffers available again; None is ignored."""
        with self._lock:
            for buffer in buffers:
                if buffer is not None:
                    self._free[buffer.dtype.type, len(buffer)].append(buffer)

    def _take(self, dtype: type, length: int) -> np.ndarray:
        with self._lock:
            free = self._free[dtype, length]
            if free:
                return free.pop()
        return np.empty(length, dtype)


def resumed_update(index: int, saved: SavedFragment) -> UpdateInFlight | None:
    """Return a fragment's update in flight from a checkpoint.

    Its number is below all numbers that this incarnation assigns.
    """
    update = saved.update
    if update is None:
        return None
    return UpdateInFlight(
        number=-1 - index,
        round=update.round,
        base=update.base,
        inner_steps=update.inner_steps,
        tokens=update.tokens,
        weight=update.weight,
        arrival=Future(),
        is_awaited=update.is_awaited,
        residual_after=update.residual_after,
    )


@contextmanager
def remaking(slot: IslandFragment, saved: SavedFragment) -> Iterator[UpdateInFlight]:
    """Give a slot the residual it had when a saved update was being sealed.

    The update is the negated saved difference, exactly. So its bytes are those that the
    earlier incarnation sent, if it did.
    """
    update = saved.update
    assert update is not None
    sealed = UpdateInFlight(
        round=update.round,
        base=-update.base,
        inner_steps=update.inner_steps,
        tokens=update.tokens,
        weight=update.weight,
        arrival=Future(),
    )
    residual = slot.residual
    if residual is not None and saved.residual is not None:
        slot.residual = saved.residual
    try:
        yield sealed
    finally:
        slot.residual = residual
    update.residual_after = sealed.residual_after


def require_sizes(sizes: Sequence[int], saved: Sequence[SavedFragment]) -> None:
    """Return if saved vectors have these sizes.

    Raises:
        UsageError: they belong to another model, or another part of it.
    """
    saved_sizes = [_elements(fragment) for fragment in saved]
    if saved_sizes != list(sizes):
        raise UsageError(
            f"The checkpoint has fragments of {saved_sizes} elements, and the run of "
            f"{list(sizes)}: it is of another model, or of one that is sharded "
            "differently. Give this island another directory."
        )


def _elements(saved: SavedFragment) -> int:
    vector = saved.vectors[0] if saved.vectors else saved.difference
    return 0 if vector is None else len(vector)


def load_kernels(settings: RunSettings) -> None:
    """Load, or compile, the kernels of a run that has these settings.

    Takes seconds, once in a process; processes forked afterwards have them, too.
    """
    kernels.warm(
        up=settings.wire.up,
        down=settings.wire.down,
        optimizer=settings.outer.optimizer,
    )
