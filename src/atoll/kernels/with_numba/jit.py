"""How kernels are compiled, and the primitives that all of them use.

Compiled on first use, kept in numba's cache between processes. That cache looks only at
the file of the function it keeps: a primitive here must never change its meaning.

No fastmath, and fp32 scalars throughout: a Python float would turn a loop into fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic
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

    Whether there is one is asked first, by a loop without a way out: that one can be
    vectorised, and is all that sound values need.
    """
    if largest_magnitude(bits) >= limit:
        for i in range(bits.size):
            if np.uint32(bits[i] & MAGNITUDE) >= limit:
                return i
    return -1


@jit
def read_u32(body: U8, at: int) -> np.uint32:
    """Return four bytes as a little-endian number, wherever they lie."""
    low = np.uint32(body[at]) | np.uint32(body[at + 1]) << np.uint32(8)
    high = np.uint32(body[at + 2]) | np.uint32(body[at + 3]) << np.uint32(8)
    return np.uint32(low | high << np.uint32(16))


@jit
def write_u32(body: U8, at: int, value: np.uint32) -> None:
    """Write a number as four bytes, little-endian, wherever they lie."""
    for place in range(4):
        body[at + place] = np.uint8(value >> np.uint32(8 * place))
