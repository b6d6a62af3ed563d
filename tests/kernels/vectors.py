"""Vectors that find differences: every awkward number, every awkward length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from atoll import kernels

F32 = NDArray[np.float32]

KINDS = ("numpy", "numba")
LENGTHS = (0, 1, 2, 63, 64, 65, 255, 257, 4095, 4096, 4097, 16385, 20001)
"""Around every block, around the ranges of the numpy kernels, and none of them."""

MAX = np.finfo(np.float32).max
TINY = np.float32(2.0**-100)

SPECIAL = np.array(
    [
        *(0.0, -0.0, 1.0, -1.0, 1.5, -0.75),
        *(2.0**-149, -(2.0**-149), 2.0**-127, 2.0**-126),
        *(2.0**-100, -(2.0**-100), 2.0**-101, 1.5 * 2.0**-101, 1.4999 * 2.0**-101),
        *(np.nextafter(TINY, np.float32(0)), 127 * 2.0**-100, 126.9 * 2.0**-100),
        *(1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, 2.0**100, -(2.0**100)),
    ],
    np.float32,
)
"""Signed zeros, subnormals, both sides of 2**-100, ties of bf16, int8 and e3m0."""

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
plain = st.floats(-(2.0**40), 2.0**40, width=32)
vectors = arrays(np.float32, st.integers(0, 300), elements=finite)
plain_vectors = arrays(np.float32, st.integers(0, 300), elements=plain)
"""Finite vectors; and those of which sums and squares are finite too."""


def gaussian(elements: int) -> F32:
    values = np.random.default_rng(elements).standard_normal(elements, np.float32)
    return values * np.float32(1e-3)


def any_bits(elements: int) -> F32:
    """Return numbers of every exponent, none so large that bf16 cannot hold it."""
    bits = np.random.default_rng(elements).integers(0, 2**32, elements, np.uint32)
    bits[(bits & 0x7FFFFFFF) >= 0x7F7F0000] = 0x80000000
    return bits.view(np.float32)


def special(elements: int) -> F32:
    return np.random.default_rng(elements).choice(SPECIAL, elements)


def ties(elements: int) -> F32:
    """Return few different magnitudes, so that a selection must break ties."""
    return np.random.default_rng(elements).choice(SPECIAL[:6], elements)


def zeros(elements: int) -> F32:
    return np.zeros(elements, np.float32)


def sparse(elements: int) -> F32:
    values = zeros(elements)
    values[::97] = -3.25
    return values


def huge(elements: int) -> F32:
    """Return numbers up to the largest: some codecs clamp, some refuse."""
    return np.random.default_rng(elements).choice(
        np.array([MAX, -MAX, 1.5 * 2.0**127, 2.0**127, 3.0], np.float32), elements
    )


SHAPES: dict[str, Callable[[int], F32]] = {
    make.__name__: make
    for make in (gaussian, any_bits, special, ties, zeros, sparse, huge)
}


@contextmanager
def serving(kind: str) -> Iterator[None]:
    """Let one kind of kernel serve, then the one that served before."""
    before = kernels.active().__name__.rpartition("_")[2]
    kernels.use(kind)
    try:
        yield
    finally:
        kernels.use(before)


def same_bits(one: F32, other: F32) -> bool:
    """Return whether two vectors have the same bits; any NaN is like any other."""
    both_nan = np.isnan(one) & np.isnan(other)
    return bool((both_nan | (one.view(np.uint32) == other.view(np.uint32))).all())
