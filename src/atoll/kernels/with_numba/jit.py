"""The compiler options, and the primitives that all compiled kernels use.

numba compiles on first use and caches machine code between processes. The cache checks
only the file of the cached function: a primitive here must never change its meaning.

No fastmath, and fp32 scalars throughout: a Python float would turn a loop into fp64.

The second half builds vector instructions of LLVM, for loops that a compiler does not
vectorise. Arrays that are no multiple of a cache line use the plain loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from atoll.kernels.layouts import TINY, U8

P = ParamSpec("P")
R = TypeVar("R")

U32 = NDArray[np.uint32]

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
_ZERO = np.float32(0)


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function on first use; it releases the interpreter's lock."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        compiled = numba.njit(**options)(function)
    return cast(Callable[P, R], compiled)


@intrinsic
def bits_of(typing: Any, value: Any) -> Any:
    """Return the bits of an fp32 number as a u32."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), build


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """Return the fp32 number that has these bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), build


@jit
def flush(value: np.float32) -> np.float32:
    """Return +0.0 for a magnitude below 2**-100; NaN stays NaN."""
    return _ZERO if abs(value) < TINY else value


@jit
def largest_magnitude(bits: U32) -> np.uint32:
    """Return the largest bits without sign; infinity and NaN are the largest of all."""
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, np.uint32(bits[i] & MAGNITUDE))
    return largest


@jit
def first_at_least(bits: U32, limit: np.uint32) -> int:
    """Return the index of the first magnitude of `limit` or more, or -1.

    A loop without an early exit, which can be vectorised, checks for one first: valid
    values need no second loop.
    """
    if largest_magnitude(bits) >= limit:
        for i in range(bits.size):
            if np.uint32(bits[i] & MAGNITUDE) >= limit:
                return i
    return -1


@jit
def read_u32(body: U8, offset: int) -> np.uint32:
    """Return four bytes as a little-endian number, aligned or not."""
    low = np.uint32(body[offset]) | np.uint32(body[offset + 1]) << np.uint32(8)
    high = np.uint32(body[offset + 2]) | np.uint32(body[offset + 3]) << np.uint32(8)
    return np.uint32(low | high << np.uint32(16))


@jit
def write_u32(body: U8, offset: int, value: np.uint32) -> None:
    """Write a number as four bytes, little-endian, aligned or not."""
    for index in range(4):
        body[offset + index] = np.uint8(value >> np.uint32(8 * index))


I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))

PREFETCH_AHEAD = 256
"""Elements between the loop's position and the line it prefetches."""

WRITES_AHEAD = 1024
"""The same for arrays that are only written: hardware does not prefetch their lines."""

LINE = 16
"""fp32 elements of a vector."""


def element_address(
    context: Any, builder: Any, signature: Any, args: Any, index: int
) -> Any:
    """Build the address of an array's element, whose index is an argument after it."""
    array = make_array(signature.args[index])(context, builder, args[index])
    after = index + 1
    return builder.gep(array.data, [args[after]])


def load(builder: Any, pointer: Any, kind: Any) -> Any:
    """Build the load of a vector from an address, aligned or not."""
    loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    loaded.align = 1
    return loaded


def store(builder: Any, vector: Any, pointer: Any) -> None:
    """Build the store of a vector to an address, aligned or not."""
    stored = builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()))
    stored.align = 1


def call(builder: Any, name: str, result: Any, argument: Any) -> Any:
    """Build the call of an LLVM intrinsic."""
    kind = ir.FunctionType(result, [argument.type])
    declared = builder.module.globals.get(name)
    return builder.call(declared or ir.Function(builder.module, kind, name), [argument])


def every(kind: Any, number: float) -> Any:
    """Build a vector whose every element is `number`."""
    return ir.Constant(kind, [number] * kind.count)


def spread(builder: Any, scalar: Any, kind: Any) -> Any:
    """Build a vector whose every element is `scalar`."""
    if isinstance(kind.element, ir.IntType) and scalar.type != kind.element:
        scalar = builder.trunc(scalar, kind.element)
    single = builder.insert_element(
        ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0)
    )
    first = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(single, single, first)


def larger(builder: Any, first: Any, second: Any) -> Any:
    """Build the larger of two unsigned numbers, or of two vectors by element."""
    return builder.select(builder.icmp_unsigned(">", first, second), first, second)


@intrinsic
def fetch_line(typing: Any, array: Any, offset: Any) -> Any:
    """Prefetch the line of element `offset`, which may lie past the end."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        prefetch(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, offset), build


def prefetch(builder: Any, address: Any) -> None:
    """Prefetch a line into the second cache; past the end it does nothing."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    call = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    options = [ir.Constant(I32, number) for number in (0, 2, 1)]
    builder.call(call, [builder.bitcast(address, pointer), *options])
