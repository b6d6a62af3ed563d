"""Ranks' parts and the reduced ones as frames, and what a frame must say to be one.

A frame of this kind is an update whose body is bytes of `Sections` in place of fp32
values: it is verified by its digests, and never decoded by a codec. What is reduced,
by how many and how, is in its cursor, and must be the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.errors import CorruptError, UsageError
from atoll.exchange.all_reduce.sections import Bytes, Sections
from atoll.store import Data
from atoll.wire import (
    Header,
    Kind,
    Progress,
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
class Agreed:
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
class Expected:
    """A frame as it must be, but for its values: whose, of which round and part."""

    agreed: Agreed
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
            kind=Kind.UPDATE,
            run=f"all-reduce.{self.agreed.name}",
            fragment=fragment,
            round=self.round,
            island=f"rank-{self.rank:05d}",
            elements=words,
            progress=Progress(cursor=self.agreed.text),
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
