"""The frames of an all-reduce, and the sections of equal dtype that they carry.

A frame of this kind is an update whose body is bytes of sections in place of fp32
values: it is verified by its digests, and never decoded by a codec. Its cursor has the
operation, the number of ranks and the sections, which must be the same for all.

Rule 1: values of one dtype lie together, the widest first, so that a piece of the body
        never cuts a value.
Rule 2: values are summed as a tree in the order of ranks, as the updates of a round
        are; 16-bit values are summed in fp32 and rounded once, to nearest even.
Rule 3: a NaN is the same NaN on every machine. All else is IEEE's, and equal by that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.algorithm.merge import first_half
from atoll.errors import CorruptError, UsageError
from atoll.store import Data
from atoll.wire import (
    FrameKind,
    Header,
    TrainingProgress,
    codec,
    frame_bytes,
    header_length,
    pack,
    piece_count,
    piece_elements,
    piece_range,
    unpack,
    verify_piece,
    with_body,
)

PACKING = codec("fp32")
MAX_DIRECT = 3
"""Up to so many ranks read each other whole: parts would save them nothing."""

MAX_HEADER_BYTES = 2**18
"""A body of 4 GB has 4096 pieces with 32 bytes each; the rest is a few kilobytes."""

_REMEDY = "Remove that object, and start its rank again."


@dataclass(frozen=True)
class ReduceTerms:
    """What all ranks must have in common to be reduced together."""

    name: str
    world_size: int
    op: str
    sections: Sections
    layout: str
    """A digest of the values' shapes and order."""

    @property
    def text(self) -> bytes:
        said = {"layout": self.layout, "op": self.op, "world_size": self.world_size}
        return json.dumps(said | self.sections.counts, sort_keys=True).encode()

    @property
    def num_parts(self) -> int:
        """Into how many parts the body is cut; one: everybody reduces all of it."""
        if self.is_direct:
            return 1
        return min(self.world_size, piece_count(self.sections.words))

    @property
    def is_direct(self) -> bool:
        return self.world_size <= MAX_DIRECT

    def owner(self, part: int, round_number: int) -> int:
        """Return the rank that reduces a part; another one in each round."""
        return (part + round_number) % self.world_size

    def pieces(self, part: int) -> range:
        """Return the pieces of the body that are in a part."""
        pieces = piece_count(self.sections.words)
        first, last = (at * pieces // self.num_parts for at in (part, part + 1))
        return range(first, last)

    def window(self, pieces: range) -> tuple[int, int]:
        """Return where these pieces begin and end in the body, in bytes."""
        first, _ = piece_range(PACKING, self.sections.words, pieces.start)
        _, last = piece_range(PACKING, self.sections.words, pieces.stop - 1)
        return first, last


@dataclass(frozen=True)
class ExpectedFrame:
    """A frame as it must be, but for its values: whose, of which round and part."""

    agreed: ReduceTerms
    round: int
    rank: int
    part: int | None = None
    """None: all of a rank's own values. Else a part of what was reduced."""

    def sealed(self, body: Bytes) -> list[Data]:
        """Return the frame with these values."""
        return [pack(with_body(self._header(), body)), body.data]

    @property
    def size(self) -> int:
        """Bytes of the whole frame."""
        return frame_bytes(self._unread())

    @property
    def header_bytes(self) -> int:
        return self.size - self._unread().body_bytes

    def opened(self, head: memoryview, *, where: str) -> Header:
        """Return the header at the beginning of some bytes, if it is this frame's.

        Raises:
            CorruptError: it is no frame, or one of something else.
            UsageError: its rank reduces something else in this round.
        """
        length = header_bytes_of(head, where=where)
        try:
            header = unpack(head[:length])
        except CorruptError as exc:
            raise CorruptError(f"{where}: {exc} {_REMEDY}") from exc
        self._require(header, where=where)
        return header

    def _require(self, header: Header, *, where: str) -> None:
        ours = self._header()
        for what in ("kind", "run", "fragment", "round", "island"):
            if getattr(header, what) != getattr(ours, what):
                raise CorruptError(
                    f"{where} is of another {what}: {getattr(header, what)!r} in place "
                    f"of {getattr(ours, what)!r}. {_REMEDY}"
                )
        if header.progress.cursor != self.agreed.text:
            said = header.progress.cursor[:500].decode(errors="replace")
            raise UsageError(
                f"Rank {self.rank} reduces something else in round {self.round} "
                f"({where}): {said}, and this rank {self.agreed.text.decode()}. Call "
                "with the same tensors in the same order on every rank; for others, "
                "choose a new name."
            )
        if header.elements != ours.elements or not header.is_sealed:
            raise CorruptError(f"{where} has {header.elements} elements. {_REMEDY}")

    def _header(self) -> Header:
        fragment, words = 0, self.agreed.sections.words
        if self.part is not None:
            pieces = self.agreed.pieces(self.part)
            fragment = 1 + self.part
            words = sum(piece_elements(words, index) for index in pieces)
        return Header(
            kind=FrameKind.UPDATE,
            run=f"all-reduce.{self.agreed.name}",
            fragment=fragment,
            round=self.round,
            island=f"rank-{self.rank:05d}",
            elements=words,
            progress=TrainingProgress(cursor=self.agreed.text),
        )

    def _unread(self) -> Header:
        header = self._header()
        return header.sealed(
            body_bytes=PACKING.body_bytes(header.elements),
            pieces=(bytes(32),) * piece_count(header.elements),
        )


def header_bytes_of(head: memoryview, *, where: str) -> int:
    """Return how long the header is of which these are the first bytes."""
    try:
        return header_length(head, max_header_bytes=MAX_HEADER_BYTES)
    except CorruptError as exc:
        raise CorruptError(f"{where}: {exc} {_REMEDY}") from exc


def verified(
    header: Header, pieces: Sequence[int], body: memoryview, *, where: str
) -> Bytes:
    """Return the bytes of some pieces of a frame's body, if they are the right ones."""
    at = 0
    try:
        for index in pieces:
            start, end = piece_range(PACKING, header.elements, index)
            verify_piece(header, index, body[at : at + end - start])
            at += end - start
    except CorruptError as exc:
        raise CorruptError(f"{where}: {exc} {_REMEDY}") from exc
    return np.frombuffer(body[:at], np.uint8)


Bytes = NDArray[np.uint8]
Wide = NDArray[Any]

KINDS: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
}
"""Each kind and how numpy reads it, which has no bfloat16: its bits."""

