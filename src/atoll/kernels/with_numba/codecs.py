"""Codecs fp32, bf16, int8 and e3m0, and the sums of squares for a norm.

fp32 and bf16 are bits, rounded or not. int8 has a byte per element, and per block the
scale that makes its largest 127. e3m0 has a sign and a power of two in four bits, by
integer operations only.

The judge of an update needs none of its elements, only the sums of their squares and
whether all are finite: `*_squares` write nothing else. Their bits are those of a
`*_decode` and `sum_squares`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import (
    E3M0_BLOCK,
    E3M0_HEAD,
    E3M0_MAX_EXPONENT,
    E3M0_MIN_EXPONENT,
    E3M0_ZERO,
    F32,
    F64,
    INT8_BLOCK,
    INT8_HEAD,
    INT8_MAX_SCALE,
    LANES,
    TINY,
    U8,
    U16,
)
from atoll.kernels.with_numba.jit import (
    BF16,
    FP32,
    INFINITY,
    MAGNITUDE,
    U32,
    Half,
    bits_of,
    first_at_least,
    float_of,
    flush,
    jit,
    largest_magnitude,
    read_u32,
    widen,
    write_u32,
)

# Faults are searched at the end of a strip, while it is in the first cache.
_STRIP = 4096

_BF16_OVERFLOW = np.uint32(0x7F7F8000)
_BF16_HALF = np.uint32(0x7FFF)
_16 = np.uint32(16)
_LOWEST_BIT = np.uint32(1)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def fp32_encode(x: F32, out: F32) -> int:
    """Copy `x` bit by bit; refuse NaN and infinity."""
    return _fp32_encode(x.view(np.uint32), out.view(np.uint32))


def fp32_decode(body: F32, out: F32) -> int:
    """Copy `body`, flushed; refuse NaN and infinity."""
    return _decode(body.view(np.uint32), FP32, out)


def bf16_encode(x: F32, out: U16) -> int:
    """Round to the nearest bf16, ties to even; refuse NaN, infinity and overflow."""
    return _bf16_encode(x.view(np.uint32), out)


def bf16_stochastic(x: F32, out: U16, seed: int, first: int) -> int:
    """Round to a neighbouring bf16 by the bits of (seed, first + i), without bias."""
    return _bf16_stochastic(x.view(np.uint32), out, np.uint64(seed), np.uint64(first))


def bf16_decode(body: U16, out: F32) -> int:
    """Widen to fp32, flushed; refuse NaN and infinity."""
    return _decode(body, BF16, out)


def round_bf16(x: F32, out: F32) -> None:
    """Round to the nearest bf16, ties to even, and widen again; NaN stays NaN."""
    _round_bf16(x.view(np.uint32), out.view(np.uint32))


@jit
def _fp32_encode(x: U32, out: U32) -> int:
    for first in range(0, x.size, _STRIP):
        strip, to = x[first : first + _STRIP], out[first : first + _STRIP]
        largest = np.uint32(0)
        for i in range(strip.size):
            to[i] = strip[i]
            largest = max(largest, np.uint32(strip[i] & MAGNITUDE))
        if largest >= INFINITY:
            return first + first_at_least(strip, INFINITY, FP32)
    return -1


@jit
def _decode(body: U32 | U16, half: Half, out: F32) -> int:
    """Write the numbers of which a body has the upper bits, flushed."""
    for first in range(0, out.size, _STRIP):
        strip, to = body[first : first + _STRIP], out[first : first + _STRIP]
        largest = np.uint32(0)
        for i in range(to.size):
            bits = widen(strip[i], half)
            to[i] = flush(float_of(bits))
            largest = max(largest, np.uint32(bits & MAGNITUDE))
        if largest >= INFINITY:
            return first + first_at_least(strip, INFINITY, half)
    return -1


@jit
def _nearest_bf16(bits: np.uint32) -> np.uint32:
    odd = np.uint32(bits >> _16) & _LOWEST_BIT
    return np.uint32(np.uint32(bits + np.uint32(odd + _BF16_HALF)) >> _16)


@jit
def _bf16_encode(x: U32, out: U16) -> int:
    for first in range(0, x.size, _STRIP):
        strip, to = x[first : first + _STRIP], out[first : first + _STRIP]
        largest = np.uint32(0)
        for i in range(strip.size):
            to[i] = np.uint16(_nearest_bf16(strip[i]))
            largest = max(largest, np.uint32(strip[i] & MAGNITUDE))
        if largest >= _BF16_OVERFLOW:
            return first + first_at_least(strip, _BF16_OVERFLOW, FP32)
    return -1


@jit
def _noise(seed: np.uint64, number: np.uint64) -> np.uint32:
    mixed = seed + (number + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return np.uint32(mixed >> np.uint64(48))


@jit
def _bf16_stochastic(x: U32, out: U16, seed: np.uint64, start: np.uint64) -> int:
    for first in range(0, x.size, _STRIP):
        strip, to = x[first : first + _STRIP], out[first : first + _STRIP]
        largest = np.uint32(0)
        for i in range(strip.size):
            noise = _noise(seed, start + np.uint64(first + i))
            to[i] = np.uint16(np.uint32(strip[i] + noise) >> _16)
            largest = max(largest, np.uint32(np.uint32(strip[i] & MAGNITUDE) + noise))
        if largest >= INFINITY:
            for i in range(strip.size):
                noise = _noise(seed, start + np.uint64(first + i))
                if np.uint32(np.uint32(strip[i] & MAGNITUDE) + noise) >= INFINITY:
                    return first + i
    return -1


@jit
def _round_bf16(x: U32, out: U32) -> None:
    for i in range(x.size):
        is_nan = np.uint32(x[i] & MAGNITUDE) > INFINITY
        rounded = np.uint32(_nearest_bf16(x[i]) << _16)
        out[i] = x[i] if is_nan else rounded


_ZERO_SCALE = np.float32(0)
_127 = np.float32(127)
_MAX_SCALE_BITS = INT8_MAX_SCALE.view(np.uint32)


def int8_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity."""
    return _int8_encode(x, x.view(np.uint32), body, body.view(np.int8))


