"""The squares of a body's elements, straight from its bytes: what a norm is made of.

Who judges an update needs none of its elements, only the sums of their squares and
whether all are finite. So nothing is written but 64 sums, which stay in registers where
a processor has enough. Their bits are those of a `*_decode` and `sum_squares`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.kernels.layouts import (
    E3M0_BLOCK,
    E3M0_HEAD,
    E3M0_MAX_EXPONENT,
    F32,
    F64,
    LANES,
    U8,
    U16,
)
from atoll.kernels.with_numba.e3m0 import e3m0_decode
from atoll.kernels.with_numba.floats import bf16_decode, fp32_decode, sum_squares
from atoll.kernels.with_numba.jit import jit
from atoll.kernels.with_numba.square_rows import add_nibbles, add_rows

Decode = Callable[..., int]
"""Fills fp32 elements from their part of a body; returns what it refuses, or -1."""

_BLOCK_BYTES = E3M0_HEAD + E3M0_BLOCK // 2


def fp32_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the square of element i to lane i % 64, flushed; refuse NaN and infinity.

    `body` has exactly the bytes of `elements`. Return the index of the first element
    that is refused, or -1. The lanes are garbage after a refusal; so they are with the
    other functions here.
    """
    return _of_floats(fp32_decode, body.view(np.float32), lanes)


def bf16_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of a bf16 body; refuse NaN and infinity."""
    return _of_floats(bf16_decode, body.view(np.uint16), lanes)


def e3m0_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of an e3m0 body; refuse E = 255 and a wrong last nibble."""
    rows = elements // E3M0_BLOCK
    if _nibbles(body, lanes, rows) > E3M0_MAX_EXPONENT:
        return e3m0_decode(body, np.empty(elements, np.float32))
    left = body[rows * _BLOCK_BYTES :]
    return _rest(e3m0_decode, left, rows * E3M0_BLOCK, elements, lanes)


def _of_floats(decode: Decode, body: F32 | U16, lanes: F64) -> int:
    rows = body.size // LANES
    if not _rows(body, lanes, rows):
        return decode(body, np.empty(body.size, np.float32))
    return _rest(decode, body[rows * LANES :], rows * LANES, body.size, lanes)


def _rest(
    decode: Decode, left: F32 | U16 | U8, first: int, elements: int, lanes: F64
) -> int:
    """Add what is less than a row."""
    if first == elements:
        return -1
    values = np.empty(elements - first, np.float32)
    refused = decode(left, values)
    if refused >= 0:
        return first + refused
    sum_squares(values, lanes)
    return -1


@jit
def _rows(body: F32 | U16, lanes: F64, rows: int) -> bool:
    """Add rows; return whether all of them are finite."""
    add_rows(body, lanes, rows)
    total = np.float64(0)
    for lane in range(LANES):
        total += lanes[lane]
    return bool(np.isfinite(total))


@jit
def _nibbles(body: U8, lanes: F64, rows: int) -> np.uint32:
    most: np.uint32 = add_nibbles(body, lanes, rows)
    return most