WORD = 4
"""Bytes of an element of a frame; a body is filled up to whole ones."""

BLOCK_BYTES = 2**20
"""What is summed at a time: a few of these fit a core's cache."""

MAX_BODY_BYTES = 2**32 - 2**24
"""What one object takes, less a header."""


class Sections:
    """How many values of each kind a body has, and where they lie in it."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = {kind: counts.get(kind, 0) for kind in KINDS}
        self.value_bytes = sum(
            count * KINDS[kind].itemsize for kind, count in self.counts.items()
        )
        self.body_bytes = -(-self.value_bytes // WORD) * WORD
        if not 0 < self.value_bytes <= MAX_BODY_BYTES:
            raise UsageError(
                f"{self.value_bytes} bytes cannot be reduced at once: from 1 to "
                f"{MAX_BODY_BYTES} can. Reduce parts of it, each under its own name."
            )

    @property
    def words(self) -> int:
        """The elements of a frame with such a body."""
        return self.body_bytes // WORD

    def within(self, first: int, last: int) -> Iterator[tuple[str, slice]]:
        """Yield each kind that has bytes from `first` to `last`, and where in those."""
        at = 0
        for kind, count in self.counts.items():
            end = at + count * KINDS[kind].itemsize
            start, stop = max(at, first), min(end, last)
            if start < stop:
                yield kind, slice(start - first, stop - first)
            at = end

    def reduced(
        self, bodies: Sequence[Bytes], *, first: int, divisor: int | None
    ) -> Bytes:
        """Return the sum of the ranks' bytes from `first` on, or their mean.

        `bodies` has one range of each rank's body, in the order of ranks.
        """
        size = len(bodies[0])
        out = np.zeros(size, np.uint8)
        for kind, place in self.within(first, first + size):
            for start in range(place.start, place.stop, BLOCK_BYTES):
                here = slice(start, min(start + BLOCK_BYTES, place.stop))
                out[here] = _block([body[here] for body in bodies], kind, divisor)
        return out


def _block(blocks: Sequence[Bytes], kind: str, divisor: int | None) -> Bytes:
    with np.errstate(all="ignore"):  # what overflows is infinite, as it would be alone
        total = _sum(blocks, kind)
        if divisor is not None and divisor > 1:
            total /= total.dtype.type(divisor)
        total[np.isnan(total)] = np.nan
        return _narrow(total, kind).view(np.uint8)


def _sum(blocks: Sequence[Bytes], kind: str) -> Wide:
    if len(blocks) == 1:
        return _wide(blocks[0], kind)
    half = first_half(len(blocks))
    total = _sum(blocks[:half], kind)
    total += _sum(blocks[half:], kind)
    return total


def _wide(block: Bytes, kind: str) -> Wide:
    """Return a copy of values in the kind in which they are summed."""
    values = np.frombuffer(block.tobytes(), KINDS[kind])
    if kind == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float64 if kind == "float64" else np.float32)


def _narrow(total: Wide, kind: str) -> Wide:
    if kind != "bfloat16":
        return total.astype(KINDS[kind])
    bits = total.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    # An infinity stays one; a NaN is quiet, so that the addition does not wrap.
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