def int8_decode(body: U8, out: F32) -> int:
    """Write code * scale, flushed; refuse a code of -128 and an impossible scale."""
    return _int8_decode(body, body.view(np.int8), out)


@jit
def _int8_encode(x: F32, bits: U32, body: U8, codes: NDArray[np.int8]) -> int:
    offset = 0
    for first in range(0, x.size, INT8_BLOCK):
        block = x[first : first + INT8_BLOCK]
        block_bits = bits[first : first + INT8_BLOCK]
        largest = largest_magnitude(block_bits)
        if largest >= INFINITY:
            return first + first_at_least(block_bits, INFINITY, FP32)
        scale = min(np.float32(float_of(largest) / _127), INT8_MAX_SCALE)
        scale = _ZERO_SCALE if scale < TINY else scale
        write_u32(body, offset, bits_of(scale))
        to = codes[offset + INT8_HEAD : offset + INT8_HEAD + block.size]
        if scale == _ZERO_SCALE:
            to[:] = 0
        else:
            _quantise(block, scale, to)
        offset += INT8_HEAD + block.size
    return -1


@jit
def _quantise(block: F32, scale: np.float32, to: NDArray[np.int8]) -> None:
    for i in range(block.size):
        code = np.rint(np.float32(block[i] / scale))
        to[i] = np.int8(np.int32(min(max(code, -_127), _127)))


@jit
def _int8_decode(body: U8, codes: NDArray[np.int8], out: F32) -> int:
    offset = 0
    for first in range(0, out.size, INT8_BLOCK):
        block = out[first : first + INT8_BLOCK]
        bits = read_u32(body, offset)
        if bits > _MAX_SCALE_BITS:
            return first
        scale = float_of(bits)
        code = codes[offset + INT8_HEAD : offset + INT8_HEAD + block.size]
        for i in range(block.size):
            block[i] = flush(np.float32(code[i]) * scale)
        refused = _first_bad(code)
        if refused >= 0:
            return first + refused
        offset += INT8_HEAD + block.size
    return -1


@jit
def _first_bad(code: NDArray[np.int8]) -> int:
    """Return the index of the first -128, which no encoder writes, or -1."""
    is_bad = False
    for i in range(code.size):
        is_bad |= code[i] == -128
    if is_bad:
        for i in range(code.size):
            if code[i] == -128:
                return i
    return -1


_HALF_STEP = np.uint32(0x400000)
_MIN_EXPONENT = np.int32(E3M0_MIN_EXPONENT)
_MAX_EXPONENT = np.int32(E3M0_MAX_EXPONENT)
_ZERO_CODE = np.int32(E3M0_ZERO)
_NO_EXPONENT = np.int32(0)
_PAIRS = E3M0_BLOCK // 2
_E3M0_BYTES = E3M0_HEAD + _PAIRS


