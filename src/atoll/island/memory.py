"""The memory of an island's weights: anchor, velocity and residual of its fragments.

`WholeMemory` keeps all weights in this process. Host buffers are reused, because the
first touch of fresh memory costs more than a copy.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from atoll import kernels
from atoll.errors import UsageError
from atoll.exchange import Frame
from atoll.island.base import ParameterView
from atoll.island.fragment import IslandFragment, SealTerms, UpdateInFlight
from atoll.island.saved_state import (
    SavedFragment,
    SavedIsland,
    difference_left,
    residual_left,
)
from atoll.island.snapshot import as_work, fragments_of
from atoll.protocol.island import RemainingWork
from atoll.settings import RunSettings
from atoll.weights import FragmentState, Layout, Terms, adopt, seal, terms_of
from atoll.weights.layout import F32
from atoll.wire import Verdict, codec, state_digest


class WholeMemory:
    """All of the weights in this process. Implements `IslandMemory`."""

    def __init__(self, view: ParameterView) -> None:
        self._view, self.buffers = view, HostBuffers()
        self.layout: Layout = ()
        self.terms: list[Terms] = []
        """Per fragment, the run's terms for it."""

    def lay_out(self, layout: Layout, settings: RunSettings) -> None:
        self._view.lay_out(layout)
        self.layout, self._sync = layout, settings.sync
        self.terms = [terms_of(fragment, settings) for fragment in layout]

    def begin(self, index: int, state: FragmentState | None) -> IslandFragment:
        layout, terms = self.layout[index], self.terms[index]
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

    def take(self, slot: IslandFragment, sealed: UpdateInFlight, mode: str) -> None:
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
            keep_local=self._sync.keep_local,
        )
        self._view.write(slot.index, local)
        self.buffers.give_back(local)

    def forget(self, sealed: UpdateInFlight) -> None:
        self.buffers.give_back(sealed.base)

    def measure(self, slot: IslandFragment) -> bytes:
        state = slot.state
        return state_digest(state.anchor, state.moments, state.count)

    def seal(
        self, slot: IslandFragment, sealed: UpdateInFlight, terms: SealTerms
    ) -> tuple[np.ndarray, float]:
        elements = slot.layout.elements
        body = self.buffers.body(slot.up.body_bytes(elements))
        if slot.residual is not None:
            sealed.residual_after = self.buffers.vector(elements)
        try:
            norm = seal(
                slot.layout,
                None if terms.is_difference else slot.state.anchor,
                sealed.base,
                body,
                up=slot.up,
                seed=terms.seed,
                residual=slot.residual,
                residual_after=sealed.residual_after,
                decay=terms.decay,
            )
        except BaseException:
            self.buffers.give_back(body)
            raise
        return body, norm

    def keep_loaded(self, slot: IslandFragment, sealed: UpdateInFlight) -> None:
        slot.layout.load(slot.state.anchor, sealed.base)

    def apply(self, slot: IslandFragment, agreed: Frame) -> None:
        slot.state.apply(agreed.header, agreed.body, layout=slot.layout)

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
        in_flight: UpdateInFlight,
        rest: UpdateInFlight,
        *,
        is_settled: bool,
    ) -> None:
        if not is_settled:
            slot.residual = in_flight.residual_after
        np.subtract(in_flight.base, rest.base, out=rest.base)

    def has_left_over(self, slot: IslandFragment) -> bool:
        return slot.has_left_over()

    def whole(self, slot: IslandFragment) -> FragmentState:
        return slot.state

    def saving(
        self,
        slots: Sequence[IslandFragment],
        *,
        trained: tuple[int, int],
        is_exact: bool,
    ) -> list[SavedFragment]:
        return fragments_of(
            slots, self._view, self._sync, trained=trained, is_exact=is_exact
        )

    def as_work(self, saved: SavedIsland) -> SavedIsland:
        trained = saved.inner_steps, saved.tokens
        work = self.work_of(saved.fragments, trained=trained)
        return replace(saved, is_exact=False, fragments=work)

    def work_of(
        self, saved: Sequence[SavedFragment], *, trained: tuple[int, int]
    ) -> list[SavedFragment]:
        """Return the work of exactly saved fragments: see `snapshot.as_work`."""
        return as_work(saved, self.layout, self._view, self._sync, trained=trained)

    def require_fitting(self, saved: Sequence[SavedFragment]) -> None:
        sizes = [fragment.elements for fragment in self.layout]
        saved_sizes = [_elements(fragment) for fragment in saved]
        if saved_sizes != sizes:
            raise UsageError(
                f"The checkpoint has fragments of {saved_sizes} elements, and the run "
                f"of {sizes}: it is of another model, or of one that is sharded "
                "differently. Give this island another directory."
            )

    def resume(self, saved: SavedFragment) -> IslandFragment:
        anchor, *moments = saved.vectors
        state = FragmentState(anchor, moments, round=saved.round, count=saved.count)
        return IslandFragment(
            index=saved.index,
            layout=self.layout[saved.index],
            state=state,
            up=self.terms[saved.index].up,
            residual=saved.residual,
            sealed=resumed_update(saved),
        )

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

    def unseal(self, slot: IslandFragment, saved: SavedFragment) -> None:
        assert saved.update is not None
        frame = saved.update.frame
        assert frame is not None
        if frame.header.elements:
            sent = np.empty(slot.layout.elements, np.float32)
            codec(frame.header.codec).decode(frame.body, sent)
            self.put_back(saved, sent)

    def put_back(self, saved: SavedFragment, sent: F32) -> None:
        """Make `sent` the saved work up to the seal, in the direction of descent."""
        update = saved.update
        assert update is not None
        assert saved.difference is not None
        saved.difference = saved.difference - update.base - sent
        update.base = -sent
        saved.residual = update.residual_after

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


def resumed_update(saved: SavedFragment) -> UpdateInFlight | None:
    """Return a fragment's update in flight from a checkpoint.

    Its number is below all numbers that this incarnation assigns.
    """
    update = saved.update
    if update is None:
        return None
    return UpdateInFlight(
        number=-1 - saved.index,
        round=update.round,
        base=update.base,
        inner_steps=update.inner_steps,
        tokens=update.tokens,
        weight=update.weight,
        arrival=Future(),
        is_awaited=update.is_awaited,
        residual_after=update.residual_after,
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
        down=settings.wire.mean_codec,
        optimizer=settings.outer.optimizer,
        is_async=settings.sync.is_async,
    )
