"""Codecs fp32, bf16, int8 and e3m0, and the sum of squares for a norm.

fp32 and bf16 are bits, rounded or not. int8 has a byte per element, and per block the
scale that makes its largest 127. e3m0 has a sign and a power of two in four bits, by
integer operations only.

int8 and e3m0 encode 64 elements at a time with vector instructions of LLVM; processors
with shorter registers use several. The short block at the end uses the plain loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
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
    I8,
    I16,
    I32,
    INFINITY,
    LINE,
    MAGNITUDE,
    U32,
    WRITES_AHEAD,
    bits_of,
    call,
    element_address,
    every,
    fetch_line,
    first_at_least,
    float_of,
    flush,
    jit,
    largest_magnitude,
    load,
    read_u32,
    spread,
    store,
    write_u32,
)

# Faults are searched at the end of a strip, so that its loop has no early exit and can
# be vectorised.
_STRIP = 4096

_BF16_OVERFLOW = np.uint32(0x7F7F8000)
_BF16_HALF = np.uint32(0x7FFF)
_LOWEST_BIT = np.uint32(1)
_16 = np.uint32(16)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def fp32_encode(x: F32, out: F32) -> int:
    """Copy `x` bit by bit; refuse NaN and infinity."""
    return _fp32_encode(x.view(np.uint32), out.view(np.uint32))


def fp32_decode(body: F32, out: F32) -> int:
    """Copy `body`, flushed; refuse NaN and infinity."""
    return _fp32_decode(body.view(np.uint32), out)


def bf16_encode(x: F32, out: U16) -> int:
    """Round to the nearest bf16, ties to even; refuse NaN, infinity and overflow."""
    return _bf16_encode(x.view(np.uint32), out)


def bf16_stochastic(x: F32, out: U16, seed: int, first: int) -> int:
    """Round to a neighbouring bf16 by the bits of (seed, first + i), without bias."""
    return _bf16_stochastic(x.view(np.uint32), out, np.uint64(seed), np.uint64(first))


def bf16_decode(body: U16, out: F32) -> int:
    """Widen to fp32, flushed; refuse NaN and infinity."""
    return bf16_decode_loop(body, out)


def round_bf16(x: F32, out: F32) -> None:
    """Round to the nearest bf16, ties to even, and widen again; NaN stays NaN."""
    _round_bf16(x.view(np.uint32), out.view(np.uint32))


def sum_squares(x: F32, lanes: F64) -> None:
    """Add the square of element i to lane i % 64, in order, in fp64."""
    _sum_squares(x, lanes)


@jit
def _fp32_encode(x: U32, out: U32) -> int:
    for first in range(0, x.size, _STRIP):
        strip, to = x[first : first + _STRIP], out[first : first + _STRIP]
        _copy(strip, to)
        refused = first_at_least(strip, INFINITY)
        if refused >= 0:
            return first + refused
    return -1


@jit
def _copy(x: U32, out: U32) -> None:
    full_size = x.size // LINE * LINE
    for first in range(0, full_size, LINE):
        fetch_line(out, first + WRITES_AHEAD)
        line, to = x[first : first + LINE], out[first : first + LINE]
        for i in range(LINE):
            to[i] = line[i]
    for i in range(full_size, x.size):
        out[i] = x[i]


@jit
def _fp32_decode(body: U32, out: F32) -> int:
    for first in range(0, out.size, _STRIP):
        strip, to = body[first : first + _STRIP], out[first : first + _STRIP]
        for i in range(to.size):
            to[i] = flush(float_of(strip[i]))
        refused = first_at_least(strip, INFINITY)
        if refused >= 0:
            return first + refused
    return -1


@jit
def _nearest_bf16(bits: np.uint32) -> np.uint32:
    odd = np.uint32(bits >> _16) & _LOWEST_BIT
    return np.uint32(np.uint32(bits + np.uint32(odd + _BF16_HALF)) >> _16)


@jit
def _bf16_encode(x: U32, out: U16) -> int:
    for first in range(0, x.size, _STRIP):
        strip, to = x[first : first + _STRIP], out[first : first + _STRIP]
        for i in range(strip.size):
            to[i] = np.uint16(_nearest_bf16(strip[i]))
        refused = first_at_least(strip, _BF16_OVERFLOW)
        if refused >= 0:
            return first + refused
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
def bf16_decode_loop(body: U16, out: F32) -> int:
    """Widen to fp32, flushed; refuse NaN and infinity."""
    for first in range(0, out.size, _STRIP):
        strip, to = body[first : first + _STRIP], out[first : first + _STRIP]
        for i in range(to.size):
            to[i] = flush(float_of(np.uint32(np.uint32(strip[i]) << _16)))
        refused = _first_infinite_bf16(strip)
        if refused >= 0:
            return first + refused
    return -1


@jit
def _first_infinite_bf16(strip: U16) -> int:
    largest = np.uint16(0)
    for i in range(strip.size):
        largest = max(largest, np.uint16(strip[i] & np.uint16(0x7FFF)))
    if largest >= np.uint16(0x7F80):
        for i in range(strip.size):
            if np.uint16(strip[i] & np.uint16(0x7FFF)) >= np.uint16(0x7F80):
                return i
    return -1


@jit
def _round_bf16(x: U32, out: U32) -> None:
    for i in range(x.size):
        is_nan = np.uint32(x[i] & MAGNITUDE) > INFINITY
        rounded = np.uint32(_nearest_bf16(x[i]) << _16)
        out[i] = x[i] if is_nan else rounded


@jit
def _sum_squares(x: F32, lanes: F64) -> None:
    full_size = x.size // LANES * LANES
    for first in range(0, full_size, LANES):
        row = x[first : first + LANES]
        for j in range(LANES):
            lanes[j] += np.float64(row[j]) * np.float64(row[j])
    for j in range(x.size - full_size):
        lanes[j] += np.float64(x[full_size + j]) * np.float64(x[full_size + j])


PART = 64
"""Elements of a vector."""

_INT8_FLOATS = ir.VectorType(ir.FloatType(), PART)
_INT8_BITS = ir.VectorType(I32, PART)
_INT8_CODES = ir.VectorType(ir.IntType(8), PART)
_INT8_MASK = ir.IntType(PART)


@intrinsic
def quantise_part(
    typing: Any, x: Any, first: Any, scale: Any, codes: Any, offset: Any
) -> Any:
    """Write rint(x / scale) within -127..127 of the part at `first`; x is finite."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        part = load(
            builder, element_address(context, builder, signature, args, 0), _INT8_FLOATS
        )
        ratio = builder.fdiv(part, spread(builder, args[2], _INT8_FLOATS))
        code = call(builder, f"llvm.rint.v{PART}f32", _INT8_FLOATS, ratio)
        for limit, beyond in ((-127.0, "<"), (127.0, ">")):
            bound = every(_INT8_FLOATS, limit)
            is_beyond = builder.fcmp_ordered(beyond, code, bound)
            code = builder.select(is_beyond, bound, code)
        short = builder.trunc(builder.fptosi(code, _INT8_BITS), _INT8_CODES)
        store(builder, short, element_address(context, builder, signature, args, 3))
        return context.get_dummy_value()

    return types.void(x, first, scale, codes, offset), build


