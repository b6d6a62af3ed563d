"""The layouts of bodies, and the constants that both kinds of kernel share.

A body is a row of blocks, each with its own scale, so that a range of elements that
starts at a block is a range of bytes. Only the last block may be short.

    int8        256 elements: fp32 scale, then a signed byte per element
    e3m0        64 elements: exponent byte, then a nibble per element, low nibble first
    topk-2bit   4096 elements: fp32 low, fp32 high, 12-bit indices, 2-bit values
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

TINY = np.float32(2.0**-100)
"""Magnitudes below this are zero: see `atoll.algorithm.arithmetic`."""

LANES = 64
"""Partial sums of a norm; element i belongs to lane i % LANES."""

INT8_BLOCK = 256
INT8_HEAD = 4
INT8_MAX_SCALE = np.float32(8454659 * 2.0**98)
"""The largest fp32 scale whose 127-fold is finite.

The largest fp32 number is (2**24 - 1) * 2**104. A 127th of it rounds up to
8454660 * 2**98, whose 127-fold is (2**24 - 1/16) * 2**104 and rounds to infinity.
"""

E3M0_BLOCK = 64
E3M0_HEAD = 1
E3M0_MIN_EXPONENT = 27
"""The exponent field of 2**-100: smaller numbers decode to zero."""

E3M0_MAX_EXPONENT = 254
E3M0_ZERO = 7

TOPK_BLOCK = 4096
TOPK_SHARE = 64
"""One element of this many is kept."""

TOPK_HEAD = 8


def int8_bytes(elements: int) -> int:
    """Return the size of an int8 body."""
    return elements + INT8_HEAD * -(-elements // INT8_BLOCK)


def e3m0_bytes(elements: int) -> int:
    """Return the size of an e3m0 body."""
    return -(-elements // 2) + E3M0_HEAD * -(-elements // E3M0_BLOCK)


def topk_kept(elements: int) -> int:
    """Return how many elements a topk-2bit block of `elements` keeps."""
    return -(-elements // TOPK_SHARE)


def topk_shares(count: int) -> tuple[int, int]:
    """Return how many kept elements have the high level, and how many the low."""
    return -(-count // 2), count // 2


def topk_bytes(elements: int) -> int:
    """Return the size of a topk-2bit body."""
    blocks, rest = divmod(elements, TOPK_BLOCK)
    return blocks * topk_block_bytes(TOPK_BLOCK) + topk_block_bytes(rest)


def topk_block_bytes(elements: int) -> int:
    """Return the size of one topk-2bit block: levels, indices, values."""
    count = topk_kept(elements)
    if count == 0:
        return 0
    return TOPK_HEAD + -(-12 * count // 8) + -(-2 * count // 8)


STATE_PIECE = 65536
"""Elements of anchor or velocity that share one hash."""
