"""The frames of an all-reduce, and the sections of equal dtype that they carry.

A frame of this kind is an update whose body is bytes of sections in place of fp32
values: it is verified by its digests, and never decoded by a codec. Its cursor has the
operation, the number of ranks and the sections, which must be the same for all.

Rule 1: values of one dtype are contiguous, the widest first, so that a piece of the
        body never cuts a value.
Rule 2: values are summed as a tree in the order of ranks, as the updates of a round
        are; 16-bit values are summed in fp32 and rounded once, to nearest even.
Rule 3: a NaN has the same bits on every machine. All else is IEEE 754 arithmetic, which
        is the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll import wire
from atoll.algorithm.merge import first_half
from atoll.errors import CorruptError, UsageError
from atoll.store import Data

PACKING = wire.codec("fp32")
MAX_DIRECT = 3
"""Up to this number of ranks read all values of each other: parts would not be less."""

MAX_HEADER_BYTES = 2**18
"""A body of 4 GB has 4096 pieces with 32 bytes each; the rest is a few kilobytes."""

_REMEDY = "Remove that object, and start its rank again."


@dataclass(frozen=True)
class ReduceTerms:
    """The terms that all ranks of an all-reduce must share."""

    name: str
    world_size: int
    op: str
    sections: Sections
    layout: str
    """A digest of the values' shapes and order."""

    @property
    def text(self) -> bytes:
        terms = {"layout": self.layout, "op": self.op, "world_size": self.world_size}
        return json.dumps(terms | self.sections.counts, sort_keys=True).encode()

    @property
    def num_parts(self) -> int:
        """Number of parts of the body; with one, every rank reduces all of it."""
        if self.is_direct:
            return 1
        return min(self.world_size, wire.piece_count(self.sections.elements))

    @property
    def is_direct(self) -> bool:
        return self.world_size <= MAX_DIRECT

    def owner(self, part: int, round_number: int) -> int:
        """Return the rank that reduces a part; another one in each round."""
        return (part + round_number) % self.world_size

    def pieces(self, part: int) -> range:
        """Return the pieces of the body that are in a part."""
        pieces = wire.piece_count(self.sections.elements)
        first = part * pieces // self.num_parts
        return range(first, (part + 1) * pieces // self.num_parts)

    def window(self, pieces: range) -> tuple[int, int]:
        """Return the offsets in the body at which these pieces begin and end."""
        first, _ = wire.piece_range(PACKING, self.sections.elements, pieces.start)
        _, last = wire.piece_range(PACKING, self.sections.elements, pieces.stop - 1)
        return first, last


@dataclass(frozen=True)
class ExpectedFrame:
    """The expected header of a frame: its rank, round, part and terms."""

    terms: ReduceTerms
    round: int
    rank: int
    part: int | None = None
    """None: all values of a rank. Otherwise a part of the reduced values."""

    def sealed(self, body: Bytes) -> list[Data]:
        """Return the frame with these values."""
        return [wire.pack(wire.with_body(self._header(), body)), body.data]

    @property
    def size(self) -> int:
        """Bytes of the frame with its body."""
        return wire.frame_bytes(self._unread())

    @property
    def header_bytes(self) -> int:
        return self.size - self._unread().body_bytes

    def opened(self, head: memoryview, *, path: str) -> wire.Header:
        """Return the header at the beginning of some bytes, if it is this frame's.

        Raises:
            CorruptError: it is no frame, or another one.
            UsageError: its rank reduces other tensors in this round.
        """
        length = header_bytes_of(head, path=path)
        try:
            header = wire.unpack(head[:length])
        except CorruptError as exc:
            raise CorruptError(f"{path}: {exc} {_REMEDY}") from exc
        self._require(header, path=path)
        return header

    def _require(self, header: wire.Header, *, path: str) -> None:
        expected = self._header()
        for field in ("kind", "run", "fragment", "round", "island"):
            actual, needed = getattr(header, field), getattr(expected, field)
            if actual != needed:
                raise CorruptError(
                    f"{path} is of another {field}: {actual!r} in place of "
                    f"{needed!r}. {_REMEDY}"
                )
        if header.progress.cursor != self.terms.text:
            other = header.progress.cursor[:500].decode(errors="replace")
            raise UsageError(
                f"Rank {self.rank} reduces something else in round {self.round} "
                f"({path}): {other}, and this rank {self.terms.text.decode()}. Call "
                "with the same tensors in the same order on every rank; for others, "
                "choose a new name."
            )
        if header.elements != expected.elements or not header.is_sealed:
            raise CorruptError(f"{path} has {header.elements} elements. {_REMEDY}")

    def _header(self) -> wire.Header:
        fragment, elements = 0, self.terms.sections.elements
        if self.part is not None:
            pieces = self.terms.pieces(self.part)
            fragment = 1 + self.part
            elements = sum(wire.piece_elements(elements, index) for index in pieces)
        return wire.Header(
            kind=wire.FrameKind.UPDATE,
            run=f"all-reduce.{self.terms.name}",
            fragment=fragment,
            round=self.round,
            island=f"rank-{self.rank:05d}",
            elements=elements,
            progress=wire.TrainingProgress(cursor=self.terms.text),
        )

    def _unread(self) -> wire.Header:
        header = self._header()
        return header.sealed(
            body_bytes=PACKING.body_bytes(header.elements),
            pieces=(bytes(32),) * wire.piece_count(header.elements),
        )


def header_bytes_of(head: memoryview, *, path: str) -> int:
    """Return the length of the header that begins with these bytes."""
    try:
        return wire.header_length(head, max_header_bytes=MAX_HEADER_BYTES)
    except CorruptError as exc:
        raise CorruptError(f"{path}: {exc} {_REMEDY}") from exc


def verified(
    header: wire.Header, pieces: Sequence[int], body: memoryview, *, path: str
) -> Bytes:
    """Return the bytes of some pieces of a frame's body, if their digests match."""
    offset = 0
    try:
        for index in pieces:
            start, end = wire.piece_range(PACKING, header.elements, index)
            wire.verify_piece(header, index, body[offset : offset + end - start])
            offset += end - start
    except CorruptError as exc:
        raise CorruptError(f"{path}: {exc} {_REMEDY}") from exc
    return np.frombuffer(body[:offset], np.uint8)


Bytes = NDArray[np.uint8]
Wide = NDArray[Any]

KINDS: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
}
"""The numpy dtype of each kind; numpy has no bfloat16, so its bits are integers."""

