"""topk-2bit: of each block the largest 64th, each as a sign and one of two levels.

The smallest magnitude that is kept is found digit by digit: 11, 10 and 10 bits, each by
a histogram of the elements that agree with it so far. No sorting, no allocation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import (
    F32,
    TOPK_BLOCK,
    TOPK_HEAD,
    TOPK_SHARE,
    U8,
)
from atoll.kernels.with_numba.jit import (
    FP32,
    INFINITY,
    MAGNITUDE,
    U32,
    bits_of,
    first_at_least,
    float_of,
    flush,
    jit,
    largest_magnitude,
    read_u32,
    write_u32,
)

I32 = NDArray[np.int32]

_MAX_SELECTED = TOPK_BLOCK // TOPK_SHARE
_BUCKETS = 2048
_ZERO = np.float32(0)


def topk_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN, infinity, and magnitudes whose sum overflows fp32."""
    histogram = np.empty(_BUCKETS, np.int32)
    index = np.empty(_MAX_SELECTED, np.int32)
    size = np.empty(_MAX_SELECTED, np.uint32)
    return _encode(x.view(np.uint32), body, histogram, index, size)


def topk_decode(body: U8, out: F32) -> int:
    """Write the kept values among zeros; refuse a block that no encoder writes."""
    return _decode(body, out, np.empty(_MAX_SELECTED, np.int32))