@intrinsic
def restore_part(
    typing: Any, codes: Any, offset: Any, scale: Any, out: Any, first: Any
) -> Any:
    """Write code * scale, flushed, of a part; return a bit for each code of -128."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = load(
            builder, element_address(context, builder, signature, args, 0), _INT8_CODES
        )
        wide = builder.sitofp(builder.sext(code, _INT8_BITS), _INT8_FLOATS)
        value = builder.fmul(wide, spread(builder, args[2], _INT8_FLOATS))
        bits = builder.bitcast(value, _INT8_BITS)
        magnitude = builder.bitcast(
            builder.and_(bits, every(_INT8_BITS, 0x7FFFFFFF)), _INT8_FLOATS
        )
        is_tiny = builder.fcmp_ordered("<", magnitude, every(_INT8_FLOATS, float(TINY)))
        value = builder.select(is_tiny, every(_INT8_FLOATS, 0.0), value)
        store(builder, value, element_address(context, builder, signature, args, 3))
        is_bad = builder.icmp_signed("==", code, every(_INT8_CODES, -128))
        return builder.bitcast(is_bad, _INT8_MASK)

    return types.uint64(codes, offset, scale, out, first), build


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
            return first + first_at_least(block_bits, INFINITY)
        scale = min(np.float32(float_of(largest) / _127), INT8_MAX_SCALE)
        scale = _ZERO_SCALE if scale < TINY else scale
        write_u32(body, offset, bits_of(scale))
        to = codes[offset + INT8_HEAD : offset + INT8_HEAD + block.size]
        if scale == _ZERO_SCALE:
            to[:] = 0
        elif block.size == INT8_BLOCK:
            for part in range(0, INT8_BLOCK, PART):
                quantise_part(block, part, scale, to, part)
        else:
            _quantise(block, scale, to)
        offset += INT8_HEAD + block.size
    return -1


@jit
def _quantise(block: F32, scale: np.float32, to: NDArray[np.int8]) -> None:
    for i in range(block.size):
        code = np.rint(np.float32(block[i] / scale))
        to[i] = np.int8(min(max(code, -_127), _127))


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
        refused = -1
        if block.size == INT8_BLOCK:
            bad = np.uint64(0)
            for part in range(0, INT8_BLOCK, PART):
                bad |= restore_part(code, part, scale, block, part)
            if bad:
                refused = _first_bad(code)
        else:
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
    for i in range(code.size):
        if code[i] == -128:
            return i
    return -1


_E3M0_BITS = ir.VectorType(I32, E3M0_BLOCK)
_E3M0_HALVES = ir.VectorType(I16, E3M0_BLOCK)
_E3M0_NIBBLES = ir.VectorType(I8, E3M0_BLOCK)
_E3M0_PAIRS = ir.VectorType(I8, E3M0_BLOCK // 2)
_E3M0_WIDE_PAIRS = ir.VectorType(I32, E3M0_BLOCK // 2)

_E3M0_INTERLEAVE = ir.Constant(
    _E3M0_BITS, [i // 2 + i % 2 * (E3M0_BLOCK // 2) for i in range(E3M0_BLOCK)]
)


@intrinsic
def largest_of_block(typing: Any, bits: Any, first: Any) -> Any:
    """Return the largest magnitude of the block that starts at `first`, as bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = load(
            builder, element_address(context, builder, signature, args, 0), _E3M0_BITS
        )
        magnitude = builder.and_(block, every(_E3M0_BITS, 0x7FFFFFFF))
        name = f"llvm.vector.reduce.umax.v{E3M0_BLOCK}i32"
        return call(builder, name, I32, magnitude)

    return types.uint32(bits, first), build


