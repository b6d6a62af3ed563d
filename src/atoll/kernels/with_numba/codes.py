"""A part of an int8 block at once, written with vectors.

Each builds a few instructions of LLVM for 64 elements, a quarter of a block. A block
that is not whole goes by the plain loops.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from atoll.kernels.layouts import TINY
from atoll.kernels.with_numba.building import (
    I32,
    call,
    every,
    load,
    place,
    spread,
    store,
)

PART = 64
"""Elements at once."""

_FLOATS = ir.VectorType(ir.FloatType(), PART)
_BITS = ir.VectorType(I32, PART)
_CODES = ir.VectorType(ir.IntType(8), PART)
_MASK = ir.IntType(PART)


@intrinsic
def quantise_part(
    typing: Any, x: Any, first: Any, scale: Any, codes: Any, at: Any
) -> Any:
    """Write rint(x / scale) within -127..127 of the part at `first`; x is finite."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        part = load(builder, place(context, builder, signature, args, 0), _FLOATS)
        ratio = builder.fdiv(part, spread(builder, args[2], _FLOATS))
        code = call(builder, f"llvm.rint.v{PART}f32", _FLOATS, ratio)
        for limit, beyond in ((-127.0, "<"), (127.0, ">")):
            most = every(_FLOATS, limit)
            is_beyond = builder.fcmp_ordered(beyond, code, most)
            code = builder.select(is_beyond, most, code)
        short = builder.trunc(builder.fptosi(code, _BITS), _CODES)
        store(builder, short, place(context, builder, signature, args, 3))
        return context.get_dummy_value()

    return types.void(x, first, scale, codes, at), build


@intrinsic
def restore_part(
    typing: Any, codes: Any, at: Any, scale: Any, out: Any, first: Any
) -> Any:
    """Write code * scale, flushed, of a part; return a bit for each code of -128."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = load(builder, place(context, builder, signature, args, 0), _CODES)
        wide = builder.sitofp(builder.sext(code, _BITS), _FLOATS)
        value = builder.fmul(wide, spread(builder, args[2], _FLOATS))
        bits = builder.bitcast(value, _BITS)
        magnitude = builder.bitcast(
            builder.and_(bits, every(_BITS, 0x7FFFFFFF)), _FLOATS
        )
        is_tiny = builder.fcmp_ordered("<", magnitude, every(_FLOATS, float(TINY)))
        value = builder.select(is_tiny, every(_FLOATS, 0.0), value)
        store(builder, value, place(context, builder, signature, args, 3))
        is_bad = builder.icmp_signed("==", code, every(_CODES, -128))
        return builder.bitcast(is_bad, _MASK)

    return types.uint64(codes, at, scale, out, first), build
