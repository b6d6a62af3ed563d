"""The compiler options, and the primitives that all compiled kernels use.

numba compiles on first use and caches machine code between processes. The cache checks
only the file of the cached function: a primitive here must never change its meaning.

No fastmath, and fp32 scalars throughout: a Python float would turn a loop into fp64.
A loop that LLVM is to vectorise has no early exit: it gathers the largest magnitude,
and a second loop searches the element to refuse if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import TINY, U8, U16

P = ParamSpec("P")
R = TypeVar("R")

U32 = NDArray[np.uint32]

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
Half = bool | None
FP32, BF16 = None, True
"""Whether bits are the upper half of an fp32 number.

None, not False: for an argument that is None numba leaves out the branch.
"""

_ZERO = np.float32(0)
_16 = np.uint32(16)


def jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function on first use; it releases the interpreter's lock."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        compiled = numba.njit(**options)(function)
    return cast(Callable[P, R], compiled)


@jit
def bits_of(value: np.float32) -> np.uint32:
    """Return the bits of an fp32 number as a u32."""
    return np.float32(value).view(np.uint32)


@jit
def float_of(bits: np.uint32) -> np.float32:
    """Return the fp32 number that has these bits."""
    return np.uint32(bits).view(np.float32)


@jit
def widen(bits: np.uint32 | np.uint16, half: Half) -> np.uint32:
    """Return the bits of the fp32 number of which these are all, or the upper half."""
    if half is None:
        return np.uint32(bits)
    return np.uint32(np.uint32(bits) << _16)


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
def first_at_least(bits: U32 | U16, limit: np.uint32, half: Half) -> int:
    """Return the index of the first magnitude of `limit` or more, or -1."""
    for i in range(bits.size):
        if np.uint32(widen(bits[i], half) & MAGNITUDE) >= limit:
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