@intrinsic
def pack_block(
    typing: Any, bits: Any, first: Any, largest: Any, body: Any, offset: Any
) -> Any:
    """Write the nibbles of the block at `first`, whose E is `largest`, to `body`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = load(
            builder, element_address(context, builder, signature, args, 0), _E3M0_BITS
        )
        nibbles = _nibbles(builder, block, spread(builder, args[2], _E3M0_HALVES))
        pairs = builder.bitcast(nibbles, _E3M0_WIDE_PAIRS)
        # The odd element of a pair is in the upper half of its 32 bits.
        pairs = builder.or_(pairs, builder.lshr(pairs, every(_E3M0_WIDE_PAIRS, 12)))
        to = element_address(context, builder, signature, args, 3)
        store(builder, builder.trunc(pairs, _E3M0_PAIRS), to)
        return context.get_dummy_value()

    return types.void(bits, first, largest, body, offset), build


def _nibbles(builder: Any, block: Any, largest: Any) -> Any:
    """Build the nibbles of 64 numbers, each in 16 bits."""
    # Rounding to the nearest power of two never carries into the sign.
    rounded = builder.add(block, every(_E3M0_BITS, 0x400000))
    halves = builder.trunc(builder.lshr(rounded, every(_E3M0_BITS, 23)), _E3M0_HALVES)
    exponent = builder.and_(halves, every(_E3M0_HALVES, 0xFF))
    sign = builder.and_(
        builder.lshr(halves, every(_E3M0_HALVES, 5)), every(_E3M0_HALVES, 8)
    )
    is_larger = builder.icmp_unsigned(">", exponent, largest)
    below = builder.sub(largest, exponent)
    code = builder.select(is_larger, every(_E3M0_HALVES, 0), below)
    is_zero = builder.or_(
        builder.icmp_unsigned(">=", code, every(_E3M0_HALVES, E3M0_ZERO)),
        builder.icmp_unsigned("<", exponent, every(_E3M0_HALVES, E3M0_MIN_EXPONENT)),
    )
    return builder.select(
        is_zero, every(_E3M0_HALVES, E3M0_ZERO), builder.or_(code, sign)
    )


@intrinsic
def unpack_block(
    typing: Any, body: Any, offset: Any, largest: Any, bits: Any, first: Any
) -> Any:
    """Write the bits of the 64 numbers whose nibbles start at `offset` of `body`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = load(
            builder, element_address(context, builder, signature, args, 0), _E3M0_PAIRS
        )
        low = builder.and_(pairs, every(_E3M0_PAIRS, 15))
        high = builder.lshr(pairs, every(_E3M0_PAIRS, 4))
        nibbles = builder.shuffle_vector(low, high, _E3M0_INTERLEAVE)
        halves = _upper_halves(builder, nibbles, args[2])
        values = builder.shl(builder.zext(halves, _E3M0_BITS), every(_E3M0_BITS, 16))
        store(builder, values, element_address(context, builder, signature, args, 3))
        return context.get_dummy_value()

    return types.void(body, offset, largest, bits, first), build


