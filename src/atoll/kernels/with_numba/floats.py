"""fp32 and bf16: bits, rounded or not; and the sums of a norm."""

from __future__ import annotations

import numpy as np

from atoll.kernels.layouts import F32, F64, LANES, U16
from atoll.kernels.with_numba.jit import (
    INFINITY,
    MAGNITUDE,
    U32,
    first_at_least,
    float_of,
    flush,
    jit,
)
from atoll.kernels.with_numba.vectors import LINE, WRITES_AHEAD, fetch_line

# Faults are looked for at the end of a strip, so that its loop has no way out and can
# be vectorised.
_STRIP = 4096

_BF16_OVERFLOW = np.uint32(0x7F7F8000)
_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_16 = np.uint32(16)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def fp32_encode(x: F32, out: F32) -> int:
    """Copy `x` bit by bit; refuse NaN and infinity."""
    return _fp32_encode(x.view(np.uint32), out.view(np.uint32))


def fp32_decode(body: F32, out: F32) -> int:
    """Copy `body`, flushed; refuse NaN and infinity."""
    return _fp32_decode(body.view(np.uint32), out)


def bf16_encode(x: F32, out: U16) -> int:
    """Round to the nearest bf16, ties to even; refuse what is or becomes infinite."""
    return _bf16_encode(x.view(np.uint32), out)


def bf16_stochastic(x: F32, out: U16, seed: int, first: int) -> int:
    """Round to a neighbouring bf16 by the bits of (seed, first + i), without bias."""
    return _bf16_stochastic(x.view(np.uint32), out, np.uint64(seed), np.uint64(first))


def bf16_decode(body: U16, out: F32) -> int:
    """Widen to fp32, flushed; refuse NaN and infinity."""
    return bf16_decode_loop(body, out)


def round_bf16(x: F32, out: F32) -> None:
    """Round to the nearest bf16, ties to even, and widen again; NaN stays NaN."""
    _round_bf16(x.view(np.uint32), out.view(np.uint32))


def sum_squares(x: F32, lanes: F64) -> None:
    """Add the square of element i to lane i % 64, in order, in fp64."""
    _sum_squares(x, lanes)


@jit
def _fp32_encode(x: U32, out: U32) -> int:
    for first in range(0, x.size, _STRIP):
        strip, to = x[first : first + _STRIP], out[first : first + _STRIP]
        _copy(strip, to)
        refused = first_at_least(strip, INFINITY)
        if refused >= 0:
            return first + refused
    return -1


@jit
def _copy(x: U32, out: U32) -> None:
    whole = x.size // LINE * LINE
    for first in range(0, whole, LINE):
        fetch_line(out, first + WRITES_AHEAD)
        line, to = x[first : first + LINE], out[first : first + LINE]
        for i in range(LINE):
            to[i] = line[i]
    for i in range(whole, x.size):
        out[i] = x[i]


@jit
def _fp32_decode(body: U32, out: F32) -> int:
    for first in range(0, out.size, _STRIP):
        strip, to = body[first : first + _STRIP], out[first : first + _STRIP]
        for i in range(to.size):
            to[i] = flush(float_of(strip[i]))
        refused = first_at_least(strip, INFINITY)
        if refused >= 0:
            return first + refused
    return -1


@jit
def _nearest_bf16(bits: np.uint32) -> np.uint32:
    odd = np.uint32(bits >> _16) & _ONE
    return np.uint32(np.uint32(bits + np.uint32(odd + _HALF)) >> _16)


@jit
def _bf16_encode(x: U32, out: U16) -> int:
    for first in range(0, x.size, _STRIP):
        strip, to = x[first : first + _STRIP], out[first : first + _STRIP]
        for i in range(strip.size):
            to[i] = np.uint16(_nearest_bf16(strip[i]))
        refused = first_at_least(strip, _BF16_OVERFLOW)
        if refused >= 0:
            return first + refused
    return -1


@jit
def _noise(seed: np.uint64, number: np.uint64) -> np.uint32:
    mixed = seed + (number + np.uint64(1)) * _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return np.uint32(mixed >> np.uint64(48))


@jit
def _bf16_stochastic(x: U32, out: U16, seed: np.uint64, start: np.uint64) -> int:
    for first in range(0, x.size, _STRIP):
        strip, to = x[first : first + _STRIP], out[first : first + _STRIP]
        largest = np.uint32(0)
        for i in range(strip.size):
            noise = _noise(seed, start + np.uint64(first + i))
            to[i] = np.uint16(np.uint32(strip[i] + noise) >> _16)
            largest = max(largest, np.uint32(np.uint32(strip[i] & MAGNITUDE) + noise))
        if largest >= INFINITY:
            for i in range(strip.size):
                noise = _noise(seed, start + np.uint64(first + i))
                if np.uint32(np.uint32(strip[i] & MAGNITUDE) + noise) >= INFINITY:
                    return first + i
    return -1


@jit
def bf16_decode_loop(body: U16, out: F32) -> int:
    """Widen to fp32, flushed; refuse NaN and infinity."""
    for first in range(0, out.size, _STRIP):
        strip, to = body[first : first + _STRIP], out[first : first + _STRIP]
        for i in range(to.size):
            to[i] = flush(float_of(np.uint32(np.uint32(strip[i]) << _16)))
        refused = _first_infinite_bf16(strip)
        if refused >= 0:
            return first + refused
    return -1


@jit
def _first_infinite_bf16(strip: U16) -> int:
    largest = np.uint16(0)
    for i in range(strip.size):
        largest = max(largest, np.uint16(strip[i] & np.uint16(0x7FFF)))
    if largest >= np.uint16(0x7F80):
        for i in range(strip.size):
            if np.uint16(strip[i] & np.uint16(0x7FFF)) >= np.uint16(0x7F80):
                return i
    return -1


@jit
def _round_bf16(x: U32, out: U32) -> None:
    for i in range(x.size):
        is_nan = np.uint32(x[i] & MAGNITUDE) > INFINITY
        rounded = np.uint32(_nearest_bf16(x[i]) << _16)
        out[i] = x[i] if is_nan else rounded


@jit
def _sum_squares(x: F32, lanes: F64) -> None:
    whole = x.size // LANES * LANES
    for first in range(0, whole, LANES):
        row = x[first : first + LANES]
        for j in range(LANES):
            lanes[j] += np.float64(row[j]) * np.float64(row[j])
    for j in range(x.size - whole):
        lanes[j] += np.float64(x[whole + j]) * np.float64(x[whole + j])
