"""Rows of 64 squares written with vectors: a compiler leaves their sums in memory.

A row has an element for each lane of a norm. The lanes are eight vectors of eight fp64
numbers; a square is taken in fp64 and added to its lane, row after row, so that every
sum has the order, and the bits, of the plain loop.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from atoll.kernels.layouts import (
    E3M0_BLOCK,
    E3M0_HEAD,
    E3M0_MIN_EXPONENT,
    E3M0_ZERO,
    LANES,
    TINY,
)
from atoll.kernels.with_numba.building import every, larger, load, spread, store

_WIDE = 8
"""fp64 numbers of a vector: one cache line."""

_PARTS = LANES // _WIDE

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS = ir.VectorType(ir.FloatType(), _WIDE)
_DOUBLES = ir.VectorType(ir.DoubleType(), _WIDE)
_BITS = ir.VectorType(_I32, _WIDE)
_HALVES = ir.VectorType(_I16, _WIDE)
_WORDS = ir.VectorType(_I64, _WIDE)
_PAIRS = ir.VectorType(_I8, E3M0_BLOCK // 2)
_CODES = ir.VectorType(_I16, E3M0_BLOCK)

_TINY_SQUARE = float(TINY) ** 2
"""Exact, and so is a square of fp32 in fp64: it is below this if its root is tiny."""

_SQUARE_BIAS = 1023 - 2 * 127
"""From twice the exponent field of an fp32 number to the field of its fp64 square."""


@intrinsic
def add_rows(typing: Any, body: Any, lanes: Any, rows: Any) -> Any:
    """Add the squares of rows of fp32, or of bf16 in u16, to the lanes.

    What is not finite makes its lane not finite, and nothing else does: a sum of
    squares of fp32 numbers is far from the largest fp64 number.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, sums = (_data(context, builder, signature, args, i) for i in (0, 1))
        read = _half if signature.args[0].dtype == types.uint16 else _single
        kept = _Lanes(builder, sums)
        with for_range(builder, args[2]) as loop:
            row = builder.mul(loop.index, ir.Constant(_I64, LANES))
            for part in range(_PARTS):
                at = builder.add(row, ir.Constant(_I64, _WIDE * part))
                values = read(builder, builder.gep(data, [at]))
                wide = builder.fpext(values, _DOUBLES)
                kept.add(part, builder.fmul(wide, wide))
        kept.store()
        return context.get_dummy_value()

    return types.void(body, lanes, rows), build


@intrinsic
def add_nibbles(typing: Any, body: Any, lanes: Any, rows: Any) -> Any:
    """Add the squares of whole blocks of e3m0, which are rows, to the lanes.

    Returns the largest E of all blocks.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, sums = (_data(context, builder, signature, args, i) for i in (0, 1))
        kept = _Lanes(builder, sums)
        most = alloca_once_value(builder, ir.Constant(_I16, 0))
        with for_range(builder, args[2]) as loop:
            size = ir.Constant(_I64, E3M0_HEAD + E3M0_BLOCK // 2)
            block = builder.gep(data, [builder.mul(loop.index, size)])
            exponent = builder.zext(builder.load(block), _I16)
            builder.store(larger(builder, builder.load(most), exponent), most)
            packed = builder.gep(block, [ir.Constant(_I64, E3M0_HEAD)])
            tops = _tops(builder, exponent, _codes(builder, packed))
            for part in range(_PARTS):
                kept.add_sound(part, _squares(builder, tops, part))
        kept.store()
        return builder.zext(builder.load(most), _I32)

    return types.uint32(body, lanes, rows), build


class _Lanes:
    """The sums, in registers from the first row to the last."""

    def __init__(self, builder: Any, sums: Any) -> None:
        self._builder = builder
        self._places = [
            builder.gep(sums, [ir.Constant(_I64, _WIDE * part)])
            for part in range(_PARTS)
        ]
        self._sums = [
            alloca_once_value(builder, load(builder, place, _DOUBLES))
            for place in self._places
        ]

    def add(self, part: int, squares: Any) -> None:
        """Add squares, but those of tiny elements; NaN is not tiny."""
        builder, place = self._builder, self._sums[part]
        before = builder.load(place)
        counts = builder.fcmp_unordered(">=", squares, every(_DOUBLES, _TINY_SQUARE))
        after = builder.fadd(before, squares)
        builder.store(builder.select(counts, after, before), place)

    def add_sound(self, part: int, squares: Any) -> None:
        """Add squares of which none is of a tiny element."""
        builder, place = self._builder, self._sums[part]
        builder.store(builder.fadd(builder.load(place), squares), place)

    def store(self) -> None:
        builder = self._builder
        for place, each in zip(self._places, self._sums, strict=True):
            store(builder, builder.load(each), place)


def _single(builder: Any, at: Any) -> Any:
    return load(builder, at, _FLOATS)


def _half(builder: Any, at: Any) -> Any:
    """Return bf16 numbers as fp32."""
    wide = builder.zext(load(builder, at, _HALVES), _BITS)
    return builder.bitcast(builder.shl(wide, every(_BITS, 16)), _FLOATS)


def _codes(builder: Any, packed: Any) -> Any:
    """Return the codes of a block without their signs; the low nibble comes first."""
    pairs = load(builder, packed, _PAIRS)
    low = builder.and_(pairs, every(_PAIRS, 7))
    high = builder.and_(builder.lshr(pairs, every(_PAIRS, 4)), every(_PAIRS, 7))
    order = [half * _PAIRS.count + i for i in range(_PAIRS.count) for half in (0, 1)]
    mask = ir.Constant(ir.VectorType(_I32, E3M0_BLOCK), order)
    return builder.zext(builder.shuffle_vector(low, high, mask), _CODES)


def _tops(builder: Any, exponent: Any, codes: Any) -> Any:
    """Return the upper 16 bits of the squares, which are powers of two, in fp64."""
    own = builder.sub(spread(builder, exponent, _CODES), codes)
    is_zero = builder.or_(
        builder.icmp_unsigned("==", codes, every(_CODES, E3M0_ZERO)),
        builder.icmp_signed("<", own, every(_CODES, E3M0_MIN_EXPONENT)),
    )
    field = builder.add(builder.add(own, own), every(_CODES, _SQUARE_BIAS))
    top = builder.shl(field, every(_CODES, 4))
    return builder.select(is_zero, every(_CODES, 0), top)


def _squares(builder: Any, tops: Any, part: int) -> Any:
    places = list(range(_WIDE * part, _WIDE * (part + 1)))
    mask = ir.Constant(ir.VectorType(_I32, _WIDE), places)
    own = builder.shuffle_vector(tops, ir.Constant(_CODES, ir.Undefined), mask)
    bits = builder.shl(builder.zext(own, _WORDS), every(_WORDS, 48))
    return builder.bitcast(bits, _DOUBLES)


def _data(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    return make_array(signature.args[index])(context, builder, args[index]).data