def e3m0_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity."""
    rest = x.size % E3M0_BLOCK
    full_size, full_bytes = x.size - rest, x.size // E3M0_BLOCK * _E3M0_BYTES
    bits = x.view(np.uint32)
    refused = _e3m0_encode(bits[:full_size], body[:full_bytes])
    if refused >= 0 or not rest:
        return refused
    block, packed = np.zeros(E3M0_BLOCK, np.uint32), np.empty(_E3M0_BYTES, np.uint8)
    block[:rest] = bits[full_size:]
    refused = _e3m0_encode(block, packed)
    body[full_bytes:] = packed[: body.size - full_bytes]
    if rest % 2:
        body[-1] &= 15
    return full_size + refused if refused >= 0 else -1


def e3m0_decode(body: U8, out: F32) -> int:
    """Write the powers of two; refuse E = 255 and a last nibble that is not padding."""
    rest = out.size % E3M0_BLOCK
    full_size, full_bytes = out.size - rest, out.size // E3M0_BLOCK * _E3M0_BYTES
    bits, halves = out.view(np.uint32), np.empty(E3M0_BLOCK, np.uint16)
    refused = _e3m0_decode(body[:full_bytes], halves, bits[:full_size])
    if refused >= 0 or not rest:
        return refused
    block, packed = np.empty(E3M0_BLOCK, np.uint32), np.zeros(_E3M0_BYTES, np.uint8)
    packed[: body.size - full_bytes] = body[full_bytes:]
    if _e3m0_decode(packed, halves, block) >= 0:
        return full_size
    if rest % 2 and body[-1] >= 16:
        return out.size - 1
    bits[full_size:] = block[:rest]
    return -1


@jit
def _e3m0_encode(x: U32, body: U8) -> int:
    """Write full blocks."""
    offset = 0
    for first in range(0, x.size, E3M0_BLOCK):
        block = x[first : first + E3M0_BLOCK]
        magnitude = np.uint32(0)
        for i in range(E3M0_BLOCK):
            magnitude = max(magnitude, np.uint32(block[i] & MAGNITUDE))
        if magnitude >= INFINITY:
            return first + first_at_least(block, INFINITY, FP32)
        largest = min(_exponent(magnitude), _MAX_EXPONENT)
        largest = _NO_EXPONENT if largest < _MIN_EXPONENT else largest
        body[offset] = np.uint8(largest)
        pairs = body[offset + E3M0_HEAD : offset + _E3M0_BYTES]
        for i in range(_PAIRS):
            low = _nibble(block[2 * i], largest)
            high = _nibble(block[2 * i + 1], largest)
            pairs[i] = np.uint8(low | high << np.int32(4))
        offset += _E3M0_BYTES
    return -1


@jit
def _exponent(bits: np.uint32) -> np.int32:
    """Return the exponent field of the power of two nearest to a magnitude."""
    return np.int32(
        np.uint32(np.uint32(bits & MAGNITUDE) + _HALF_STEP) >> np.uint32(23)
    )


@jit
def _nibble(bits: np.uint32, largest: np.int32) -> np.int32:
    exponent = _exponent(bits)
    code = max(np.int32(largest - exponent), _NO_EXPONENT)
    is_zero = (code >= _ZERO_CODE) | (exponent < _MIN_EXPONENT)
    sign = np.int32(np.uint32(bits >> np.uint32(28)) & np.uint32(8))
    return _ZERO_CODE if is_zero else np.int32(code | sign)


@jit
def _e3m0_decode(body: U8, halves: U16, out: U32) -> int:
    """Write the numbers of full blocks; `halves` is scratch for one.

    A power of two has only upper bits: they are made by operations on 16 bits.
    """
    offset = 0
    for first in range(0, out.size, E3M0_BLOCK):
        block = out[first : first + E3M0_BLOCK]
        largest = np.int16(body[offset])
        if largest > _MAX_EXPONENT:
            return first
        pairs = body[offset + E3M0_HEAD : offset + _E3M0_BYTES]
        for i in range(_PAIRS):
            pair = np.int16(pairs[i])
            halves[2 * i] = _upper_half(np.int16(pair & np.int16(15)), largest)
            halves[2 * i + 1] = _upper_half(np.int16(pair >> np.int16(4)), largest)
        for i in range(E3M0_BLOCK):
            block[i] = widen(halves[i], BF16)
        offset += _E3M0_BYTES
    return -1


@jit
def _upper_half(nibble: np.int16, largest: np.int16) -> np.uint16:
    """Return the upper 16 bits of the fp32 number that a nibble stands for."""
    code = np.int16(nibble & np.int16(7))
    exponent = np.int16(largest - code)
    is_zero = (code == np.int16(E3M0_ZERO)) | (exponent < np.int16(E3M0_MIN_EXPONENT))
    sign = np.int16(np.int16(nibble & np.int16(8)) << np.int16(12))
    value = np.int16(np.int16(exponent << np.int16(7)) | sign)
    return np.uint16(0) if is_zero else np.uint16(value)


ALL = np.float64(0)
_TINY_SQUARE = np.float64(TINY) ** 2
"""Exact, and so is a square of fp32 in fp64: it is below this if its root is tiny."""

ROWS = 4 * LANES
"""Elements added at a time: so a lane is read and written once for four of them."""


def sum_squares(x: F32, lanes: F64) -> None:
    """Add the square of element i to lane i % 64, in order, in fp64."""
    add_squares(x.view(np.uint32), FP32, ALL, lanes)


def fp32_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the square of element i to lane i % 64, flushed; refuse NaN and infinity.

    `body` has exactly the bytes of `elements`. Return the index of the first element
    that is refused, or -1. The lanes are garbage after a refusal; the
    other functions here share this.
    """
    return _squares(body.view(np.uint32), FP32, lanes)


