"""A whole block of e3m0 at once, written with vectors where a compiler finds none.

Each builds a few instructions of LLVM for 64 elements, which processors with shorter
registers take in several turns. A block that is not whole goes by the plain loops.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from atoll.kernels.layouts import E3M0_BLOCK, E3M0_MIN_EXPONENT, E3M0_ZERO
from atoll.kernels.with_numba.building import call, every, load, place, spread, store

_I8, _I16, _I32 = (ir.IntType(bits) for bits in (8, 16, 32))
_BITS = ir.VectorType(_I32, E3M0_BLOCK)
_HALVES = ir.VectorType(_I16, E3M0_BLOCK)
_NIBBLES = ir.VectorType(_I8, E3M0_BLOCK)
_PAIRS = ir.VectorType(_I8, E3M0_BLOCK // 2)
_WIDE_PAIRS = ir.VectorType(_I32, E3M0_BLOCK // 2)

_INTERLEAVE = ir.Constant(
    _BITS, [i // 2 + i % 2 * (E3M0_BLOCK // 2) for i in range(E3M0_BLOCK)]
)


@intrinsic
def largest_of_block(typing: Any, bits: Any, first: Any) -> Any:
    """Return the largest magnitude of the block that starts at `first`, as bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = load(builder, place(context, builder, signature, args, 0), _BITS)
        magnitude = builder.and_(block, every(_BITS, 0x7FFFFFFF))
        name = f"llvm.vector.reduce.umax.v{E3M0_BLOCK}i32"
        return call(builder, name, _I32, magnitude)

    return types.uint32(bits, first), build


@intrinsic
def pack_block(
    typing: Any, bits: Any, first: Any, largest: Any, body: Any, at: Any
) -> Any:
    """Write the nibbles of the block at `first`, whose E is `largest`, to `body`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block = load(builder, place(context, builder, signature, args, 0), _BITS)
        nibbles = _nibbles(builder, block, spread(builder, args[2], _HALVES))
        pairs = builder.bitcast(nibbles, _WIDE_PAIRS)
        # The odd element of a pair is in the upper half of its 32 bits.
        pairs = builder.or_(pairs, builder.lshr(pairs, every(_WIDE_PAIRS, 12)))
        to = place(context, builder, signature, args, 3)
        store(builder, builder.trunc(pairs, _PAIRS), to)
        return context.get_dummy_value()

    return types.void(bits, first, largest, body, at), build


def _nibbles(builder: Any, block: Any, largest: Any) -> Any:
    """Build the nibbles of 64 numbers, each in 16 bits."""
    # Rounding to the nearest power of two never carries into the sign.
    rounded = builder.add(block, every(_BITS, 0x400000))
    halves = builder.trunc(builder.lshr(rounded, every(_BITS, 23)), _HALVES)
    exponent = builder.and_(halves, every(_HALVES, 0xFF))
    sign = builder.and_(builder.lshr(halves, every(_HALVES, 5)), every(_HALVES, 8))
    is_larger = builder.icmp_unsigned(">", exponent, largest)
    below = builder.sub(largest, exponent)
    code = builder.select(is_larger, every(_HALVES, 0), below)
    is_zero = builder.or_(
        builder.icmp_unsigned(">=", code, every(_HALVES, E3M0_ZERO)),
        builder.icmp_unsigned("<", exponent, every(_HALVES, E3M0_MIN_EXPONENT)),
    )
    return builder.select(is_zero, every(_HALVES, E3M0_ZERO), builder.or_(code, sign))


@intrinsic
def unpack_block(
    typing: Any, body: Any, at: Any, largest: Any, bits: Any, first: Any
) -> Any:
    """Write the bits of the 64 numbers whose nibbles start at `at` of `body`."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = load(builder, place(context, builder, signature, args, 0), _PAIRS)
        low = builder.and_(pairs, every(_PAIRS, 15))
        high = builder.lshr(pairs, every(_PAIRS, 4))
        nibbles = builder.shuffle_vector(low, high, _INTERLEAVE)
        halves = _upper_halves(builder, nibbles, args[2])
        values = builder.shl(builder.zext(halves, _BITS), every(_BITS, 16))
        store(builder, values, place(context, builder, signature, args, 3))
        return context.get_dummy_value()

    return types.void(body, at, largest, bits, first), build


def _upper_halves(builder: Any, nibbles: Any, largest: Any) -> Any:
    """Build the upper 16 bits of 64 numbers; a power of two has no others."""
    code = builder.and_(nibbles, every(_NIBBLES, 7))
    is_value = builder.icmp_signed(
        "<=", code, spread(builder, _last_code(builder, largest), _NIBBLES)
    )
    short = builder.trunc(largest, _I8)
    exponent = builder.sub(spread(builder, short, _NIBBLES), code)
    sign = builder.zext(builder.and_(nibbles, every(_NIBBLES, 8)), _HALVES)
    value = builder.or_(
        builder.shl(builder.zext(exponent, _HALVES), every(_HALVES, 7)),
        builder.shl(sign, every(_HALVES, 12)),
    )
    return builder.select(is_value, value, every(_HALVES, 0))


def _last_code(builder: Any, largest: Any) -> Any:
    """Build the largest code that is no zero: -1 where every one is."""
    least, most = ir.Constant(_I32, -1), ir.Constant(_I32, E3M0_ZERO - 1)
    last = builder.sub(largest, ir.Constant(_I32, E3M0_MIN_EXPONENT))
    last = builder.select(builder.icmp_signed("<", last, least), least, last)
    last = builder.select(builder.icmp_signed(">", last, most), most, last)
    return builder.trunc(last, _I8)