@jit
def _encode(x: U32, body: U8, histogram: I32, index: I32, sizes: U32) -> int:
    offset = 0
    for first in range(0, x.size, TOPK_BLOCK):
        block = x[first : first + TOPK_BLOCK]
        if largest_magnitude(block) >= INFINITY:
            return first + first_at_least(block, INFINITY, FP32)
        selected = index[: (block.size + TOPK_SHARE - 1) // TOPK_SHARE]
        _select(block, histogram, selected)
        end = (
            offset
            + TOPK_HEAD
            + (12 * selected.size + 7) // 8
            + (2 * selected.size + 7) // 8
        )
        refused = _write(block, selected, sizes[: selected.size], body[offset:end])
        if refused >= 0:
            return first + refused
        offset = end
    return -1


@jit
def _select(block: U32, histogram: I32, selected: I32) -> None:
    """Write the ascending indices of the largest magnitudes, low index first."""
    prefix, wanted = np.uint32(0), selected.size
    for shift, digits in ((20, 11), (10, 10), (0, 10)):
        prefix, wanted = _next_digit(
            block, histogram[: 1 << digits], prefix, shift, wanted
        )
    position = 0
    for i in range(block.size):
        magnitude = np.uint32(block[i] & MAGNITUDE)
        if magnitude > prefix or (magnitude == prefix and wanted > 0):
            wanted -= magnitude == prefix
            selected[position] = i
            position += 1


@jit
def _next_digit(
    block: U32, histogram: I32, prefix: np.uint32, shift: int, wanted: int
) -> tuple[np.uint32, int]:
    """Return one more digit of the smallest kept magnitude.

    `wanted` is how many elements with the digits known so far are kept; the second
    result is the same for the longer prefix.
    """
    histogram[:] = 0
    digits = np.uint32(histogram.size)
    for i in range(block.size):
        rest = np.uint32(np.uint32(block[i] & MAGNITUDE) >> np.uint32(shift))
        digit = np.uint32(rest - np.uint32(prefix * digits))
        if digit < digits:
            histogram[digit] += 1
    position = histogram.size - 1
    while histogram[position] < wanted:
        wanted -= histogram[position]
        position -= 1
    return np.uint32(np.uint32(prefix * digits) + np.uint32(position)), wanted


@jit
def _write(block: U32, selected: I32, sizes: U32, body: U8) -> int:
    high_count = (selected.size + 1) // 2
    values_at = TOPK_HEAD + (12 * selected.size + 7) // 8
    body[TOPK_HEAD:] = 0
    for i in range(selected.size):
        sizes[i] = np.uint32(block[selected[i]] & MAGNITUDE)
    high = low = _ZERO
    for i in range(selected.size):
        is_high = _rank(sizes, i) < high_count
        magnitude = flush(float_of(sizes[i]))
        if is_high:
            high = np.float32(high + magnitude)
        else:
            low = np.float32(low + magnitude)
        if np.isinf(high) or np.isinf(low):
            return int(selected[i])
        sign = np.uint32(block[selected[i]] >> np.uint32(31))
        value = np.uint32(is_high) | np.uint32(sign << np.uint32(1))
        body[values_at + i // 4] |= np.uint8(value << np.uint32(2 * (i % 4)))
        _write_index(body, i, int(selected[i]))
    low_count = max(selected.size - high_count, 1)
    write_u32(body, 0, bits_of(flush(np.float32(low / np.float32(low_count)))))
    write_u32(body, 4, bits_of(flush(np.float32(high / np.float32(high_count)))))
    return -1


@jit
def _rank(sizes: U32, index: int) -> int:
    """Return how many of the kept elements come before one of them in size."""
    rank = 0
    for j in range(sizes.size):
        is_before = (sizes[j] == sizes[index]) & (j < index)
        rank += int((sizes[j] > sizes[index]) | is_before)
    return rank


@jit
def _write_index(body: U8, position: int, index: int) -> None:
    """Put a 12-bit number at its place in the zeroed stream after the levels."""
    offset = TOPK_HEAD + 3 * position // 2
    shifted = index << (4 * (position % 2))
    body[offset] |= np.uint8(shifted & 255)
    body[offset + 1] |= np.uint8(shifted >> 8)


@jit
def _read_index(body: U8, position: int) -> int:
    offset = TOPK_HEAD + 3 * position // 2
    pair = int(body[offset]) | int(body[offset + 1]) << 8
    return (pair >> (4 * (position % 2))) & 4095


@jit
def _decode(body: U8, out: F32, index: I32) -> int:
    offset = 0
    for first in range(0, out.size, TOPK_BLOCK):
        block = out[first : first + TOPK_BLOCK]
        selected = index[: (block.size + TOPK_SHARE - 1) // TOPK_SHARE]
        end = (
            offset
            + TOPK_HEAD
            + (12 * selected.size + 7) // 8
            + (2 * selected.size + 7) // 8
        )
        if not _read(body[offset:end], block, selected):
            return first
        offset = end
    return -1


@jit
def _read(body: U8, block: F32, selected: I32) -> bool:
    values_at = TOPK_HEAD + (12 * selected.size + 7) // 8
    if read_u32(body, 0) >= INFINITY or read_u32(body, 4) >= INFINITY:
        return False
    if not _is_padded(body, selected.size) or not _read_indices(
        body, selected, block.size
    ):
        return False
    low, high = flush(float_of(read_u32(body, 0))), flush(float_of(read_u32(body, 4)))
    block[:] = _ZERO
    for i in range(selected.size):
        value = body[values_at + i // 4] >> (2 * (i % 4))
        level = high if value & 1 else low
        block[selected[i]] = np.float32(_ZERO - level) if value & 2 else level
    return True


@jit
def _is_padded(body: U8, selected: int) -> bool:
    """Tell whether the bits after the last index and the last value are zero."""
    values_at = TOPK_HEAD + (12 * selected + 7) // 8
    index_rest = body[values_at - 1] >> 4 if selected % 2 else 0
    value_rest = body[body.size - 1] >> (2 * (selected % 4)) if selected % 4 else 0
    return index_rest == 0 and value_rest == 0


@jit
def _read_indices(body: U8, selected: I32, limit: int) -> bool:
    """Read the indices, and tell whether they ascend and stay below `limit`."""
    previous = -1
    for i in range(selected.size):
        selected[i] = _read_index(body, i)
        if selected[i] <= previous or selected[i] >= limit:
            return False
        previous = selected[i]
    return True