def bf16_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of a bf16 body; refuse NaN and infinity."""
    return _squares(body.view(np.uint16), BF16, lanes)


def e3m0_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of an e3m0 body; refuse E = 255 and a wrong last nibble."""
    full_size = elements // E3M0_BLOCK * E3M0_BLOCK
    full_bytes = full_size // E3M0_BLOCK * _E3M0_BYTES
    refused = _e3m0_squares(body[:full_bytes], full_size, lanes)
    if refused >= 0 or full_size == elements:
        return refused
    rest = np.empty(elements - full_size, np.float32)
    refused = e3m0_decode(body[full_bytes:], rest)
    sum_squares(rest, lanes)
    return full_size + refused if refused >= 0 else -1


@jit
def _squares(body: U32 | U16, half: Half, lanes: F64) -> int:
    add_squares(body, half, _TINY_SQUARE, lanes)
    total = np.float64(0)
    for lane in range(LANES):
        total += lanes[lane]
    return -1 if np.isfinite(total) else first_at_least(body, INFINITY, half)


@jit
def _e3m0_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of full blocks, a strip at a time."""
    halves, values = np.empty(E3M0_BLOCK, np.uint16), np.empty(_STRIP, np.uint32)
    offset = 0
    for first in range(0, elements, _STRIP):
        strip = values[: min(_STRIP, elements - first)]
        refused = _e3m0_decode(body[offset:], halves, strip)
        if refused >= 0:
            return first + refused
        add_squares(strip, FP32, ALL, lanes)
        offset += _STRIP // E3M0_BLOCK * _E3M0_BYTES
    return -1


@jit
def add_squares(body: U32 | U16, half: Half, minimum: np.float64, lanes: F64) -> None:
    """Add the squares that are not below `minimum`; NaN is not."""
    full_size = body.size // ROWS * ROWS
    for first in range(0, full_size, ROWS):
        row_0 = body[first : first + LANES]
        row_1 = body[first + LANES : first + 2 * LANES]
        row_2 = body[first + 2 * LANES : first + 3 * LANES]
        row_3 = body[first + 3 * LANES : first + ROWS]
        for j in range(LANES):
            total = lanes[j] + _square(row_0[j], half, minimum)
            total += _square(row_1[j], half, minimum)
            total += _square(row_2[j], half, minimum)
            lanes[j] = total + _square(row_3[j], half, minimum)
    for i in range(full_size, body.size):
        lanes[i % LANES] += _square(body[i], half, minimum)


@jit
def _square(bits: np.uint32 | np.uint16, half: Half, minimum: np.float64) -> np.float64:
    value = np.float64(float_of(widen(bits, half)))
    return ALL if value * value < minimum else value * value
