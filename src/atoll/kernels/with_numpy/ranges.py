"""What the numpy kernels share: short ranges, flushing, and finding the first fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import F32, TINY, U8

RANGE = 16384
"""Elements handled at once: a handful of temporaries then fit a core's cache."""

U32 = NDArray[np.uint32]

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)


def ranges(elements: int) -> Iterator[slice[int, int, None]]:
    """Yield short ranges that cover a vector; each starts at a block of every codec."""
    for first in range(0, elements, RANGE):
        yield slice(first, min(first + RANGE, elements))


def block_rows(
    values: F32, body: U8, block: int, size: Callable[[int], int]
) -> Iterator[tuple[int, F32, U8]]:
    """Yield short runs of blocks: where they start, their values and their bytes.

    Each is a matrix with a row per block; the short block at the end comes alone.
    """
    for here in ranges(values.size):
        whole = here.start + (here.stop - here.start) // block * block
        for first, last in ((here.start, whole), (whole, here.stop)):
            if first < last:
                rows = -(-(last - first) // block)
                packed = body[size(first) : size(last)].reshape(rows, -1)
                yield first, values[first:last].reshape(rows, -1), packed


def flush(values: F32) -> F32:
    """Set magnitudes below 2**-100 to +0.0, in place; NaN stays NaN."""
    values[np.abs(values) < TINY] = 0.0
    return values


def magnitude_bits(values: F32) -> U32:
    """Return the bits of every value without its sign; they sort as magnitudes do."""
    return values.view(np.uint32) & MAGNITUDE


def first_true(mask: NDArray[np.bool_]) -> int:
    """Return the index of the first true element in memory order, or -1."""
    flat = mask.reshape(-1)
    index = int(flat.argmax()) if flat.size else 0
    return index if flat.size and flat[index] else -1


def first_not_finite(values: F32) -> int:
    """Return the index of the first NaN or infinity, or -1."""
    return first_true(magnitude_bits(values) >= INFINITY)
