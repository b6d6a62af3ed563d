"""Two digests for two purposes: agreement among islands, and bytes from outside.

XXH3-128 names a fragment's state. It is cheap enough to ride in the outer step's own
pass over the memory, and guards against mistakes: islands that drifted apart.
BLAKE3 names bytes that came over a network or lay on a disk, where a mistake may be
an attack.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from atoll.errors import UsageError
from atoll.wire.codecs import Codec

PIECE_ELEMENTS = 2**18
"""Elements of a body piece: a multiple of every codec's block."""

STATE_PIECE = 65536
"""Elements of a state piece: with two moments it still fits a core's cache."""

Bytes = bytes | bytearray | memoryview | NDArray[np.uint8]
Floats = NDArray[np.float32]

_STATE_TAG = b"atoll state v1\0\0"
_STATE_ROOT = struct.Struct("<QQQ")


def blake3_digest(data: Bytes) -> bytes:
    """Return the 32 bytes of BLAKE3 over `data`."""
    return blake3(data.data if isinstance(data, np.ndarray) else data).digest()


class Blake3Hasher:
    """BLAKE3 over bytes that come in parts."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def add(self, part: Bytes) -> None:
        """Append the next bytes."""
        self._hasher.update(view_of(part))

    @property
    def digest(self) -> bytes:
        """The 32 bytes of BLAKE3 over all appended bytes."""
        return self._hasher.digest()


def piece_count(elements: int) -> int:
    """Return how many pieces a body of `elements` has."""
    return -(-elements // PIECE_ELEMENTS)


def piece_elements(elements: int, index: int) -> int:
    """Return how many elements piece `index` of a body holds."""
    return min(PIECE_ELEMENTS, elements - index * PIECE_ELEMENTS)


def piece_range(codec: Codec, elements: int, index: int) -> tuple[int, int]:
    """Return where piece `index` of a body starts and ends, in bytes."""
    first = index * PIECE_ELEMENTS
    last = first + PIECE_ELEMENTS
    end = codec.offset(last) if last < elements else codec.body_bytes(elements)
    return (codec.offset(first) if first else 0), end


def piece_digests(
    codec: Codec, elements: int, *parts: Bytes | Floats
) -> tuple[bytes, ...]:
    """Return the digest of each piece of a body, whose parts must be the whole."""
    views = [view_of(part) for part in parts]
    size = sum(map(len, views))
    if size != codec.body_bytes(elements):
        raise UsageError(
            f"a body of {size} bytes cannot hold {elements} elements in "
            f"{codec.name}. That takes {codec.body_bytes(elements)} bytes."
        )
    ranges = (piece_range(codec, elements, i) for i in range(piece_count(elements)))
    if len(views) == 1:
        return tuple(blake3_digest(views[0][start:end]) for start, end in ranges)
    return tuple(_digest_across(views, start, end) for start, end in ranges)


def _digest_across(views: Sequence[memoryview], start: int, end: int) -> bytes:
    """Return the digest of a range of bytes that may lie in several views."""
    digest = blake3()
    for view in views:
        digest.update(view[max(start, 0) : max(end, 0)])
        start, end = start - len(view), end - len(view)
    return digest.digest()


def state_piece(arrays: Sequence[Floats]) -> bytes:
    """Return the hashes of one piece: of the anchor's slice, then of each moment's.

    One hash per vector: the outer step hashes each while it is in cache.
    """
    return b"".join([xxhash.xxh3_128_digest(array.data) for array in arrays])


def state_root(
    pieces: Sequence[bytes], *, elements: int, moments: int, count: int
) -> bytes:
    """Return the state digest from the hashes of all its pieces, in order."""
    head = _STATE_TAG + _STATE_ROOT.pack(elements, moments, count)
    return xxhash.xxh3_128_digest(head + b"".join(pieces))


def state_digest(anchor: Floats, moments: Sequence[Floats], count: int = 0) -> bytes:
    """Return the digest of a fragment's anchor and velocity, piece by piece."""
    arrays = (anchor, *moments)
    if any([len(moment) != len(anchor) for moment in moments]):
        raise UsageError(
            f"moments of {[len(moment) for moment in moments]} elements do not fit an "
            f"anchor of {len(anchor)}."
        )
    pieces = [
        state_piece([array[first : first + STATE_PIECE] for array in arrays])
        for first in range(0, len(anchor), STATE_PIECE)
    ]
    return state_root(pieces, elements=len(anchor), moments=len(moments), count=count)


def view_of(data: Bytes | Floats) -> memoryview:
    """Return the bytes of `data` without copying them."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
