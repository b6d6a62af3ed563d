"""From the islands' decoded updates to one: mean, weighted, radial, trimmed.

`values` are in island order, the byte order of their names: fp32 sums depend on it, so
it is fixed by names and never by arrival. They are summed as a tree (`first_half`), so
that the mean of 2, 4, 8 ... equal values is exactly that value. Decoded values are
finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.algorithm.arithmetic import A, divide, flush, fp32
from atoll.errors import UsageError

LANES = 64
"""Partial sums of a norm: element i goes to lane i % 64."""

CANCELLED = 2.0**-16
"""A mean direction shorter than this is mostly the rounding of its parts (2**-24 each);
that of N orthogonal directions has length N**-0.5, far above for any real N."""

Vector = NDArray[np.float32]


def mean(values: Sequence[A]) -> A:
    """Return the ordered sum divided once by the number of islands.

    One value is its own mean. Equal values have exactly that mean if their number is a
    power of two; else it is off by an ulp or two.
    """
    return _mean([flush(value) for value in values])


def shares(weights: Sequence[int]) -> list[float]:
    """Return each weight's part of the whole, one fp64 quotient rounded to fp32 once.

    >>> shares([1, 3])
    [0.25, 0.75]
    """
    if not weights or not all(0 < weight < 2**64 for weight in weights):
        raise UsageError(
            f"weights={list(weights)} must be one or more integers from 1 to 2**64 - 1."
        )
    total = sum(weights)
    return [fp32(weight / total) for weight in weights]


def weighted(values: Sequence[A], weights: Sequence[int]) -> A:
    """Return the ordered sum of share times value; equal weights give `mean`, exactly.

    sum_i fp32(w_i / W) x_i
    """
    return weighted_sum([flush(value) for value in values], weights)


def trimmed(values: Sequence[A]) -> A:
    """Return, for each coordinate, the mean without its highest and lowest values.

    From three islands on, max(1, N // 4) are dropped at either end; below, it is the
    mean. The rest is summed in ascending order. Weights play no part.

    >>> import numpy as np
    >>> trimmed([np.array([x], np.float32) for x in (1.0, 900.0, 2.0)]).tolist()
    [2.0]
    """
    if len(values) < 3:
        return mean(values)
    dropped = max(1, len(values) // 4)
    ascending = _sorted([flush(value) for value in values])
    return mean(ascending[dropped : len(values) - dropped])


def radial(values: Sequence[Vector], weights: Sequence[int]) -> Vector:
    """Return the mean length along the mean direction, for the islands' one tensor.

    (sum w |v| / W) unit(sum w unit(v) / W), unit(0) = 0     (RDA, arXiv 2604.21428)

    Keeps the length of orthogonal updates, which the mean shrinks by N**-0.5. Where
    directions cancel, or a length is beyond fp32, it is the weighted mean. One island's
    value is returned unchanged. The paper leaves embeddings to the mean.
    Numpy only: it is computed in one place and distributed as bytes.
    """
    flushed = [flush(value) for value in values]
    lengths = [norm(value) for value in flushed]
    direction = mean_direction(flushed, lengths, weights)
    radius = mean_radius(lengths, weights, unit_length=norm(direction))
    if radius is None:
        return weighted_sum(flushed, weights)
    return stretched(direction, radius)


@dataclass(frozen=True)
class Radius:
    """The lengths of a mean direction before and after it is stretched."""

    unit_length: float
    length: float


def mean_direction(
    flushed: Sequence[Vector], lengths: Sequence[float], weights: Sequence[int]
) -> Vector:
    """Return the weighted mean of the unit vectors, or any part of it."""
    units = [
        divide(value, length) if length else value
        for value, length in zip(flushed, lengths, strict=True)
    ]
    return weighted_sum(units, weights)


def mean_radius(
    lengths: Sequence[float], weights: Sequence[int], *, unit_length: float
) -> Radius | None:
    """Return how a mean direction of some length is stretched.

    None: the weighted mean takes its place.
    """
    # Scalars use the same code, ten times as fast as vectors of one element.
    scalars: list[Any] = [np.float32(x) for x in lengths]
    length = float(weighted(scalars, weights))
    if len(lengths) == 1 or unit_length < CANCELLED or math.isinf(length):
        return None
    return Radius(unit_length, length)


def stretched(direction: Vector, radius: Radius) -> Vector:
    """Return a mean direction, or any part of it, with the mean length."""
    return flush(divide(direction, radius.unit_length) * radius.length)


def norm(vector: Vector) -> float:
    """Return the Euclidean norm: fp64 in 64 lanes, rounded to fp32 once.

    Lane j takes the elements i with i % 64 == j in order; lanes are summed in order.
    The square of an fp32 number is exact in fp64.
    """
    rows = -(-vector.size // LANES)
    squares = np.zeros(rows * LANES)
    np.square(vector.reshape(-1), out=squares[: vector.size], dtype=np.float64)
    # Reducing the first of two axes adds row after row; numpy sums pairwise, which
    # would be another order, only along the axis that is contiguous.
    return norm_of(np.add.reduce(squares.reshape(rows, LANES), axis=0))


def norm_of(lanes: NDArray[np.float64]) -> float:
    """Return the norm whose squares were added up in lanes."""
    # Not `sum`, which adds pairwise: running sums go from the first to the last.
    return _round_length(math.sqrt(np.add.accumulate(lanes)[-1]))


def _round_length(length: float) -> float:
    try:
        return fp32(length)
    except OverflowError:
        return math.inf


def first_half(num_values: int) -> int:
    """Return how many of two or more values are summed apart from the rest.

    The largest power of two below their number, so that every sum of a power of two
    of them is a complete tree.

    >>> [first_half(n) for n in (2, 3, 4, 5, 8, 9)]
    [1, 2, 2, 4, 4, 8]
    """
    return 1 << (num_values - 1).bit_length() - 1


def _mean(flushed: Sequence[A]) -> A:
    total = _ordered_sum(flushed)
    return total if len(flushed) == 1 else divide(total, float(len(flushed)))


def weighted_sum(flushed: Sequence[A], weights: Sequence[int]) -> A:
    """Return `weighted` of values that are flushed already."""
    pairs = list(zip(flushed, shares(weights), strict=True))
    if len(set(weights)) == 1:
        return _mean(flushed)
    return _ordered_sum([flush(value * share) for value, share in pairs])


def _ordered_sum(values: Sequence[A]) -> A:
    if len(values) == 1:
        return values[0]
    half = first_half(len(values))
    return flush(_ordered_sum(values[:half]) + _ordered_sum(values[half:]))


def _sorted(values: Sequence[A]) -> list[A]:
    """Return the values in ascending order at each coordinate, by exchanging."""
    ascending = list(values)
    for end in range(len(ascending) - 1, 0, -1):
        for i in range(end):
            ascending[i], ascending[i + 1] = _exchange(ascending[i], ascending[i + 1])
    return ascending


def _exchange(a: A, b: A) -> tuple[A, A]:
    """Return the lower and the higher of two; a product with a mask is exact."""
    is_less = a < b
    lower: A = a * is_less + b * ~is_less
    higher: A = b * is_less + a * ~is_less
    return lower, higher
