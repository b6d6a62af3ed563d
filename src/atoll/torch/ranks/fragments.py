"""The operations of a rank on its part of a fragment, which all ranks do together.

Every rank calls the same methods in the same order, on one channel per thread; only the
leader has whole fragments, one at a time, and ends with the result. A rank that fails
still sends the vectors that the others wait for, and reports its error at the end, so
that no rank waits forever. A summary describes saved fragments without their vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from atoll import wire
from atoll.island.fragment import HeldBackWork, IslandFragment, UpdateInFlight
from atoll.island.memory import WholeMemory, remaking
from atoll.island.saved_state import (
    AppliedOutcome,
    FragmentsWanted,
    SavedFragment,
    SavedIsland,
)
from atoll.protocol import WorkDecision
from atoll.protocol.island import RemainingWork
from atoll.torch.ranks.channel import LEADER, FirstError, RankChannel
from atoll.torch.ranks.ownership import Ownership
from atoll.torch.ranks.view import CHUNK, RankView
from atoll.weights import FragmentState, Layout, Terms
from atoll.weights.layout import F32, blocks
from atoll.weights.local import encode, want
from atoll.weights.state import kernel_of
from atoll.weights.verify import Norm


@dataclass
class RankFragments:
    """The parts of all fragments that one rank owns."""

    view: RankView
    rank: int
    ownership: Ownership
    terms: list[Terms]
    slots: dict[int, IslandFragment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = WholeMemory(self.view)

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    def begin(
        self,
        channel: RankChannel,
        index: int,
        state: FragmentState | None,
        *,
        founds: bool,
    ) -> IslandFragment:
        """Found a fragment on the live weights, or take the leader's state of it."""
        layout = self.ownership.part(self.rank, index)
        part = None if founds else self.scatter(channel, index, state)
        slot = self.memory.begin(index, layout, self.terms[index], part)
        self.slots[index] = slot
        return slot

    def scatter(
        self, channel: RankChannel, index: int, state: FragmentState | None
    ) -> FragmentState:
        """Return this rank's part of the leader's state; the others pass None."""
        ranges = self.ownership.owned(self.rank, index)
        count = 1 + wire.MOMENTS[self.terms[index].outer.optimizer]
        vectors = [np.empty(ranges.elements, np.float32) for _ in range(count)]
        for number in range(count):
            full = state.vectors[number] if state is not None else None
            for first, last in self._chunks(index):
                values = np.empty(last - first, np.float32)
                if full is not None:
                    values[:] = full[first:last]
                channel.broadcast_vector(values)
                cut = ranges.cut(first, last)
                vectors[number][cut.compact] = values[cut.positions]
        round, step = (state.round, state.count) if state is not None else (0, 0)
        return FragmentState(vectors[0], vectors[1:], round=round, count=step)

    def gather(
        self,
        channel: RankChannel,
        index: int,
        vectors: Sequence[F32],
        *,
        out: Sequence[F32] | None,
    ) -> None:
        """Fill the leader's vectors of a whole fragment with the parts of all ranks."""
        for number, vector in enumerate(vectors):
            for first, last in self._chunks(index):
                cut = self.ownership.owned(self.rank, index).cut(first, last)
                chunk = None if out is None else out[number][first:last]
                self._collect(channel, index, first, last, vector[cut.compact], chunk)

    def seal(
        self,
        channel: RankChannel,
        index: int,
        sealed: UpdateInFlight,
        *,
        seed: int,
        decay: float,
        is_difference: bool,
        body: np.ndarray | None,
    ) -> float:
        """Fill the leader's body with an update of all parts; return its norm.

        Raises:
            NonFinite: at the leader. The message has the parameter.
        """
        slot, first_error = self.slots[index], FirstError()
        if slot.residual is not None:
            sealed.residual_after = self.memory.buffers.vector(len(slot.residual))
        writer = _Writer(self.ownership, index, slot, seed, body)
        for first, last in self._chunks(index):
            cut = self.ownership.owned(self.rank, index).cut(first, last)
            values = np.empty(cut.size, np.float32)
            anchor = None if is_difference else slot.state.anchor
            want(
                slot.layout,
                anchor,
                sealed.base[cut.compact],
                cut.compact,
                values,
                residual=slot.residual,
                decay=decay,
            )
            if sealed.residual_after is not None:
                sealed.residual_after[cut.compact] = values
            chunk = np.empty(last - first, np.float32) if self.is_leader else None
            self._collect(channel, index, first, last, values, chunk)
            if chunk is not None:
                first_error.attempt(partial(writer.write, first, chunk))
        if sealed.residual_after is not None:
            self._subtract_sent(channel, index, sealed.residual_after, body)
        first_error.finish()
        return writer.norm.value()

    def remake(
        self,
        channel: RankChannel,
        index: int,
        saved: SavedFragment,
        *,
        seed: int,
        decay: float,
        body: np.ndarray | None,
    ) -> float:
        """Seal a saved update again: see `Memory.remake`."""
        with remaking(self.slots[index], saved) as sealed:
            return self.seal(
                channel,
                index,
                sealed,
                seed=seed,
                decay=decay,
                is_difference=True,
                body=body,
            )

    def resume(self, index: int, saved: SavedFragment) -> IslandFragment:
        """Restore a fragment's part; return it with its update in flight."""
        terms = self.terms[index]
        slot = self.memory.resume(index, self.layout[index], terms, saved)
        self.slots[index] = replace(slot, sealed=None)
        return slot

    @property
    def layout(self) -> Layout:
        """This rank's parts of all fragments."""
        indices = range(len(self.ownership.layout))
        return tuple(self.ownership.part(self.rank, index) for index in indices)

    def step(
        self,
        channel: RankChannel,
        index: int,
        *,
        down: str,
        outer: wire.OuterValues,
        count: int,
        body: np.ndarray | None,
    ) -> None:
        """Take an outer step by the leader's body of an agreed mean.

        Raises:
            CorruptError: the body does not decode; the part is then unusable.
        """
        slot, first_error = self.slots[index], FirstError()
        step = kernel_of(slot.state.vectors, outer, count)
        for first, _, values in self._decoded(channel, index, down, body, first_error):
            cut = self.ownership.owned(self.rank, index).cut(first, first + len(values))
            mean = np.ascontiguousarray(values[cut.positions])
            first_error.attempt(partial(step, cut.compact, mean))
        first_error.finish()

    def measure(self, channel: RankChannel, index: int, *, count: int) -> bytes:
        """Return the digest of a fragment's anchor and moments, at the leader.

        A piece with one owner is hashed on that rank; the leader hashes the others.
        """
        vectors, width = self.slots[index].state.vectors, 16
        elements = self.ownership.layout[index].elements
        rows = np.zeros(
            (-(-elements // wire.STATE_PIECE), width * len(vectors)), np.uint8
        )
        lone: list[list[int]] = [[] for _ in range(channel.size)]
        for number, first in enumerate(range(0, elements, wire.STATE_PIECE)):
            last = min(first + wire.STATE_PIECE, elements)
            owner = self.ownership.owners(index)[number]
            if owner is not None:
                lone[owner].append(number)
            row = self._hashed(channel, index, first, last, vectors, owner)
            if row is not None:
                rows[number] = np.frombuffer(row, np.uint8)
        self._bring_rows(channel, rows, lone)
        return wire.state_root(
            [rows.tobytes()], elements=elements, moments=len(vectors) - 1, count=count
        )

    def _bring_rows(
        self, channel: RankChannel, rows: np.ndarray, lone: Sequence[Sequence[int]]
    ) -> None:
        for rank in channel.others if self.is_leader else [self.rank]:
            if not lone[rank]:
                continue
            picked = rows[list(lone[rank])]
            if self.is_leader:
                channel.receive_vector(rank, picked)
                rows[list(lone[rank])] = picked
            else:
                channel.send_vector(LEADER, picked)

    def _hashed(
        self,
        channel: RankChannel,
        index: int,
        first: int,
        last: int,
        vectors: Sequence[F32],
        owner: int | None,
    ) -> bytes | None:
        """Return a piece's hashes, at its only owner or else at the leader."""
        cut = self.ownership.owned(self.rank, index).cut(first, last)
        if owner is not None:
            is_mine = owner == self.rank
            return (
                wire.state_piece([v[cut.compact] for v in vectors]) if is_mine else None
            )
        chunks = [np.empty(last - first, np.float32) for _ in vectors]
        for vector, out in zip(vectors, chunks, strict=True):
            self._collect(channel, index, first, last, vector[cut.compact], out)
        return wire.state_piece(chunks) if self.is_leader else None

    def _subtract_sent(
        self, channel: RankChannel, index: int, wanted: F32, body: np.ndarray | None
    ) -> None:
        """Subtract from `wanted` the part of it that the codec has sent."""
        up, first_error = self.terms[index].up.name, FirstError()
        for first, _, sent in self._decoded(channel, index, up, body, first_error):
            cut = self.ownership.owned(self.rank, index).cut(first, first + len(sent))
            residual = wanted[cut.compact]
            np.subtract(residual, sent[cut.positions], out=residual)

    def _decoded(
        self,
        channel: RankChannel,
        index: int,
        name: str,
        body: np.ndarray | None,
        first_error: FirstError,
    ) -> Iterator[tuple[int, int, F32]]:
        """Yield blocks of the leader's body that hold elements of this rank."""
        scheme, ranges = wire.codec(name), self.ownership.owned(self.rank, index)
        scratch = np.empty(wire.STATE_PIECE, np.float32)
        for first, last in self._chunks(index):
            piece = np.empty(scheme.body_bytes(last - first), np.uint8)
            if body is not None:
                start = scheme.offset(first)
                piece[:] = body[start : start + len(piece)]
            channel.broadcast_vector(piece)
            for block in blocks(last - first):
                values = scratch[: block.stop - block.start]
                if ranges.cut(first + block.start, first + block.stop).size:
                    decode = partial(scheme.decode, piece, values)
                    first_error.attempt(partial(decode, first=block.start))
                    yield first + block.start, first + block.stop, values

    def _collect(
        self,
        channel: RankChannel,
        index: int,
        first: int,
        last: int,
        own_values: F32,
        out: F32 | None,
    ) -> None:
        """Collect the elements `first` to `last` of all ranks in the leader's `out`."""
        if not self.is_leader:
            if len(own_values):
                channel.send_vector(LEADER, own_values)
            return
        assert out is not None
        out[self.ownership.owned(self.rank, index).cut(first, last).positions] = (
            own_values
        )
        cuts = [
            (r, self.ownership.owned(r, index).cut(first, last)) for r in channel.others
        ]
        coming = [
            (r, cut, np.empty(cut.size, np.float32)) for r, cut in cuts if cut.size
        ]
        channel.exchange_vectors([], [(rank, values) for rank, _, values in coming])
        for _, cut, values in coming:
            out[cut.positions] = values

    def _chunks(self, index: int) -> Iterator[tuple[int, int]]:
        elements = self.ownership.layout[index].elements
        for first in range(0, elements, CHUNK):
            yield first, min(first + CHUNK, elements)


class _Writer:
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


FragmentSummary = dict[str, Any]


def summary_of(slot: IslandFragment) -> FragmentSummary:
    """Return the facts of a leader's slot that the other ranks need."""
    return {"update": _update(slot.sealed), "held": _held(slot.held_back)}


def filled(
    slot: IslandFragment,
    summary: FragmentSummary,
    sealed: Callable[[int], UpdateInFlight],
    saved: SavedFragment | None,
) -> IslandFragment:
    """Return a rank's slot with the leader's facts and its own vectors.

    `sealed` finds an update by its number, and `saved` is the rank's own of a
    checkpoint that the leader may hold back.
    """
    update, held_back = summary["update"], summary["held"]
    return replace(
        slot,
        sealed=_filled_update(sealed(update["number"]), update) if update else None,
        held_back=_filled_held(held_back, saved) if held_back and saved else None,
    )


def rank_part_of_island(fragments: list[SavedFragment]) -> SavedIsland:
    """Return a rank's vectors as a checkpoint keeps them; the leader's has the rest."""
    return SavedIsland(
        run="",
        island="",
        incarnation=0,
        origin=0,
        step=0,
        inner_steps=0,
        tokens=0,
        before_steps=0,
        before_tokens=0,
        is_exact=False,
        fragments=fragments,
    )


def _update(sealed: UpdateInFlight | None) -> FragmentSummary | None:
    if sealed is None:
        return None
    outcome = sealed.outcome
    return {
        "number": sealed.number,
        "round": sealed.round,
        "is_awaited": sealed.is_awaited,
        "has_bytes": sealed.has_bytes,
        "how": outcome.decision.value if outcome else None,
    }


def _filled_update(update: UpdateInFlight, summary: FragmentSummary) -> UpdateInFlight:
    arrival: Future[AppliedOutcome | FragmentsWanted] = Future()
    if summary["how"] is not None:
        arrival.set_result(
            AppliedOutcome(
                decision=WorkDecision(summary["how"]),
                verdict=wire.Verdict.COUNTED,
                reason="",
                through=summary["round"],
                position=None,
            )
        )
    return replace(
        update,
        round=summary["round"],
        is_awaited=summary["is_awaited"],
        is_part=summary["has_bytes"],
        arrival=arrival,
    )


def _held(work: HeldBackWork | None) -> FragmentSummary | None:
    if work is None:
        return None
    after = work.remaining_after
    return {
        "round": work.round,
        "most": work.remaining_before.value,
        "left": after.value if after else None,
    }


def _filled_held(summary: FragmentSummary, saved: SavedFragment) -> HeldBackWork:
    return HeldBackWork(
        round=summary["round"],
        saved=saved,
        remaining_before=RemainingWork(summary["most"]),
        progress=(0, 0),
        remaining_after=RemainingWork(summary["left"]) if summary["left"] else None,
    )