def _upper_halves(builder: Any, nibbles: Any, largest: Any) -> Any:
    """Build the upper 16 bits of 64 numbers; a power of two has no others."""
    code = builder.and_(nibbles, every(_E3M0_NIBBLES, 7))
    is_value = builder.icmp_signed(
        "<=", code, spread(builder, _last_code(builder, largest), _E3M0_NIBBLES)
    )
    short = builder.trunc(largest, I8)
    exponent = builder.sub(spread(builder, short, _E3M0_NIBBLES), code)
    sign = builder.zext(builder.and_(nibbles, every(_E3M0_NIBBLES, 8)), _E3M0_HALVES)
    value = builder.or_(
        builder.shl(builder.zext(exponent, _E3M0_HALVES), every(_E3M0_HALVES, 7)),
        builder.shl(sign, every(_E3M0_HALVES, 12)),
    )
    return builder.select(is_value, value, every(_E3M0_HALVES, 0))


def _last_code(builder: Any, largest: Any) -> Any:
    """Build the largest code that is no zero: -1 where every one is."""
    lower, upper = ir.Constant(I32, -1), ir.Constant(I32, E3M0_ZERO - 1)
    last = builder.sub(largest, ir.Constant(I32, E3M0_MIN_EXPONENT))
    last = builder.select(builder.icmp_signed("<", last, lower), lower, last)
    last = builder.select(builder.icmp_signed(">", last, upper), upper, last)
    return builder.trunc(last, I8)


_HALF_STEP = np.uint32(0x400000)
_MIN_EXPONENT = np.int32(E3M0_MIN_EXPONENT)
_MAX_EXPONENT = np.int32(E3M0_MAX_EXPONENT)
_ZERO_CODE = np.int32(E3M0_ZERO)
_NO_EXPONENT = np.int32(0)


