"""Moves a fragment between its parts on the ranks and the leader's whole vectors.

All ranks call the same methods in the same order, on one channel per thread; only the
leader has whole fragments, one at a time. A rank that fails still sends the vectors
that the others wait for, and reports its error at the end, so that no rank waits
forever. A summary describes saved fragments without their vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from atoll import wire
from atoll.exchange import Frame
from atoll.island.fragment import HeldBackWork, IslandFragment, UpdateInFlight
from atoll.island.saved_state import AppliedOutcome, FragmentsWanted, SavedFragment
from atoll.protocol import WorkDecision
from atoll.protocol.island import RemainingWork
from atoll.torch.ranks.channel import LEADER, FirstError, RankChannel
from atoll.torch.ranks.ownership import Ownership
from atoll.torch.ranks.view import CHUNK
from atoll.weights import FragmentLayout, FragmentState
from atoll.weights.layout import F32, blocks
from atoll.weights.ranges import Overlap
from atoll.weights.reduce import mean_reader

Fill = Callable[[int, np.ndarray], None]
"""Fills the piece of a body that begins with an element."""


def copied(name: str, body: np.ndarray) -> Fill:
    """Return the function that copies the pieces of a body."""
    scheme = wire.codec(name)

    def fill(first: int, piece: np.ndarray) -> None:
        start = scheme.offset(first)
        piece[:] = body[start : start + len(piece)]

    return fill


def averaged(agreed: Frame, layout: FragmentLayout) -> Fill:
    """Return the function that fills pieces of fp32 with the mean of an outcome."""
    write_mean = mean_reader(agreed.header, agreed.body, layout)
    return lambda first, piece: write_mean(first, piece.view(np.float32))


@dataclass(frozen=True)
class FragmentParts:
    """The parts of all fragments that one rank owns."""

    ownership: Ownership
    rank: int

    @property
    def is_leader(self) -> bool:
        return self.rank == LEADER

    def chunks(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the pieces in which a fragment is moved."""
        elements = self.ownership.layout[index].elements
        for first in range(0, elements, CHUNK):
            yield first, min(first + CHUNK, elements)

    def cut(self, index: int, first: int, last: int) -> Overlap:
        """Return the elements between `first` and `last` that this rank owns."""
        return self.ownership.owned(self.rank, index).cut(first, last)

    def scatter(
        self,
        channel: RankChannel,
        index: int,
        state: FragmentState | None,
        *,
        count: int,
    ) -> FragmentState:
        """Return this rank's part of the leader's state, which has `count` vectors."""
        ranges = self.ownership.owned(self.rank, index)
        vectors = [np.empty(ranges.elements, np.float32) for _ in range(count)]
        for number in range(count):
            full = state.vectors[number] if state is not None else None
            for first, last in self.chunks(index):
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
            for first, last in self.chunks(index):
                cut = self.cut(index, first, last)
                chunk = None if out is None else out[number][first:last]
                self.collect(channel, index, first, last, vector[cut.compact], chunk)

    def collect(
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
        out[self.cut(index, first, last).positions] = own_values
        cuts = [
            (r, self.ownership.owned(r, index).cut(first, last)) for r in channel.others
        ]
        coming = [
            (r, cut, np.empty(cut.size, np.float32)) for r, cut in cuts if cut.size
        ]
        channel.exchange_vectors([], [(rank, values) for rank, _, values in coming])
        for _, cut, values in coming:
            out[cut.positions] = values

    def decoded(
        self,
        channel: RankChannel,
        index: int,
        name: str,
        begin: Callable[[], Fill] | None,
        first_error: FirstError,
    ) -> Iterator[tuple[Overlap, F32]]:
        """Yield this rank's cut of each block of the leader's body, and the block.

        The leader fills each piece of the body, which is in the codec `name`.
        """
        scheme = wire.codec(name)
        scratch = np.empty(wire.STATE_PIECE, np.float32)
        fills: list[Fill] = []
        if begin is not None:
            first_error.attempt(lambda: fills.append(begin()))
        for first, last in self.chunks(index):
            piece = np.empty(scheme.body_bytes(last - first), np.uint8)
            for fill in fills:
                first_error.attempt(partial(fill, first, piece))
            channel.broadcast_vector(piece)
            for block in blocks(last - first):
                values = scratch[: block.stop - block.start]
                cut = self.cut(index, first + block.start, first + block.stop)
                if cut.size:
                    decode = partial(scheme.decode, piece, values)
                    first_error.attempt(partial(decode, first=block.start))
                    yield cut, values

    def measure(
        self, channel: RankChannel, index: int, vectors: Sequence[F32], *, count: int
    ) -> bytes:
        """Return the digest of a fragment's anchor and moments, at the leader.

        A piece with one owner is hashed on that rank; the leader hashes the others.
        """
        width = 16
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
        cut = self.cut(index, first, last)
        if owner is not None:
            is_mine = owner == self.rank
            return (
                wire.state_piece([v[cut.compact] for v in vectors]) if is_mine else None
            )
        chunks = [np.empty(last - first, np.float32) for _ in vectors]
        for vector, out in zip(vectors, chunks, strict=True):
            self.collect(channel, index, first, last, vector[cut.compact], out)
        return wire.state_piece(chunks) if self.is_leader else None


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


def _update(sealed: UpdateInFlight | None) -> FragmentSummary | None:
    if sealed is None:
        return None
    outcome = sealed.applied
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
