"""The operations of a rank on its part of a fragment, which all ranks do together.

Every rank calls the same methods in the same order, each on a channel of its own
thread; only the leader has whole fragments, one at a time, and ends with the result. A
rank that fails still sends the vectors that the others wait for, and reports its error
at the end, so that no rank waits without end. An outline describes saved fragments
without their vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

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
from atoll.torch.ranks.channel import LEADER, Failing, Line
from atoll.torch.ranks.ownership import Shares
from atoll.torch.ranks.view import CHUNK, RankView
from atoll.weights import FragmentState, Layout, Terms
from atoll.weights.layout import F32, blocks
from atoll.weights.local import encode, want
from atoll.weights.state import kernel_of
from atoll.weights.verify import Norm
from atoll.wire import (
    MOMENTS,
    STATE_PIECE,
    OuterValues,
    Verdict,
    codec,
    state_piece,
    state_root,
)


@dataclass
class Parts:
    """The parts of all fragments that one rank owns."""

    view: RankView
    rank: int
    shares: Shares
    terms: list[Terms]
    slots: dict[int, IslandFragment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = WholeMemory(self.view)

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    def begin(
        self, line: Line, index: int, state: FragmentState | None, *, founds: bool
    ) -> IslandFragment:
        """Found a fragment on the live weights, or take the leader's state of it."""
        layout = self.shares.part(self.rank, index)
        own = None if founds else self.scatter(line, index, state)
        slot = self.memory.begin(index, layout, self.terms[index], own)
        self.slots[index] = slot
        return slot

    def scatter(
        self, line: Line, index: int, state: FragmentState | None
    ) -> FragmentState:
        """Return this rank's part of the leader's state, which the others lack."""
        ranges = self.shares.owned(self.rank, index)
        count = 1 + MOMENTS[self.terms[index].outer.optimizer]
        own = [np.empty(ranges.elements, np.float32) for _ in range(count)]
        for number in range(count):
            whole = state.vectors[number] if state is not None else None
            for first, last in self._chunks(index):
                values = np.empty(last - first, np.float32)
                if whole is not None:
                    values[:] = whole[first:last]
                line.spread(values)
                cut = ranges.cut(first, last)
                own[number][cut.compact] = values[cut.positions]
        round, step = (state.round, state.count) if state is not None else (0, 0)
        return FragmentState(own[0], own[1:], round=round, count=step)

    def gather(
        self, line: Line, index: int, own: Sequence[F32], *, whole: Sequence[F32] | None
    ) -> None:
        """Fill the leader's vectors of a whole fragment with everybody's parts."""
        for number, vector in enumerate(own):
            for first, last in self._chunks(index):
                cut = self.shares.owned(self.rank, index).cut(first, last)
                out = None if whole is None else whole[number][first:last]
                self._collect(line, index, first, last, vector[cut.compact], out)

    def seal(
        self,
        line: Line,
        index: int,
        sealed: UpdateInFlight,
        *,
        seed: int,
        decay: float,
        is_difference: bool,
        body: np.ndarray | None,
    ) -> float:
        """Fill the leader's body with an update of everybody's parts; return its norm.

        Raises:
            NonFinite: naming the parameter, at the leader.
        """
        slot, failing = self.slots[index], Failing()
        if slot.residual is not None:
            sealed.residual_after = self.memory.buffers.vector(len(slot.residual))
        writer = _Writer(self.shares, index, slot, seed, body)
        for first, last in self._chunks(index):
            cut = self.shares.owned(self.rank, index).cut(first, last)
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
            whole = np.empty(last - first, np.float32) if self.is_leader else None
            self._collect(line, index, first, last, values, whole)
            if whole is not None:
                failing.attempt(partial(writer.write, first, whole))
        if sealed.residual_after is not None:
            self._leave_over(line, index, sealed.residual_after, body)
        failing.finish()
        return writer.norm.value()

    def remake(
        self,
        line: Line,
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
                line,
                index,
                sealed,
                seed=seed,
                decay=decay,
                is_difference=True,
                body=body,
            )

    def resume(self, index: int, saved: SavedFragment) -> IslandFragment:
        """Let a fragment's part be as it stood; return it with its update in flight."""
        terms = self.terms[index]
        slot = self.memory.resume(index, self.layout[index], terms, saved)
        self.slots[index] = replace(slot, sealed=None)
        return slot

    @property
    def layout(self) -> Layout:
        """This rank's parts of all fragments."""
        indices = range(len(self.shares.layout))
        return tuple(self.shares.part(self.rank, index) for index in indices)

    def step(
        self,
        line: Line,
        index: int,
        *,
        down: str,
        outer: OuterValues,
        count: int,
        body: np.ndarray | None,
    ) -> None:
        """Take an outer step by the leader's body of an agreed mean.

        Raises:
            CorruptError: the body does not decode; the part is then spoilt.
        """
        slot, failing = self.slots[index], Failing()
        step = kernel_of(slot.state.vectors, outer, count)
        for first, _, values in self._decoded(line, index, down, body, failing):
            cut = self.shares.owned(self.rank, index).cut(first, first + len(values))
            mean = np.ascontiguousarray(values[cut.positions])
            failing.attempt(partial(step, cut.compact, mean))
        failing.finish()

    def measure(self, line: Line, index: int, *, count: int) -> bytes:
        """Return the digest of a fragment's anchor and moments, at the leader.

        A piece that one rank has alone is hashed there; others go to the leader.
        """
        vectors, width = self.slots[index].state.vectors, 16
        elements = self.shares.layout[index].elements
        rows = np.zeros((-(-elements // STATE_PIECE), width * len(vectors)), np.uint8)
        lone: list[list[int]] = [[] for _ in range(line.size)]
        for number, first in enumerate(range(0, elements, STATE_PIECE)):
            last = min(first + STATE_PIECE, elements)
            owner = self.shares.owners(index)[number]
            if owner is not None:
                lone[owner].append(number)
            row = self._hashed(line, index, first, last, vectors, owner)
            if row is not None:
                rows[number] = np.frombuffer(row, np.uint8)
        self._bring_rows(line, rows, lone)
        return state_root(
            [rows.tobytes()], elements=elements, moments=len(vectors) - 1, count=count
        )

    def _bring_rows(
        self, line: Line, rows: np.ndarray, lone: Sequence[Sequence[int]]
    ) -> None:
        for rank in line.others if self.is_leader else [self.rank]:
            if not lone[rank]:
                continue
            picked = rows[list(lone[rank])]
            if self.is_leader:
                line.get(rank, picked)
                rows[list(lone[rank])] = picked
            else:
                line.put(LEADER, picked)

    def _hashed(
        self,
        line: Line,
        index: int,
        first: int,
        last: int,
        vectors: Sequence[F32],
        owner: int | None,
    ) -> bytes | None:
        """Return a piece's hashes, at its only owner or else at the leader."""
        cut = self.shares.owned(self.rank, index).cut(first, last)
        if owner is not None:
            is_mine = owner == self.rank
            return state_piece([v[cut.compact] for v in vectors]) if is_mine else None
        whole = [np.empty(last - first, np.float32) for _ in vectors]
        for vector, out in zip(vectors, whole, strict=True):
            self._collect(line, index, first, last, vector[cut.compact], out)
        return state_piece(whole) if self.is_leader else None

    def _leave_over(
        self, line: Line, index: int, wanted: F32, body: np.ndarray | None
    ) -> None:
        """Let `wanted` be what the codec has not sent of it."""
        up, failing = self.terms[index].up.name, Failing()
        for first, _, sent in self._decoded(line, index, up, body, failing):
            cut = self.shares.owned(self.rank, index).cut(first, first + len(sent))
            here = wanted[cut.compact]
            np.subtract(here, sent[cut.positions], out=here)

    def _decoded(
        self,
        line: Line,
        index: int,
        name: str,
        body: np.ndarray | None,
        failing: Failing,
    ) -> Iterator[tuple[int, int, F32]]:
        """Yield blocks of the leader's body that hold elements of this rank."""
        scheme, ranges = codec(name), self.shares.owned(self.rank, index)
        scratch = np.empty(STATE_PIECE, np.float32)
        for first, last in self._chunks(index):
            piece = np.empty(scheme.body_bytes(last - first), np.uint8)
            if body is not None:
                start = scheme.offset(first)
                piece[:] = body[start : start + len(piece)]
            line.spread(piece)
            for block in blocks(last - first):
                values = scratch[: block.stop - block.start]
                if ranges.cut(first + block.start, first + block.stop).size:
                    decode = partial(scheme.decode, piece, values)
                    failing.attempt(partial(decode, first=block.start))
                    yield first + block.start, first + block.stop, values

    def _collect(
        self,
        line: Line,
        index: int,
        first: int,
        last: int,
        mine: F32,
        out: F32 | None,
    ) -> None:
        """Bring everybody's elements between two of a fragment into the leader's."""
        if not self.is_leader:
            if len(mine):
                line.put(LEADER, mine)
            return
        assert out is not None
        out[self.shares.owned(self.rank, index).cut(first, last).positions] = mine
        cuts = [(r, self.shares.owned(r, index).cut(first, last)) for r in line.others]
        coming = [
            (r, cut, np.empty(cut.size, np.float32)) for r, cut in cuts if cut.size
        ]
        line.swap([], [(rank, values) for rank, _, values in coming])
        for _, cut, values in coming:
            out[cut.positions] = values

    def _chunks(self, index: int) -> Iterator[tuple[int, int]]:
        elements = self.shares.layout[index].elements
        for first in range(0, elements, CHUNK):
            yield first, min(first + CHUNK, elements)


class _Writer:
    """Encodes a fragment chunk by chunk, as `weights.seal` does block by block."""

    def __init__(
        self,
        shares: Shares,
        index: int,
        slot: IslandFragment,
        seed: int,
        body: np.ndarray | None,
    ) -> None:
        self._layout, self._up, self._seed = shares.layout[index], slot.up, seed
        self._body, self.norm = body, Norm()

    def write(self, first: int, values: F32) -> None:
        """Encode values from element `first` on, and add what they decode to."""
        assert self._body is not None
        sent = np.empty(min(STATE_PIECE, len(values)), np.float32)
        for block in blocks(len(values)):
            here, start = values[block], first + block.start
            encode(self._layout, self._up, here, self._body, start, self._seed)
            decoded = sent[: len(here)]
            self._up.decode(self._body, decoded, first=start)
            self.norm.add(decoded)


Outline = dict[str, Any]


def outline(slot: IslandFragment) -> Outline:
    """Return what the other ranks must know of a leader's slot."""
    return {"update": _update(slot.sealed), "held": _held(slot.held_back)}


def filled(
    own: IslandFragment,
    said: Outline,
    sealed: Callable[[int], UpdateInFlight],
    saved: SavedFragment | None,
) -> IslandFragment:
    """Return a rank's slot as the leader's outline says, with its own vectors.

    `sealed` finds an update by its number, and `saved` is the rank's own of a
    checkpoint that the leader may hold back.
    """
    update, held = said["update"], said["held"]
    return replace(
        own,
        sealed=_filled_update(sealed(update["number"]), update) if update else None,
        held_back=_filled_held(held, saved) if held and saved else None,
    )


def part_of_island(fragments: list[SavedFragment]) -> SavedIsland:
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


def _update(sealed: UpdateInFlight | None) -> Outline | None:
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


def _filled_update(own: UpdateInFlight, said: Outline) -> UpdateInFlight:
    arrival: Future[AppliedOutcome | FragmentsWanted] = Future()
    if said["how"] is not None:
        arrival.set_result(
            AppliedOutcome(
                decision=WorkDecision(said["how"]),
                verdict=Verdict.COUNTED,
                reason="",
                through=said["round"],
                position=None,
            )
        )
    return replace(
        own,
        round=said["round"],
        is_awaited=said["is_awaited"],
        is_part=said["has_bytes"],
        arrival=arrival,
    )


def _held(held: HeldBackWork | None) -> Outline | None:
    if held is None:
        return None
    after = held.remaining_after
    return {
        "round": held.round,
        "most": held.remaining_before.value,
        "left": after.value if after else None,
    }


def _filled_held(said: Outline, saved: SavedFragment) -> HeldBackWork:
    return HeldBackWork(
        round=said["round"],
        saved=saved,
        remaining_before=RemainingWork(said["most"]),
        progress=(0, 0),
        remaining_after=RemainingWork(said["left"]) if said["left"] else None,
    )