ELEMENT_BYTES = 4
"""Bytes of an element of a frame; a body is padded to a multiple of it."""

BLOCK_BYTES = 2**20
"""Bytes summed at a time: a few blocks fit a core's cache."""

MAX_BODY_BYTES = 2**32 - 2**24
"""The limit of one object, less a header."""


class Sections:
    """The number of values of each kind in a body, and their positions in it."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = {kind: counts.get(kind, 0) for kind in KINDS}
        self.value_bytes = sum(
            count * KINDS[kind].itemsize for kind, count in self.counts.items()
        )
        self.body_bytes = -(-self.value_bytes // ELEMENT_BYTES) * ELEMENT_BYTES
        if not 0 < self.value_bytes <= MAX_BODY_BYTES:
            raise UsageError(
                f"{self.value_bytes} bytes cannot be reduced in one call: it takes "
                f"from 1 to {MAX_BODY_BYTES}. Reduce parts, each under its own name."
            )

    @property
    def elements(self) -> int:
        """The number of elements of a frame with such a body."""
        return self.body_bytes // ELEMENT_BYTES

    def within(self, first: int, last: int) -> Iterator[tuple[str, slice]]:
        """Yield each kind with bytes from `first` to `last`, and its slice of them."""
        begin = 0
        for kind, count in self.counts.items():
            end = begin + count * KINDS[kind].itemsize
            start, stop = max(begin, first), min(end, last)
            if start < stop:
                yield kind, slice(start - first, stop - first)
            begin = end

    def reduced(
        self, bodies: Sequence[Bytes], *, first: int, divisor: int | None
    ) -> Bytes:
        """Return the sum of the ranks' bytes from `first` on, or their mean.

        `bodies` has one range of each rank's body, in the order of ranks.
        """
        size = len(bodies[0])
        out = np.zeros(size, np.uint8)
        for kind, section in self.within(first, first + size):
            for start in range(section.start, section.stop, BLOCK_BYTES):
                block = slice(start, min(start + BLOCK_BYTES, section.stop))
                out[block] = _block([body[block] for body in bodies], kind, divisor)
        return out


def _block(blocks: Sequence[Bytes], kind: str, divisor: int | None) -> Bytes:
    with np.errstate(
        all="ignore"
    ):  # an overflow is infinite, as in plain IEEE arithmetic
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
