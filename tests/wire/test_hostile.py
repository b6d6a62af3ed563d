"""Attacks: whatever the bytes, a reader says corrupt or reads what was written."""

from __future__ import annotations

import struct
import tracemalloc
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import CorruptError
from atoll.wire.codecs import codec
from atoll.wire.files import read_frame
from atoll.wire.frame import PREFIX_BYTES, header_length, pack, unpack
from tests.wire.samples import a_gathered, a_state, an_agreed, an_update, sealed

GOLDEN = {
    path.stem: path.read_bytes()
    for path in sorted((Path(__file__).parents[1] / "golden").glob("*.atoll"))
}
SMALL = pack(sealed(an_update()))
GATHERED = pack(sealed(a_gathered()))
HEADERS = [SMALL, pack(sealed(an_agreed())), pack(sealed(a_state())), GATHERED]


def resign(data: bytes) -> bytes:
    """Return a header with a digest that fits, as an attacker would send it."""
    return data[:-32] + blake3(data[:-32]).digest()


def refuse(data: bytes) -> None:
    """Hold that `data` is refused as corrupt and in no other way."""
    with pytest.raises(CorruptError):
        unpack(data)


def refuse_or_agree(data: bytes) -> None:
    """Hold that `data` is corrupt, or the one encoding of what it says."""
    try:
        header = unpack(data)
    except CorruptError:
        return
    assert pack(header) == data


@settings(deadline=None)
@given(data=st.binary(max_size=600))
def test_random_bytes_are_refused(data: bytes) -> None:
    """Noise is corrupt."""
    refuse(data)


@settings(deadline=None)
@given(
    data=st.binary(max_size=600),
    kind=st.integers(1, 4),
    codec_id=st.integers(1, 6),
)
def test_random_bytes_behind_a_right_prefix_are_refused_or_canonical(
    data: bytes, kind: int, codec_id: int
) -> None:
    """Noise with a prefix and a digest that fit raises CorruptError alone."""
    size = PREFIX_BYTES + len(data) + 32
    prefix = b"ATOL" + struct.pack("<HBBIIQ", 1, kind, codec_id, size, 0, 0)
    refuse_or_agree(resign(prefix + data + bytes(32)))


@pytest.mark.parametrize("whole", HEADERS)
def test_every_truncation_is_refused(whole: bytes) -> None:
    """A header that ends early is corrupt, whether its digest is redone or not."""
    for length in range(len(whole)):
        refuse(whole[:length])
        if length >= 32:
            refuse(resign(whole[:length]))


@pytest.mark.parametrize("whole", HEADERS)
def test_every_flipped_bit_is_refused(whole: bytes) -> None:
    """One wrong bit anywhere in a header is corrupt."""
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        refuse(bytes(flipped))


def test_every_flipped_bit_of_a_small_frame_is_refused() -> None:
    """One wrong bit anywhere in a frame, body included, is corrupt."""
    whole = SMALL + bytes(10)
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            read_frame(BytesIO(flipped))


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_every_truncation_of_a_golden_frame_is_refused(name: str) -> None:
    """A frame that ends early is corrupt, wherever it ends."""
    whole = GOLDEN[name]
    for length in range(len(whole)):
        with pytest.raises(CorruptError):
            read_frame(BytesIO(whole[:length]))


