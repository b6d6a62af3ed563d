"""The digests of bodies and of states."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from atoll.errors import UsageError
from atoll.wire.codecs import codec
from atoll.wire.digests import (
    PIECE_ELEMENTS,
    STATE_PIECE,
    blake3_digest,
    piece_count,
    piece_digests,
    piece_range,
    state_digest,
    state_piece,
    state_root,
)

CODECS = ["fp32", "bf16", "bf16-stochastic", "int8", "e3m0", "topk-2bit"]


def ramp(elements: int, start: int = 0) -> NDArray[np.float32]:
    """Return start, start + 1, ... in fp32."""
    return np.arange(start, start + elements, dtype=np.float32)


def test_blake3_is_the_published_function() -> None:
    """The digest of nothing is the one that the BLAKE3 paper's vectors list."""
    empty = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert blake3_digest(b"").hex() == empty


def test_xxh3_is_the_published_function() -> None:
    """The hash of nothing is the one that xxHash's own checks list."""
    assert state_piece([ramp(0)]).hex() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("elements", [1, 4097, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS + 5])
def test_pieces_cover_a_body_once(name: str, elements: int) -> None:
    """Pieces follow each other without gap or overlap, first byte to last."""
    packing = codec(name)
    ranges = [piece_range(packing, elements, i) for i in range(piece_count(elements))]

    assert ranges[0][0] == 0
    assert [end for _, end in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert ranges[-1][1] == packing.body_bytes(elements)


@pytest.mark.parametrize("name", CODECS)
def test_a_piece_digest_is_that_of_the_piece_alone(name: str) -> None:
    """A changed byte changes the digest of its own piece and no other."""
    packing, elements = codec(name), 2 * PIECE_ELEMENTS + 5
    body = np.zeros(packing.body_bytes(elements), dtype=np.uint8)
    before = piece_digests(packing, elements, body)
    body[packing.offset(PIECE_ELEMENTS)] = 1
    after = piece_digests(packing, elements, body)

    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    assert (
        before[2] == blake3(bytes(body[packing.offset(2 * PIECE_ELEMENTS) :])).digest()
    )


def test_a_body_of_another_length_has_no_digests() -> None:
    """A body that cannot hold its elements is refused with both lengths."""
    with pytest.raises(
        UsageError, match=r"9 bytes cannot hold 5 elements in bf16\. .*10"
    ):
        piece_digests(codec("bf16"), 5, bytes(9))


def test_a_state_digest_is_the_one_of_the_page() -> None:
    """The digest built by hand from docs/wire-format.md is the one we compute."""
    anchor, first, second = (
        ramp(STATE_PIECE + 3),
        ramp(STATE_PIECE + 3, 7),
        ramp(STATE_PIECE + 3, 9),
    )
    cut = STATE_PIECE
    pieces = b"".join(
        xxhash.xxh3_128_digest(vector[here].tobytes())
        for here in (slice(cut), slice(cut, None))
        for vector in (anchor, first, second)
    )
    head = b"atoll state v1\0\0" + struct.pack("<QQQ", cut + 3, 2, 11)

    assert state_digest(anchor, [first, second], 11) == xxhash.xxh3_128_digest(
        head + pieces
    )


def test_a_state_digest_can_be_built_piece_by_piece() -> None:
    """The outer step hashes as it goes and gets the digest of the whole."""
    anchor, velocity = ramp(3 * STATE_PIECE + 1), ramp(3 * STATE_PIECE + 1, 5)
    pieces = [
        state_piece([anchor[at : at + STATE_PIECE], velocity[at : at + STATE_PIECE]])
        for at in range(0, len(anchor), STATE_PIECE)
    ]
    root = state_root(pieces, elements=len(anchor), moments=1, count=0)

    assert root == state_digest(anchor, [velocity])


def test_every_part_of_a_state_is_in_its_digest() -> None:
    """Anchor, moments, their order, their number and the count each change it."""
    a, b = ramp(5), ramp(5, 1)
    digests = {
        state_digest(a, []),
        state_digest(b, []),
        state_digest(a, [b]),
        state_digest(b, [a]),
        state_digest(a, [b, b]),
        state_digest(a, [b, b], 1),
        state_digest(a[:4], []),
        state_digest(a[:0], []),
        state_digest(-0.0 * a, []),
        state_digest(0.0 * a, []),
    }
    assert len(digests) == 10


def test_moments_of_another_length_are_refused() -> None:
    """A moment that does not fit its anchor is refused with both lengths."""
    with pytest.raises(UsageError, match=r"\[4\] elements do not fit an anchor of 5"):
        state_digest(ramp(5), [ramp(4)])
