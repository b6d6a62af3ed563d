"""Sums of squares of a body's elements, straight from its bytes: for a norm.

The judge of an update needs none of its elements, only the sums of their squares and
whether all are finite. So nothing is written but 64 sums, which stay in registers where
a processor has enough. Their bits are those of a `*_decode` and `sum_squares`.

Rows of 64 squares use vector instructions of LLVM, because a compiler leaves the sums
in memory. A row has an element for each lane of a norm. The lanes are eight vectors of
eight fp64 numbers; a square is taken in fp64 and added to its lane, row after row, so
that every sum has the order, and the bits, of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from atoll.kernels.layouts import (
    E3M0_BLOCK,
    E3M0_HEAD,
    E3M0_MAX_EXPONENT,
    E3M0_MIN_EXPONENT,
    E3M0_ZERO,
    F32,
    F64,
    LANES,
    TINY,
    U8,
    U16,
)
from atoll.kernels.with_numba.codecs import (
    bf16_decode,
    e3m0_decode,
    fp32_decode,
    sum_squares,
)
from atoll.kernels.with_numba.jit import (
    I8,
    I16,
    I32,
    I64,
    every,
    jit,
    larger,
    load,
    spread,
    store,
)

_WIDE = 8
"""fp64 numbers of a vector: one cache line."""

_PARTS = LANES // _WIDE

_FLOATS = ir.VectorType(ir.FloatType(), _WIDE)
_DOUBLES = ir.VectorType(ir.DoubleType(), _WIDE)
_BITS = ir.VectorType(I32, _WIDE)
_HALVES = ir.VectorType(I16, _WIDE)
_QUADS = ir.VectorType(I64, _WIDE)
_PAIRS = ir.VectorType(I8, E3M0_BLOCK // 2)
_CODES = ir.VectorType(I16, E3M0_BLOCK)

_TINY_SQUARE = float(TINY) ** 2
"""Exact, and so is a square of fp32 in fp64: it is below this if its root is tiny."""

_SQUARE_BIAS = 1023 - 2 * 127
"""From twice the exponent field of an fp32 number to the field of its fp64 square."""


@intrinsic
def add_rows(typing: Any, body: Any, lanes: Any, rows: Any) -> Any:
    """Add the squares of rows of fp32, or of bf16 in u16, to the lanes.

    A lane becomes infinite or NaN only through such an element: a sum of squares of
    fp32 numbers is far from the largest fp64 number.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, sums = (_data(context, builder, signature, args, i) for i in (0, 1))
        read = _half if signature.args[0].dtype == types.uint16 else _single
        sums_by_part = _Lanes(builder, sums)
        with for_range(builder, args[2]) as loop:
            row = builder.mul(loop.index, ir.Constant(I64, LANES))
            for part in range(_PARTS):
                offset = builder.add(row, ir.Constant(I64, _WIDE * part))
                values = read(builder, builder.gep(data, [offset]))
                wide = builder.fpext(values, _DOUBLES)
                sums_by_part.add(part, builder.fmul(wide, wide))
        sums_by_part.store()
        return context.get_dummy_value()

    return types.void(body, lanes, rows), build


