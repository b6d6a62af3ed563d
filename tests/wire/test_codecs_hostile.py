"""Attacks on the codecs: a body decodes to finite numbers or is called corrupt."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import CorruptError
from atoll.wire import codec, codec_by_code
from tests.kernels.vectors import KINDS, SHAPES, serving

NAMES = ("fp32", "bf16", "int8", "e3m0", "topk-2bit", "bf16-stochastic")
TINY = 2.0**-100

names = pytest.mark.parametrize("name", NAMES)
kinds = pytest.mark.parametrize("kind", KINDS)


def decode(name: str, body: bytes, elements: int, *, first: int = 0) -> np.ndarray:
    out = np.empty(elements, np.float32)
    codec(name).decode(np.frombuffer(body, np.uint8), out, first=first)
    return out


def a_body(name: str, elements: int) -> bytearray:
    body = np.empty(codec(name).body_bytes(elements), np.uint8)
    codec(name).encode(SHAPES["gaussian"](elements), body)
    return bytearray(body.tobytes())


def hold_sound(name: str, body: bytes, elements: int) -> None:
    """Hold that a body is refused as corrupt, or decodes to finite, flushed numbers."""
    try:
        out = decode(name, body, elements)
    except CorruptError:
        return
    assert np.isfinite(out).all()
    assert ((out == 0) | (abs(out) >= TINY)).all()
    assert not np.signbit(out[out == 0]).any()


@kinds
@names
@settings(max_examples=40)
@given(data=st.data())
def test_random_bytes_do_no_harm(kind: str, name: str, data: st.DataObject) -> None:
    """Bytes that nobody encoded are corrupt, or finite and flushed."""
    elements = data.draw(st.sampled_from([1, 2, 63, 130, 257, 300]))
    size = codec(name).body_bytes(elements)
    body = data.draw(st.binary(min_size=size, max_size=size))
    with serving(kind):
        hold_sound(name, body, elements)


@kinds
@names
@settings(max_examples=40)
@given(data=st.data())
def test_flipped_bits_do_no_harm(kind: str, name: str, data: st.DataObject) -> None:
    """A sound body with some bits flipped is corrupt, or finite and flushed."""
    elements = data.draw(st.sampled_from([65, 300, 4097]))
    body = a_body(name, elements)
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] ^= 1 << data.draw(st.integers(0, 7))
    with serving(kind):
        hold_sound(name, bytes(body), elements)


@names
@pytest.mark.parametrize("elements", [1, 65, 300, 5000])
def test_a_body_cut_short_is_corrupt(name: str, elements: int) -> None:
    """It does not hold the elements that it should."""
    body = a_body(name, elements)[:-1]

    with pytest.raises(CorruptError, match=f"body of {len(body)} bytes in {name}"):
        decode(name, bytes(body), elements)


@pytest.mark.parametrize("name", ["int8", "e3m0", "topk-2bit"])
@pytest.mark.parametrize("elements", [1, 65, 300, 5000])
@pytest.mark.parametrize("more", [1, 1000])
def test_bytes_after_a_short_block_are_corrupt(
    name: str, elements: int, more: int
) -> None:
    """A block that is not full is the last one."""
    body = a_body(name, elements) + bytes(more)

    with pytest.raises(CorruptError, match=f"which end at byte {len(body) - more}"):
        decode(name, bytes(body), elements)


@names
def test_a_range_beyond_the_end_is_corrupt(name: str) -> None:
    """Elements that a body does not have are not made up."""
    with pytest.raises(CorruptError, match="does not hold elements 4096 to 8192"):
        decode(name, bytes(a_body(name, 5000)), 4096, first=4096)


@kinds
@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-stochastic"])
@pytest.mark.parametrize("upper", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_floats_that_are_not_finite_are_corrupt(
    kind: str, name: str, upper: int
) -> None:
    """An infinity or a NaN is found wherever it lies, and named."""
    body = a_body(name, 9000)
    width = codec(name).offset(1)
    end = (7000 + 1) * width
    body[end - 2 : end] = struct.pack("<H", upper)

    with serving(kind), pytest.raises(CorruptError, match="element 7000 of"):
        decode(name, bytes(body), 9000)


@kinds
@pytest.mark.parametrize(
    "scale", [np.nan, np.inf, -1.0, -0.0, 3.0e38, 8454660 * 2.0**98]
)
def test_an_impossible_scale_is_corrupt(kind: str, scale: float) -> None:
    """A scale is finite, not negative, and 127 of it are finite."""
    body = a_body("int8", 600)
    at = codec("int8").offset(256)
    body[at : at + 4] = struct.pack("<f", np.float32(scale))

    with (
        serving(kind),
        pytest.raises(CorruptError, match="element 256 of a body in int8"),
    ):
        decode("int8", bytes(body), 600)


@kinds
def test_the_code_that_has_no_opposite_is_corrupt(kind: str) -> None:
    """No encoder writes -128, and 128 of the largest scale would be infinite."""
    body = a_body("int8", 600)
    body[codec("int8").offset(512) + 4 + 7] = 0x80

    with serving(kind), pytest.raises(CorruptError, match=f"element {512 + 7} of"):
        decode("int8", bytes(body), 600)


@kinds
def test_an_infinite_exponent_is_corrupt(kind: str) -> None:
    """E = 255 is the exponent of infinity."""
    body = a_body("e3m0", 200)
    body[codec("e3m0").offset(128)] = 255

    with serving(kind), pytest.raises(CorruptError, match="element 128 of"):
        decode("e3m0", bytes(body), 200)


@kinds
def test_exponents_below_the_flush_decode_to_zero(kind: str) -> None:
    """Bytes that no encoder writes may still be harmless: they are zeros."""
    with serving(kind):
        # E = 30, codes 0 to 6 with signs: 30 to 27 are numbers, 26 to 24 are zero.
        values = decode("e3m0", bytes([30, 0x10, 0xB2, 0xC4, 0x6D]), 8)

    powers = [2.0**-97, 2.0**-98, 2.0**-99, -(2.0**-100)]
    assert values.tolist() == [*powers, 0.0, 0.0, 0.0, 0.0]


@kinds
@pytest.mark.parametrize("name", ["e3m0", "topk-2bit"])
def test_padding_that_says_something_is_corrupt(kind: str, name: str) -> None:
    """Bits that belong to no element are zero: there is one body for a vector."""
    body = a_body(name, 65 if name == "e3m0" else 129)
    body[-1] |= 0x80

    with serving(kind), pytest.raises(CorruptError):
        decode(name, bytes(body), 65 if name == "e3m0" else 129)


def topk_body(low: float, high: float, *indices: int) -> bytes:
    """Return a block of up to 64 * len(indices) elements that keeps these."""
    packed = sum(index << (12 * place) for place, index in enumerate(indices))
    size = -(-12 * len(indices) // 8), -(-2 * len(indices) // 8)
    return (
        struct.pack("<ff", low, high)
        + packed.to_bytes(size[0], "little")
        + bytes(size[1])
    )


@kinds
@pytest.mark.parametrize(
    "indices",
    [(3, 3), (4, 3), (0, 128), (127, 126), (4095, 4095), (0, 4095)],
)
def test_indices_that_do_not_ascend_or_reach_too_far_are_corrupt(
    kind: str, indices: tuple[int, int]
) -> None:
    """Every kept element has one place of its own inside the block."""
    with serving(kind):
        assert decode("topk-2bit", topk_body(1, 2, 0, 127), 128)[127] == 1.0
        with pytest.raises(CorruptError, match="element 0 of a body in topk-2bit"):
            decode("topk-2bit", topk_body(1, 2, *indices), 128)


@kinds
@pytest.mark.parametrize("level", [np.nan, np.inf, -1.0, -0.0])
@pytest.mark.parametrize("is_high", [False, True])
def test_levels_are_finite_and_have_no_sign(
    kind: str, level: float, is_high: bool
) -> None:
    """A level is a mean of magnitudes."""
    levels = (1.0, level) if is_high else (level, 1.0)

    with serving(kind), pytest.raises(CorruptError):
        decode("topk-2bit", topk_body(*levels, 3, 9), 128)


@kinds
def test_the_padding_of_odd_indices_is_checked_too(kind: str) -> None:
    """Three indices of 12 bits leave half a byte, which is zero."""
    body = bytearray(topk_body(1, 2, 3, 9, 150))
    body[8 + 4] |= 0x10

    with serving(kind), pytest.raises(CorruptError):
        decode("topk-2bit", bytes(body), 192)


@kinds
@names
def test_a_body_may_lie_anywhere(kind: str, name: str) -> None:
    """At an odd address, or where nothing may be written, it decodes the same."""
    body = bytes(a_body(name, 5000))
    shifted = np.frombuffer(b"x" + body, np.uint8)[1:]
    out = np.empty(5000, np.float32)
    with serving(kind):
        codec(name).decode(shifted, out)
        expected = decode(name, body, 5000)

    assert out.tobytes() == expected.tobytes()


@kinds
@names
def test_a_body_may_be_written_anywhere(kind: str, name: str) -> None:
    """An odd address changes nothing for an encoder either."""
    room = np.empty(codec(name).body_bytes(5000) + 1, np.uint8)
    with serving(kind):
        codec(name).encode(SHAPES["gaussian"](5000), room[1:])

    assert room[1:].tobytes() == bytes(a_body(name, 5000))


@pytest.mark.parametrize("code", [0, 7, 255, -1])
def test_an_unknown_codec_is_corrupt(code: int) -> None:
    """A variant is never guessed: the message says which ids are known."""
    with pytest.raises(CorruptError, match=rf"codec id {code} is unknown.*\[1, 2, 3"):
        codec_by_code(code)
