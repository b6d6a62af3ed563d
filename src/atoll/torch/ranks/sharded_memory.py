"""The memory of an island with weights on many ranks.

Every rank has one, with its parts of all fragments. The leader's implements
`IslandMemory`: its host calls it like the memory of one process, each marked method
runs on all ranks, and the leader assembles one fragment at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from atoll import wire
from atoll.errors import CorruptError
from atoll.exchange import Frame
from atoll.island.fragment import IslandFragment, SealTerms, UpdateInFlight
from atoll.island.memory import WholeMemory
from atoll.island.saved_state import SavedFragment, SavedIsland
from atoll.protocol.island import RemainingWork
from atoll.settings import RunSettings
from atoll.torch.ranks import fragments
from atoll.torch.ranks.channel import FirstError
from atoll.torch.ranks.dispatcher import (
    OnlyLeader,
    RankDispatcher,
    Thread,
    on_all_ranks,
)
from atoll.torch.ranks.ownership import Ownership
from atoll.torch.ranks.view import RankView
from atoll.weights import FragmentState, Layout
from atoll.weights.layout import F32, blocks
from atoll.weights.local import encode, want
from atoll.weights.state import OuterStep, kernel_of
from atoll.weights.verify import Norm
from atoll.wire import Verdict

FindOwnership = Callable[[RunSettings], Ownership]
"""Returns the owners of all elements in a run with these settings."""


class ShardedMemory:
    """Weights on several ranks: the parts of one of them."""

    def __init__(
        self,
        ranks: RankDispatcher,
        view: RankView,
        find_ownership: FindOwnership,
        saved: Sequence[SavedFragment] = (),
    ) -> None:
        self.ranks, self._view, self._find_ownership = ranks, view, find_ownership
        self._memory = WholeMemory(view)
        self._slots: dict[int, IslandFragment] = {}
        """This rank's part of each fragment. Those of the leader's host share the
        state, whose digest there is that of the whole fragment."""

        self._updates: dict[int, UpdateInFlight] = {}
        """This rank's parts of the updates in flight, by number."""

        self._saved = list(saved)
        self._settings: RunSettings | None = None
        self.snapshot: list[SavedFragment] = []
        """The last parts that a rank has saved, unless it is the leader."""

        self.before_seal: Callable[[int, int], None] = _ignore
        """Called before updates are sealed, with the island's inner steps, and those
        that are settled."""

        ranks.refer(
            IslandFragment, lambda slot: slot.index, lambda index: self._slots[index]
        )
        ranks.refer(
            UpdateInFlight, lambda sealed: sealed.number, self._updates.__getitem__
        )
        ranks.refer(
            SavedFragment, lambda saved: saved.index, lambda index: self._saved[index]
        )
        ranks.refer(Sequence[IslandFragment], _summaries, self._filled)
        ranks.register(self)

    @property
    def settings(self) -> RunSettings:
        """The run's settings, once the island has joined."""
        assert self._settings is not None, "nothing has been laid out"
        return self._settings

    def lay_out(self, layout: Layout, settings: RunSettings) -> None:
        self.lay_out_parts(settings)

    @on_all_ranks(Thread.TRAINING)
    def lay_out_parts(self, settings: RunSettings) -> None:
        """Set the layout of each rank's parts."""
        ownership, rank = self._find_ownership(settings), self.ranks.orders.rank
        indices = range(len(ownership.layout))
        parts = tuple(ownership.part(rank, index) for index in indices)
        self._memory.lay_out(parts, settings)
        self._parts, self._settings = fragments.FragmentParts(ownership, rank), settings

    def begin(self, index: int, state: FragmentState | None) -> IslandFragment:
        part = self.begin_part(index, state, founds=state is None)
        layout = self._parts.ownership.layout[index]
        slot = IslandFragment(
            index=index, layout=layout, state=part.state, up=part.up, residual=None
        )
        slot.state.digest = state.digest if state is not None else self.measure(slot)
        slot.note_held()
        return slot

    @on_all_ranks(Thread.TRAINING)
    def begin_part(
        self, index: int, state: OnlyLeader[FragmentState], *, founds: bool
    ) -> IslandFragment:
        """Found a fragment on the live weights, or take the leader's state of it."""
        part = None if founds else self._scatter(index, state, in_call=True)
        self._slots[index] = self._memory.begin(index, part)
        return self._slots[index]

    @on_all_ranks(Thread.TRAINING)
    def hold(self, slot: IslandFragment, number: int) -> F32:
        base = self._memory.hold(self._slots[slot.index], number)
        if not self.ranks.is_leader:  # the leader's host has the update
            self._updates[number] = UpdateInFlight(
                number=number,
                round=0,
                base=base,
                inner_steps=0,
                tokens=0,
                weight=1,
                arrival=Future(),
            )
        return base

    @on_all_ranks(Thread.TRAINING)
    def take(self, slot: IslandFragment, sealed: UpdateInFlight, mode: str) -> None:
        self._memory.take(self._slots[slot.index], sealed, mode)

    @on_all_ranks(Thread.TRAINING)
    def forget(self, sealed: UpdateInFlight) -> None:
        self._memory.forget(sealed)
        self._updates.pop(sealed.number, None)

    @on_all_ranks(Thread.TRAINING)
    def give(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        self._memory.give(self._slots[slot.index], saved, remaining)

    def seal(
        self, slot: IslandFragment, sealed: UpdateInFlight, terms: SealTerms
    ) -> tuple[np.ndarray, float]:
        body = self._memory.buffers.body(slot.up.body_bytes(slot.layout.elements))
        try:
            norm = self.seal_parts(slot, sealed, terms, body)
        except BaseException:
            self._memory.buffers.give_back(body)
            raise
        return body, norm

    @on_all_ranks(Thread.BACKGROUND)
    def seal_parts(
        self,
        slot: IslandFragment,
        sealed: UpdateInFlight,
        terms: SealTerms,
        body: OnlyLeader[np.ndarray],
    ) -> float:
        """Fill the leader's body with an update of all parts; return its norm.

        Raises:
            NonFinite: at the leader. The message has the parameter.
        """
        return self._seal(slot.index, sealed, terms, body)

    def apply(self, slot: IslandFragment, agreed: Frame) -> None:
        state, header = slot.state, agreed.header
        state.require_next(header, elements=slot.layout.elements)
        if header.elements:
            step = OuterStep.of(header, state.count)
            state.count = step.count
            state.digest = bytes(len(state.digest))
            # The leader computes the mean of several bodies, and sends it in fp32.
            down = "fp32" if header.num_bodies > 1 else header.codec
            self.step(slot, agreed, down=down, step=step)
            state.digest = self.measure(slot)
        state.round = header.round

    @on_all_ranks(Thread.BACKGROUND)
    def step(
        self,
        slot: IslandFragment,
        agreed: OnlyLeader[Frame],
        *,
        down: str,
        step: OuterStep,
    ) -> None:
        """Take an outer step by the leader's outcome, whose mean comes in `down`.

        Raises:
            CorruptError: the body does not decode; the part is then unusable.
        """
        index, first_error = slot.index, FirstError()
        kernel = kernel_of(slot.state.vectors, step)
        begin = None if agreed is None else partial(self._fill, index, agreed)
        for cut, values in self._parts.decoded(
            self.ranks.works, index, down, begin, first_error
        ):
            mean = np.ascontiguousarray(values[cut.positions])
            first_error.attempt(partial(kernel, cut.compact, mean))
        first_error.finish()

    def _fill(self, index: int, agreed: Frame) -> fragments.Fill:
        """Return the function that fills the pieces that the leader sends."""
        if agreed.header.num_bodies > 1:
            layout = self._parts.ownership.layout[index]
            return fragments.averaged(agreed, layout)
        return fragments.copied(agreed.header.codec, agreed.body)

    def replace(self, slot: IslandFragment, state: FragmentState) -> None:
        if len(state.anchor) != slot.layout.elements:
            raise CorruptError(
                f"The state of fragment {slot.index} has {len(state.anchor)} elements, "
                f"and the fragment {slot.layout.elements}. Ask for the state again."
            )
        self.replace_part(slot, state)
        slot.state.digest = state.digest

    @on_all_ranks(Thread.BACKGROUND)
    def replace_part(
        self, slot: IslandFragment, state: OnlyLeader[FragmentState]
    ) -> None:
        """Take the leader's state of a fragment."""
        part = self._scatter(slot.index, state, in_call=False)
        slot.state = self._slots[slot.index].state = part

    @on_all_ranks(Thread.BACKGROUND)
    def settle(
        self, slot: IslandFragment, sealed: UpdateInFlight, verdict: Verdict
    ) -> None:
        self._memory.settle(self._slots[slot.index], sealed, verdict)

    @on_all_ranks(Thread.BACKGROUND)
    def measure(self, slot: IslandFragment) -> bytes:
        """Return the digest of the whole fragment's state, at the leader."""
        return self._parts.measure(
            self.ranks.works, slot.index, slot.state.vectors, count=slot.state.count
        )

    def whole(self, slot: IslandFragment) -> FragmentState:
        state = slot.state
        anchor, *moments = self.gathered(slot, len(state.vectors))
        return FragmentState(anchor, moments, round=state.round, count=state.count)

    def gathered(self, slot: IslandFragment, count: int) -> list[F32]:
        """Return the first vectors of a fragment's state, from all ranks."""
        vectors = [np.empty(slot.layout.elements, np.float32) for _ in range(count)]
        self.gather(slot, count, vectors)
        return vectors

    @on_all_ranks(Thread.BACKGROUND)
    def gather(
        self, slot: IslandFragment, count: int, out: OnlyLeader[list[F32]]
    ) -> None:
        """Fill the leader's vectors with the first ones of all parts' states."""
        vectors = slot.state.vectors[:count]
        self._parts.gather(self.ranks.works, slot.index, vectors, out=out)

    @on_all_ranks(Thread.BACKGROUND)
    def keep_loaded(self, slot: IslandFragment, sealed: UpdateInFlight) -> None:
        self._memory.keep_loaded(self._slots[slot.index], sealed)

    @on_all_ranks(Thread.BACKGROUND)
    def since(
        self,
        slot: IslandFragment,
        in_flight: UpdateInFlight,
        rest: UpdateInFlight,
        *,
        is_settled: bool,
    ) -> None:
        part = self._slots[slot.index]
        self._memory.since(part, in_flight, rest, is_settled=is_settled)

    def has_left_over(self, slot: IslandFragment) -> bool:
        in_flight = slot.sealed
        is_in_flight = in_flight is not None and in_flight.outcome is None
        return self.has_residual(slot, in_flight if is_in_flight else None)

    @on_all_ranks(Thread.BACKGROUND, combine=any)
    def has_residual(
        self, slot: IslandFragment, in_flight: UpdateInFlight | None
    ) -> bool:
        """Return whether any part has a residual: after an update in flight, if any."""
        residual = self._slots[slot.index].residual
        if in_flight is not None:
            residual = in_flight.residual_after
        return residual is not None and bool(residual.any())

    def unseal(self, slot: IslandFragment, saved: SavedFragment) -> None:
        assert saved.update is not None
        frame = saved.update.frame
        assert frame is not None
        if frame.header.elements:
            self.unseal_parts(slot, saved, frame, up=frame.header.codec)

    @on_all_ranks(Thread.BACKGROUND)
    def unseal_parts(
        self,
        slot: IslandFragment,
        saved: SavedFragment,
        frame: OnlyLeader[Frame],
        *,
        up: str,
    ) -> None:
        """Give each rank its part of the leader's update: see `unseal`."""
        index, first_error = slot.index, FirstError()
        sent = np.empty(self._slots[index].layout.elements, np.float32)
        begin = partial(fragments.copied, up, frame.body) if frame else None
        for cut, values in self._parts.decoded(
            self.ranks.works, index, up, begin, first_error
        ):
            sent[cut.compact] = values[cut.positions]
        first_error.finish()
        self._memory.put_back(saved, sent)

    @on_all_ranks(Thread.BACKGROUND)
    def leave_over(
        self, slot: IslandFragment, saved: SavedFragment, remaining: RemainingWork
    ) -> None:
        self._memory.leave_over(self._slots[slot.index], saved, remaining)

    @on_all_ranks(Thread.TRAINING)
    def saving(
        self,
        slots: Sequence[IslandFragment],
        *,
        trained: tuple[int, int],
        is_exact: bool,
    ) -> list[SavedFragment]:
        """Return this rank's part, which the other ranks keep as `snapshot`."""
        pairs = [(slot, self._slots[slot.index]) for slot in slots]
        parts = [
            replace(slot, layout=part.layout, residual=part.residual)
            for slot, part in pairs
        ]
        saved = self._memory.saving(parts, trained=trained, is_exact=is_exact)
        if not self.ranks.is_leader:
            self.snapshot = saved
        return saved

    def as_work(self, saved: SavedIsland) -> SavedIsland:
        self.make_work(trained=(saved.inner_steps, saved.tokens))
        return replace(saved, is_exact=False, fragments=self._saved)

    @on_all_ranks(Thread.TRAINING)
    def make_work(self, *, trained: tuple[int, int]) -> None:
        """Replace the saved parts by their work: see `as_work`."""
        self._saved = self._memory.work_of(self._saved, trained=trained)

    def require_fitting(self, saved: Sequence[SavedFragment]) -> None:
        self._saved = list(saved)
        self.require_parts_fit()

    @on_all_ranks(Thread.BACKGROUND)
    def require_parts_fit(self) -> None:
        """Return if each rank has saved parts of its layout."""
        self._memory.require_fitting(self._saved)

    def resume(self, saved: SavedFragment) -> IslandFragment:
        part = self.resume_part(saved)
        layout = self._parts.ownership.layout[saved.index]
        slot = replace(part, layout=layout, residual=None)
        # The digest of the whole fragment, as in `begin`.
        slot.state.digest = saved.digest
        slot.note_held()
        return slot

    @on_all_ranks(Thread.TRAINING)
    def resume_part(self, saved: SavedFragment) -> IslandFragment:
        """Restore a fragment's part; return it with its update in flight."""
        part = self._memory.resume(saved)
        self._slots[saved.index] = replace(part, sealed=None)
        if part.sealed is not None:
            self._updates[part.sealed.number] = part.sealed
        return part

    @on_all_ranks(Thread.TRAINING)
    def show_anchor(self, slot: IslandFragment) -> None:
        """Put the anchor of a fragment into the model."""
        self._view.write(slot.index, slot.state.anchor)

    @on_all_ranks(Thread.TRAINING)
    def note_seal(self, steps: int, settled: int) -> None:
        """Call `before_seal` on every rank."""
        self.before_seal(steps, settled)

    def _scatter(
        self, index: int, state: FragmentState | None, *, in_call: bool
    ) -> FragmentState:
        """Return this rank's part of the leader's state; the others pass None."""
        channel = self.ranks.orders if in_call else self.ranks.works
        count = 1 + wire.MOMENTS[self._memory.terms[index].outer.optimizer]
        return self._parts.scatter(channel, index, state, count=count)

    def _seal(
        self,
        index: int,
        sealed: UpdateInFlight,
        terms: SealTerms,
        body: np.ndarray | None,
    ) -> float:
        slot, parts, channel = self._slots[index], self._parts, self.ranks.works
        first_error = FirstError()
        if slot.residual is not None:
            sealed.residual_after = self._memory.buffers.vector(len(slot.residual))
        writer = UpdateWriter(parts.ownership, index, slot, terms.seed, body)
        for first, last in parts.chunks(index):
            cut = parts.cut(index, first, last)
            values = np.empty(cut.size, np.float32)
            want(
                slot.layout,
                None if terms.is_difference else slot.state.anchor,
                sealed.base[cut.compact],
                cut.compact,
                values,
                residual=slot.residual,
                decay=terms.decay,
            )
            if sealed.residual_after is not None:
                sealed.residual_after[cut.compact] = values
            chunk = np.empty(last - first, np.float32) if parts.is_leader else None
            parts.collect(channel, index, first, last, values, chunk)
            if chunk is not None:
                first_error.attempt(partial(writer.write, first, chunk))
        if sealed.residual_after is not None:
            self._subtract_sent(index, sealed.residual_after, body)
        first_error.finish()
        return writer.norm.value()

    def _subtract_sent(self, index: int, wanted: F32, body: np.ndarray | None) -> None:
        """Subtract from `wanted` the part of it that the codec has sent."""
        up, first_error = self._memory.terms[index].up.name, FirstError()
        begin = None if body is None else partial(fragments.copied, up, body)
        for cut, sent in self._parts.decoded(
            self.ranks.works, index, up, begin, first_error
        ):
            residual = wanted[cut.compact]
            np.subtract(residual, sent[cut.positions], out=residual)

    def _filled(
        self, summaries: list[tuple[int, fragments.FragmentSummary]]
    ) -> list[IslandFragment]:
        """Return this rank's slots with the facts of the leader's."""
        saved = dict(enumerate(self._saved))
        return [
            fragments.filled(
                self._slots[i], facts, self._updates.__getitem__, saved.get(i)
            )
            for i, facts in summaries
        ]


def _summaries(
    slots: Sequence[IslandFragment],
) -> list[tuple[int, fragments.FragmentSummary]]:
    return [(slot.index, fragments.summary_of(slot)) for slot in slots]


def _ignore(steps: int, settled: int) -> None:
    """Do nothing before updates are sealed."""


class UpdateWriter:
    """Encodes a fragment chunk by chunk, as `weights.seal` does block by block."""

    def __init__(
        self,
        ownership: Ownership,
        index: int,
        slot: IslandFragment,
        seed: int,
        body: np.ndarray | None,
    ) -> None:
        self._layout, self._up, self._seed = ownership.layout[index], slot.up, seed
        self._body, self.norm = body, Norm()

    def write(self, first: int, values: F32) -> None:
        """Encode values from element `first` on, and add their decoded norm."""
        assert self._body is not None
        sent = np.empty(min(wire.STATE_PIECE, len(values)), np.float32)
        for block in blocks(len(values)):
            chunk, start = values[block], first + block.start
            encode(self._layout, self._up, chunk, self._body, start, self._seed)
            decoded = sent[: len(chunk)]
            self._up.decode(self._body, decoded, first=start)
            self.norm.add(decoded)
