"""The squares of a body's elements, without keeping the elements: for a norm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.kernels.layouts import F32, F64, U8, U16, e3m0_bytes
from atoll.kernels.with_numpy.e3m0 import e3m0_decode
from atoll.kernels.with_numpy.floats import bf16_decode, fp32_decode, sum_squares
from atoll.kernels.with_numpy.ranges import RANGE, ranges

Decode = Callable[..., int]
"""Fills fp32 elements from their part of a body; returns what it refuses, or -1."""


def fp32_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the square of element i to lane i % 64, flushed; refuse NaN and infinity.

    `body` has exactly the bytes of `elements`. Return the index of the first element
    that is refused, or -1. The lanes are garbage after a refusal; so they are with the
    other functions here.
    """
    return _squares(fp32_decode, body.view(np.float32), elements, lanes)


def bf16_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of a bf16 body; refuse NaN and infinity."""
    return _squares(bf16_decode, body.view(np.uint16), elements, lanes)


def e3m0_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of an e3m0 body; refuse E = 255 and a wrong last nibble."""
    return _squares(e3m0_decode, body, elements, lanes, place=e3m0_bytes)


def _squares(
    decode: Decode,
    body: F32 | U16 | U8,
    elements: int,
    lanes: F64,
    *,
    place: Callable[[int], int] = int,
) -> int:
    values = np.empty(min(RANGE, elements), np.float32)
    for here in ranges(elements):
        part = values[: here.stop - here.start]
        refused = decode(body[place(here.start) : place(here.stop)], part)
        if refused >= 0:
            return here.start + refused
        sum_squares(part, lanes)
    return -1