@pytest.mark.parametrize("whole", HEADERS)
def test_every_flipped_bit_under_a_new_digest_is_refused_or_canonical(
    whole: bytes,
) -> None:
    """An attacker who redoes the digest can only say what a frame can say."""
    for bit in range(8 * (len(whole) - 32)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        refuse_or_agree(resign(bytes(flipped)))


@pytest.mark.parametrize("whole", HEADERS)
def test_trailing_bytes_are_refused(whole: bytes) -> None:
    """A header is exactly as long as it says."""
    refuse(whole + b"\0")
    refuse(resign(whole + b"\0"))


@settings(deadline=None)
@given(data=st.data())
def test_mutated_golden_frames_are_refused(data: st.DataObject) -> None:
    """A golden frame with a splice of other bytes never reads as a frame."""
    whole = GOLDEN[data.draw(st.sampled_from(sorted(GOLDEN)))]
    at = data.draw(st.integers(0, len(whole)))
    cut = data.draw(st.integers(0, 40))
    splice = data.draw(st.binary(max_size=40))
    mutated = whole[:at] + splice + whole[at + cut :]
    if mutated == whole:
        return
    with pytest.raises(CorruptError):
        read_frame(BytesIO(mutated))


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_flipped_bit_of_a_golden_frame_is_refused(name: str) -> None:
    """One wrong bit in any part of a golden frame is corrupt."""
    whole = GOLDEN[name]
    for at in range(0, len(whole), max(1, len(whole) // 200)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        with pytest.raises(CorruptError):
            read_frame(BytesIO(flipped))


@settings(deadline=None)
@given(data=st.data())
def test_a_mutated_body_decodes_or_is_refused(data: st.DataObject) -> None:
    """A body whose digest was redone decodes to finite values or is corrupt."""
    whole = GOLDEN[data.draw(st.sampled_from(sorted(GOLDEN)))]
    header, body = read_frame(BytesIO(whole))
    if not len(body):
        return
    hostile = body.copy()
    for at, value in data.draw(
        st.lists(
            st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255)), max_size=20
        )
    ):
        hostile[at] = value
    out = np.empty(header.elements, dtype=np.float32)
    for part in np.split(hostile, header.num_bodies):
        try:
            codec(header.codec).decode(part, out)
        except CorruptError:
            return
        assert np.isfinite(out).all()


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "4s", b"ATOM", "start with b'ATOM' instead of b'ATOL'"),
        (4, "H", 2, "version 2 of the wire format is unknown here, .* version 1"),
        (6, "B", 0, "kind 0 of frame is unknown; known are 1 to 4"),
        (6, "B", 5, "kind 5 of frame is unknown; known are 1 to 4"),
        (7, "B", 99, "99"),
        (8, "I", 2**26 + 1, "header_bytes=67108865 must be from 193 to 67108864"),
        (8, "I", 0, "header_bytes=0 must be from 193 to 67108864"),
        (12, "I", 1, "reserved bytes 12 to 15 are not zero"),
        (16, "Q", 2**40 + 1, "body_bytes=1099511627777 is above the limit"),
        (16, "Q", 11, "body_bytes=11, but 5 elements in bf16 must take 10"),
        (24, "Q", 2**64 - 1, "pieces=1, but 18446744073709551615 elements have"),
        (36, "I", 2**32 - 1, "pieces=4294967295, but 5 elements have 1"),
        (88, "Q", 0, "weight=0 must be at least 1"),
        (96, "d", float("nan"), "norm=nan must be finite"),
        (96, "d", -0.0, "norm=-0.0 must be finite and not negative"),
        (120, "B", 9, "optimizer 9 is unknown; known are 0 to 4"),
        (120, "B", 1, "an update must carry neither outer values nor a roster"),
        (121, "B", 255, "header_bytes=.*, but its parts take"),
        (123, "B", 1, "gathered='mean' must be empty in the update frame: only an"),
        (123, "B", 4, "gathered=4 is unknown; known are 0 to 3"),
        (128, "f", -0.0, "lr=-0.0, momentum=0.0, outer_steps=0, .* must be 0"),
        (136, "Q", 1, "outer_steps=1, .* must be 0 in a frame without outer"),
        (148, "f", 0.5, "share=0.5 and buffer=0 must be 0 in a frame without outer"),
        (152, "I", 3, "share=0.0 and buffer=3 must be 0 in a frame without outer"),
        (144, "I", 2**32 - 1, "header_bytes=.*, but its parts take"),
        (159, "B", 1, "reserved bytes 156 to 159 are not zero"),
        (160, "B", 0xFF, "run is not UTF-8 at its byte 0"),
        (160, "B", 0x2F, "run='/agoon' must not contain '/'"),
        (160, "B", 0, r"run='\\x00agoon' contains '\\x00', which is not printable"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    at: int, form: str, value: object, message: str
) -> None:
    """Each field, wrong under a digest that fits, is named with its value and limit."""
    data = bytearray(SMALL)
    struct.pack_into("<" + form, data, at, value)
    with pytest.raises(CorruptError, match=message):
        unpack(resign(bytes(data)))


# The bodies of two updates, of 5 elements in bf16 each: 20 bytes in 2 pieces. The
# roster has 4 bytes, then an entry of 40 with a name of 4 and a digest of 32, so the
# verdict of the first entry is at 166 + 4 + 32.
@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (123, "B", 0, "pieces=2, but 5 elements have 1"),
        (123, "B", 4, "gathered=4 is unknown; known are 0 to 3"),
        (202, "B", 2, "body_bytes=20, but 1 times 5 elements in bf16 must take 10"),
        (16, "Q", 10, "body_bytes=10, but 2 times 5 elements in bf16 must take 20"),
        (16, "Q", 2**40, "body_bytes=1099511627776, but 2 times 5 elements in bf16"),
        (36, "I", 1, "header_bytes=.*, but its parts take"),
        (24, "Q", 4, "body_bytes=20, but 2 times 4 elements in bf16 must take 16"),
        (24, "Q", 0, "0 elements in bf16 must take 0|elements=0 with 2 counted"),
        (24, "Q", 2**63, "body_bytes=20, but 2 times|must not be gathered"),
        (7, "B", 1, "2 updates of 5 elements in fp32 must not be gathered: .* the 20 "),
        (7, "B", 5, "2 updates of 5 elements in topk-2bit must not be gathered"),
    ],
)
def test_a_wrong_field_of_a_gathered_outcome_is_refused_by_name(
    at: int, form: str, value: object, message: str
) -> None:
    """Its sizes must be those of as many bodies as its roster counts, and no more."""
    data = bytearray(GATHERED)
    struct.pack_into("<" + form, data, at, value)
    with pytest.raises(CorruptError, match=message):
        unpack(resign(bytes(data)))


def test_an_update_without_elements_is_refused_unless_it_says_why() -> None:
    """No body is only for an update that its own island refuses."""
    refused = sealed(an_update(elements=0, refused="not finite"))
    data = bytearray(pack(refused)[:-32])
    data[126] = 0  # refused_bytes
    data[8] -= len("not finite")  # header_bytes; the low byte is large enough
    data = data[: -len("not finite")]
    with pytest.raises(CorruptError, match="elements=0 in the update frame"):
        unpack(resign(bytes(data) + bytes(32)))


def test_promised_sizes_reserve_no_memory() -> None:
    """A prefix that promises the largest header and body costs nothing to refuse."""
    prefix = b"ATOL" + struct.pack("<HBBIIQ", 1, 1, 1, 2**26, 0, 2**40)
    assert header_length(prefix) == 2**26

    tracemalloc.start()
    with pytest.raises(CorruptError, match="the header has 1000 bytes, but says that"):
        unpack(prefix + bytes(1000 - len(prefix)))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 100_000