@intrinsic
def add_nibbles(typing: Any, body: Any, lanes: Any, rows: Any) -> Any:
    """Add the squares of whole blocks of e3m0, which are rows, to the lanes.

    Returns the largest E of all blocks.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, sums = (_data(context, builder, signature, args, i) for i in (0, 1))
        sums_by_part = _Lanes(builder, sums)
        largest = alloca_once_value(builder, ir.Constant(I16, 0))
        with for_range(builder, args[2]) as loop:
            size = ir.Constant(I64, E3M0_HEAD + E3M0_BLOCK // 2)
            block = builder.gep(data, [builder.mul(loop.index, size)])
            exponent = builder.zext(builder.load(block), I16)
            builder.store(larger(builder, builder.load(largest), exponent), largest)
            packed = builder.gep(block, [ir.Constant(I64, E3M0_HEAD)])
            tops = _tops(builder, exponent, _codes(builder, packed))
            for part in range(_PARTS):
                sums_by_part.add_sound(part, _squares(builder, tops, part))
        sums_by_part.store()
        return builder.zext(builder.load(largest), I32)

    return types.uint32(body, lanes, rows), build


class _Lanes:
    """The sums, in registers from the first row to the last."""

    def __init__(self, builder: Any, sums: Any) -> None:
        self._builder = builder
        self._addresses = [
            builder.gep(sums, [ir.Constant(I64, _WIDE * part)])
            for part in range(_PARTS)
        ]
        self._sums = [
            alloca_once_value(builder, load(builder, address, _DOUBLES))
            for address in self._addresses
        ]

    def add(self, part: int, squares: Any) -> None:
        """Add squares except those of tiny elements; NaN is not tiny."""
        builder, address = self._builder, self._sums[part]
        before = builder.load(address)
        counts = builder.fcmp_unordered(">=", squares, every(_DOUBLES, _TINY_SQUARE))
        after = builder.fadd(before, squares)
        builder.store(builder.select(counts, after, before), address)

    def add_sound(self, part: int, squares: Any) -> None:
        """Add squares; no element is tiny."""
        builder, address = self._builder, self._sums[part]
        builder.store(builder.fadd(builder.load(address), squares), address)

    def store(self) -> None:
        builder = self._builder
        for address, sums in zip(self._addresses, self._sums, strict=True):
            store(builder, builder.load(sums), address)


def _single(builder: Any, address: Any) -> Any:
    return load(builder, address, _FLOATS)


def _half(builder: Any, address: Any) -> Any:
    """Return bf16 numbers as fp32."""
    wide = builder.zext(load(builder, address, _HALVES), _BITS)
    return builder.bitcast(builder.shl(wide, every(_BITS, 16)), _FLOATS)


def _codes(builder: Any, packed: Any) -> Any:
    """Return the codes of a block without their signs; the low nibble comes first."""
    pairs = load(builder, packed, _PAIRS)
    low = builder.and_(pairs, every(_PAIRS, 7))
    high = builder.and_(builder.lshr(pairs, every(_PAIRS, 4)), every(_PAIRS, 7))
    order = [half * _PAIRS.count + i for i in range(_PAIRS.count) for half in (0, 1)]
    mask = ir.Constant(ir.VectorType(I32, E3M0_BLOCK), order)
    return builder.zext(builder.shuffle_vector(low, high, mask), _CODES)


def _tops(builder: Any, exponent: Any, codes: Any) -> Any:
    """Return the upper 16 bits of the squares, which are powers of two, in fp64."""
    exponents = builder.sub(spread(builder, exponent, _CODES), codes)
    is_zero = builder.or_(
        builder.icmp_unsigned("==", codes, every(_CODES, E3M0_ZERO)),
        builder.icmp_signed("<", exponents, every(_CODES, E3M0_MIN_EXPONENT)),
    )
    field = builder.add(builder.add(exponents, exponents), every(_CODES, _SQUARE_BIAS))
    top = builder.shl(field, every(_CODES, 4))
    return builder.select(is_zero, every(_CODES, 0), top)


def _squares(builder: Any, tops: Any, part: int) -> Any:
    positions = list(range(_WIDE * part, _WIDE * (part + 1)))
    mask = ir.Constant(ir.VectorType(I32, _WIDE), positions)
    part_tops = builder.shuffle_vector(tops, ir.Constant(_CODES, ir.Undefined), mask)
    bits = builder.shl(builder.zext(part_tops, _QUADS), every(_QUADS, 48))
    return builder.bitcast(bits, _DOUBLES)


def _data(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    return make_array(signature.args[index])(context, builder, args[index]).data


Decode = Callable[..., int]
"""Fills fp32 elements from a part of a body; returns the index it refuses, or -1."""

_BLOCK_BYTES = E3M0_HEAD + E3M0_BLOCK // 2


def fp32_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the square of element i to lane i % 64, flushed; refuse NaN and infinity.

    `body` has exactly the bytes of `elements`. Return the index of the first element
    that is refused, or -1. The lanes are garbage after a refusal; the
    other functions here share this.
    """
    return _of_floats(fp32_decode, body.view(np.float32), lanes)


def bf16_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of a bf16 body; refuse NaN and infinity."""
    return _of_floats(bf16_decode, body.view(np.uint16), lanes)


def e3m0_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of an e3m0 body; refuse E = 255 and a wrong last nibble."""
    rows = elements // E3M0_BLOCK
    if _nibbles(body, lanes, rows) > E3M0_MAX_EXPONENT:
        return e3m0_decode(body, np.empty(elements, np.float32))
    rest = body[rows * _BLOCK_BYTES :]
    return _rest(e3m0_decode, rest, rows * E3M0_BLOCK, elements, lanes)


def _of_floats(decode: Decode, body: F32 | U16, lanes: F64) -> int:
    rows = body.size // LANES
    if not _rows(body, lanes, rows):
        return decode(body, np.empty(body.size, np.float32))
    return _rest(decode, body[rows * LANES :], rows * LANES, body.size, lanes)


def _rest(
    decode: Decode, rest: F32 | U16 | U8, first: int, elements: int, lanes: F64
) -> int:
    """Add the elements after the last full row."""
    if first == elements:
        return -1
    values = np.empty(elements - first, np.float32)
    refused = decode(rest, values)
    if refused >= 0:
        return first + refused
    sum_squares(values, lanes)
    return -1


@jit
def _rows(body: F32 | U16, lanes: F64, rows: int) -> bool:
    """Add rows; return whether all of them are finite."""
    add_rows(body, lanes, rows)
    total = np.float64(0)
    for lane in range(LANES):
        total += lanes[lane]
    return bool(np.isfinite(total))


@jit
def _nibbles(body: U8, lanes: F64, rows: int) -> np.uint32:
    largest: np.uint32 = add_nibbles(body, lanes, rows)
    return largest
