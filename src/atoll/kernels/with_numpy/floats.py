"""fp32 and bf16: bits, rounded or not; and the sums of a norm."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import F32, F64, LANES, U16
from atoll.kernels.with_numpy.ranges import (
    INFINITY,
    MAGNITUDE,
    U32,
    first_not_finite,
    first_true,
    flush,
    ranges,
)

# Halfway between the largest bf16 number and infinity; the tie goes to infinity.
_BF16_OVERFLOW = np.uint32(0x7F7F8000)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def fp32_encode(x: F32, out: F32) -> int:
    """Copy `x` bit by bit; refuse NaN and infinity."""
    for here in ranges(x.size):
        refused = first_not_finite(x[here])
        if refused >= 0:
            return here.start + refused
        out[here] = x[here]
    return -1


def fp32_decode(body: F32, out: F32) -> int:
    """Copy `body`, flushed; refuse NaN and infinity."""
    for here in ranges(out.size):
        out[here] = body[here]
        refused = first_not_finite(out[here])
        if refused >= 0:
            return here.start + refused
        flush(out[here])
    return -1


def bf16_encode(x: F32, out: U16) -> int:
    """Round to the nearest bf16, ties to even; refuse what is or becomes infinite."""
    for here in ranges(x.size):
        bits = x[here].view(np.uint32)
        refused = first_true((bits & MAGNITUDE) >= _BF16_OVERFLOW)
        if refused >= 0:
            return here.start + refused
        out[here] = _nearest_bf16(bits)
    return -1


def bf16_stochastic(x: F32, out: U16, seed: int, first: int) -> int:
    """Round to a neighbouring bf16, up with the probability that makes it unbiased.

    Element i of the fragment adds 16 bits of its own below the cut:
    `mix(seed + (i + 1) * 0x9E3779B97F4A7C15) >> 48`, modulo 2**64, where mix is the
    output function of SplitMix64. `first` is where `x` starts in the fragment.
    """
    for here in ranges(x.size):
        bits = x[here].view(np.uint32)
        noise = _noise(seed, first + here.start, bits.size)
        refused = first_true((bits & MAGNITUDE) + noise >= INFINITY)
        if refused >= 0:
            return here.start + refused
        out[here] = (bits + noise) >> np.uint32(16)
    return -1


def bf16_decode(body: U16, out: F32) -> int:
    """Widen to fp32, flushed; refuse NaN and infinity."""
    for here in ranges(out.size):
        out[here].view(np.uint32)[:] = body[here]
        out[here].view(np.uint32)[:] <<= np.uint32(16)
        refused = first_not_finite(out[here])
        if refused >= 0:
            return here.start + refused
        flush(out[here])
    return -1


def round_bf16(x: F32, out: F32) -> None:
    """Round to the nearest bf16, ties to even, and widen again; NaN stays NaN."""
    for here in ranges(x.size):
        bits = x[here].view(np.uint32)
        rounded = _nearest_bf16(bits) << np.uint32(16)
        is_nan = (bits & MAGNITUDE) > INFINITY
        out[here].view(np.uint32)[:] = np.where(is_nan, bits, rounded)


def sum_squares(x: F32, lanes: F64) -> None:
    """Add the square of element i to lane i % 64, in order, in fp64."""
    for here in ranges(x.size):
        squares = np.square(x[here], dtype=np.float64)
        whole = squares.size // LANES * LANES
        rows = np.vstack([lanes, squares[:whole].reshape(-1, LANES)])
        lanes[:] = np.add.accumulate(rows, axis=0)[-1]
        lanes[: squares.size - whole] += squares[whole:]


def _nearest_bf16(bits: U32) -> U32:
    """Return the upper halves after rounding; meaningless for NaN."""
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return (bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)


def _noise(seed: int, first: int, count: int) -> U32:
    number = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    mixed: NDArray[np.uint64] = number * _GOLDEN + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(48)).astype(np.uint32)
