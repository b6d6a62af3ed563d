"""A state and the means after it become a later state, a piece at a time.

A piece of a fragment steps like a small fragment of its own, so a few pieces are all
that is ever in memory, however large the state and however many the means. The frame's
header comes before its body and holds digests of it, and the body holds one vector
behind the other: so the pieces are computed once for the digests, and once more for
each vector that is written. What is written is compared with those digests again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from atoll.errors import CorruptError
from atoll.journal.states import require_digest, require_same_optimizer
from atoll.journal.stored import StoredBody
from atoll.weights import FragmentState
from atoll.weights.layout import F32, blocks
from atoll.wire import (
    MOMENTS,
    PIECE_ELEMENTS,
    Header,
    OuterValues,
    blake3_digest,
    codec,
    pack,
    piece_count,
    piece_range,
    state_piece,
    state_root,
)
from atoll.wire.digests import view_of


class Compaction:
    """The state after `means`, to be written with little memory.

    `digest` is what the log has for it. Both arguments' bytes are verified as they are
    read.
    """

    def __init__(
        self, state: StoredBody, means: Sequence[StoredBody], digest: bytes
    ) -> None:
        require_same_optimizer(state.header, (mean.header for mean in means))
        self._state, self._means, self._digest = state, means, digest
        self._vectors = 1 + MOMENTS[_outer(state.header).optimizer]
        self._elements = state.header.elements // self._vectors
        self._readers = [_Floats(state) for _ in range(self._vectors)]
        self._last: tuple[int, FragmentState] | None = None
        for mean in means:
            if mean.header.elements not in (0, self._elements):
                raise CorruptError(
                    f"the {mean.header.name} has {mean.header.elements} elements, and "
                    f"the fragment {self._elements}."
                )

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the new state frame, in order.

        Raises:
            CorruptError: the means do not lead to the recorded digest, or bytes on the
                disk do not verify. What was yielded until then is to be thrown away.
        """
        header = self._header()
        yield pack(header)
        written = _PieceDigests(header.elements)
        for vector in range(self._vectors):
            for index in range(piece_count(self._elements)):
                values = _vectors_of(self._piece(index))[vector]
                written.add(vector * self._elements + index * PIECE_ELEMENTS, values)
                yield view_of(values)
        if written.digests() != header.pieces:
            raise CorruptError(
                f"the {header.name} changed while it was written. Check this machine's "
                "memory and disk, and compact again."
            )

    def _header(self) -> Header:
        """Return the sealed header of the state after the means."""
        hashes: list[bytes] = []
        digests = _PieceDigests(self._vectors * self._elements)
        for index in range(piece_count(self._elements)):
            piece = self._piece(index)
            vectors = _vectors_of(piece)
            for block in blocks(len(piece.anchor)):
                hashes.append(state_piece([values[block] for values in vectors]))
            for vector, values in enumerate(vectors):
                first = vector * self._elements + index * PIECE_ELEMENTS
                digests.add(first, values)
        root = state_root(
            hashes,
            elements=self._elements,
            moments=self._vectors - 1,
            count=piece.count,
        )
        last = self._means[-1].header
        require_digest(last, root, self._digest)
        return replace(
            self._state.header,
            round=last.round,
            base=root,
            island="",
            incarnation=0,
            epoch=last.epoch,
            outer=replace(_outer(last), count=piece.count),
            pieces=digests.digests(),
        )

    def _piece(self, index: int) -> FragmentState:
        """Return piece `index` of the fragment after the means.

        The last one is remembered, so a fragment of one piece is computed once.
        """
        if self._last is None or self._last[0] != index:
            self._last = index, self._rebuild(index)
        return self._last[1]

    def _rebuild(self, index: int) -> FragmentState:
        first = index * PIECE_ELEMENTS
        last = min(first + PIECE_ELEMENTS, self._elements)
        anchor, *moments = (
            reader.read(vector * self._elements + first, last - first)
            for vector, reader in enumerate(self._readers)
        )
        header = self._state.header
        piece = FragmentState(
            anchor, moments, round=header.round, count=_outer(header).count
        )
        for mean in self._means:
            agreed = _part(mean.header, index, piece.digest)
            body = mean.piece(index) if agreed.elements else b""
            # Kernels are compiled for memory that can be written to.
            piece.apply(agreed, np.frombuffer(bytearray(body), np.uint8))
        return piece


class _Floats:
    """Reads a state's body from front to back in ranges, each piece once."""

    def __init__(self, stored: StoredBody) -> None:
        self._stored = stored
        self._index, self._piece = -1, np.empty(0, np.float32)

    def read(self, first: int, size: int) -> F32:
        values = np.empty(size, np.float32)
        done = 0
        while done < size:
            index, start = divmod(first + done, PIECE_ELEMENTS)
            if index != self._index:
                data = self._stored.piece(index)
                self._index, self._piece = index, np.frombuffer(data, np.float32)
            found = self._piece[start : start + size - done]
            values[done : done + len(found)] = found
            done += len(found)
        return values


class _PieceDigests:
    """Digests of a body's pieces, from ranges that come in any order.

    Holds only the pieces that have begun and not ended.
    """

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._open: dict[int, tuple[F32, int]] = {}
        self._done: dict[int, bytes] = {}

    def add(self, first: int, values: F32) -> None:
        while len(values):
            index, start = divmod(first, PIECE_ELEMENTS)
            size = min(PIECE_ELEMENTS, self._elements - index * PIECE_ELEMENTS)
            part = values[: size - start]
            piece, filled = self._open.pop(index, (None, 0))
            if piece is None:
                piece = np.empty(size, np.float32)
            piece[start : start + len(part)] = part
            if filled + len(part) < size:
                self._open[index] = piece, filled + len(part)
            else:
                self._done[index] = blake3_digest(view_of(piece))
            first, values = first + len(part), values[len(part) :]

    def digests(self) -> tuple[bytes, ...]:
        return tuple(self._done[index] for index in range(piece_count(self._elements)))


def _part(agreed: Header, index: int, base: bytes) -> Header:
    """Return the header of one piece of an agreed frame, as a frame of its own."""
    if not agreed.elements:
        return replace(agreed, base=base)
    if agreed.base == base and len(agreed.pieces) == 1:
        return agreed  # a fragment of one piece is that piece
    start, end = piece_range(codec(agreed.codec), agreed.elements, index)
    first = index * PIECE_ELEMENTS
    return replace(
        agreed,
        base=base,
        elements=min(PIECE_ELEMENTS, agreed.elements - first),
        body_bytes=end - start,
        pieces=(agreed.pieces[index],),
    )


def _vectors_of(state: FragmentState) -> list[F32]:
    return [state.anchor, *state.moments]


def _outer(header: Header) -> OuterValues:
    assert header.outer is not None
    return header.outer
