"""The arithmetic that gives every machine the same bits.

Rule 1: values are fp32, scalars are Python floats that fp32 represents exactly.
Rule 2: the result of every product, sum and quotient goes through `flush` before it is
        used again. So no compiler can fuse a product into a sum, and no processor's
        treatment of subnormal numbers can show: nothing below 2**-100 survives, and the
        difference of two numbers above it is a multiple of 2**-123, never subnormal.
Rule 3: only Python operators and `abs`, so one text serves numpy, torch and JAX.

Equal bits are promised for finite results; an overflow is infinite, and a NaN is NaN,
on all three alike, but the bits of a NaN may differ.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol, Self, TypeVar

TINY = 2.0**-100
"""Magnitudes below this are zero."""


class Array(Protocol):
    """An fp32 array of numpy, torch or JAX, as far as the text needs it."""

    def __abs__(self) -> Self: ...
    def __add__(self, other: Self | float, /) -> Self: ...
    def __sub__(self, other: Self | float, /) -> Self: ...
    def __mul__(self, other: Self | float, /) -> Self: ...
    def __truediv__(self, other: Self | float, /) -> Self: ...
    def __pow__(self, other: int, /) -> Self: ...
    # A mask has another type in each library; it is only inverted and multiplied by.
    def __lt__(self, other: Self | float, /) -> Any: ...


A = TypeVar("A", bound=Array)


def flush(x: A) -> A:
    """Return `x` with +0.0 wherever its magnitude is below 2**-100; NaN stays NaN.

    >>> import numpy as np
    >>> flush(np.array([1.5, -0.0, 2.0**-100, -(2.0**-101)], np.float32)).tolist()
    [1.5, 0.0, 7.888609052210118e-31, 0.0]
    """
    # XLA turns `x * mask` into a selection, which would lose a NaN under the mask
    # `abs(x) >= TINY`. The inverted comparison keeps NaN on the side that is kept.
    flushed: A = x * ~(abs(x) < TINY) + 0.0
    return flushed


def divide(x: A, by: float) -> A:
    """Return `x / by`, correctly rounded and flushed.

    >>> import numpy as np
    >>> divide(np.array([3.0, 1.0], np.float32), 2.0).tolist()
    [1.5, 0.5]
    """
    # XLA (and torch on CUDA) replaces division by one scalar with multiplication by
    # its reciprocal, a different number in 30 % of cases. So the divisor is an array.
    return flush(x / (x**0 * by))


def fp32(value: float) -> float:
    """Return the nearest fp32 number, ties to even, as a Python float.

    >>> fp32(0.9)
    0.8999999761581421
    """
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def power(base: float, exponent: int) -> float:
    """Return `base**exponent` for a whole exponent, the same on every machine.

    Multiplications of fp64 only, by squaring: unlike `pow`, they are exactly rounded by
    every C library.
    """
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base *= base
        exponent //= 2
    return result