def e3m0_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity."""
    return _e3m0_encode(x.view(np.uint32), body)


def e3m0_decode(body: U8, out: F32) -> int:
    """Write the powers of two; refuse E = 255 and a last nibble that is not padding."""
    return _e3m0_decode(body, out.view(np.int32))


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
def _e3m0_encode(x: U32, body: U8) -> int:
    offset, full_size = 0, x.size // E3M0_BLOCK * E3M0_BLOCK
    for first in range(0, full_size, E3M0_BLOCK):
        magnitude = largest_of_block(x, first)
        if magnitude >= INFINITY:
            return first + first_at_least(x[first : first + E3M0_BLOCK], INFINITY)
        largest = _largest(magnitude)
        body[offset] = np.uint8(largest)
        pack_block(x, first, largest, body, offset + E3M0_HEAD)
        offset += E3M0_HEAD + E3M0_BLOCK // 2
    if full_size == x.size:
        return -1
    refused = _e3m0_encode_short(x[full_size:], body[offset:])
    return full_size + refused if refused >= 0 else -1


@jit
def _e3m0_encode_short(block: U32, body: U8) -> int:
    """Encode the short block at the end."""
    magnitude = largest_magnitude(block)
    if magnitude >= INFINITY:
        return first_at_least(block, INFINITY)
    largest = _largest(magnitude)
    body[0] = np.uint8(largest)
    pairs = block.size // 2
    _pack(block, largest, body[E3M0_HEAD : E3M0_HEAD + pairs])
    if block.size % 2:
        last = _nibble(block[block.size - 1], largest)
        body[E3M0_HEAD + pairs] = np.uint8(last)
    return -1


@jit
def _largest(magnitude: np.uint32) -> np.int32:
    """Return the E of a block from its largest magnitude."""
    largest = min(_exponent(magnitude), _MAX_EXPONENT)
    return _NO_EXPONENT if largest < _MIN_EXPONENT else largest


@jit
def _pack(block: U32, largest: np.int32, to: U8) -> None:
    for i in range(to.size):
        low = _nibble(block[2 * i], largest)
        high = _nibble(block[2 * i + 1], largest)
        to[i] = np.uint8(low | high << np.int32(4))


@jit
def _value(nibble: np.int32, largest: np.int32) -> np.int32:
    """Return the bits of the fp32 number that a nibble stands for."""
    code = np.int32(nibble & np.int32(7))
    exponent = np.int32(largest - code)
    is_zero = (code == _ZERO_CODE) | (exponent < _MIN_EXPONENT)
    sign = np.int32(np.int32(nibble >> np.int32(3)) << np.int32(31))
    return (
        _NO_EXPONENT if is_zero else np.int32(sign | np.int32(exponent << np.int32(23)))
    )


@jit
def _e3m0_decode(body: U8, out: NDArray[np.int32]) -> int:
    offset, full_size = 0, out.size // E3M0_BLOCK * E3M0_BLOCK
    for first in range(0, full_size, E3M0_BLOCK):
        largest = np.int32(body[offset])
        if largest > _MAX_EXPONENT:
            return first
        unpack_block(body, offset + E3M0_HEAD, largest, out, first)
        offset += E3M0_HEAD + E3M0_BLOCK // 2
    if full_size == out.size:
        return -1
    refused = _e3m0_decode_short(body[offset:], out[full_size:])
    return full_size + refused if refused >= 0 else -1


@jit
def _e3m0_decode_short(body: U8, block: NDArray[np.int32]) -> int:
    """Decode the short block at the end."""
    largest = np.int32(body[0])
    if largest > _MAX_EXPONENT:
        return 0
    pairs = block.size // 2
    _unpack(body[E3M0_HEAD : E3M0_HEAD + pairs], largest, block)
    if block.size % 2:
        last = body[E3M0_HEAD + pairs]
        if last >= 16:
            return block.size - 1
        block[block.size - 1] = _value(np.int32(last), largest)
    return -1


@jit
def _unpack(packed: U8, largest: np.int32, block: NDArray[np.int32]) -> None:
    for i in range(packed.size):
        pair = np.int32(packed[i])
        block[2 * i] = _value(np.int32(pair & np.int32(15)), largest)
        block[2 * i + 1] = _value(np.int32(pair >> np.int32(4)), largest)
