"""topk-2bit: of each block the largest 64th, each as a sign and one of two levels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import (
    F32,
    TINY,
    TOPK_BLOCK,
    TOPK_HEAD,
    U8,
    topk_block_bytes,
    topk_bytes,
    topk_kept,
    topk_shares,
)
from atoll.kernels.with_numpy.ranges import (
    INFINITY,
    U32,
    first_not_finite,
    first_true,
    flush,
    magnitude_bits,
)

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]


def topk_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN, infinity, and magnitudes whose sum overflows fp32.

    Kept are the largest magnitudes, the lower index first among equals. By the same
    order the larger half of them has level `high`, the rest `low`: their means, summed
    in fp32 in the order of indices, each magnitude and each mean flushed.
    """
    for first in range(0, x.size, TOPK_BLOCK):
        block = x[first : first + TOPK_BLOCK]
        refused = _encode_block(block, _bytes_of(body, first, block.size))
        if refused >= 0:
            return first + refused
    return -1


def topk_decode(body: U8, out: F32) -> int:
    """Write the kept values among zeros; refuse a block that no encoder writes.

    That is one with an index that does not ascend or lies beyond the block, a level
    that is negative or not finite, or padding that is not zero.
    """
    for first in range(0, out.size, TOPK_BLOCK):
        block = out[first : first + TOPK_BLOCK]
        if not _decode_block(_bytes_of(body, first, block.size), block):
            return first
    return -1


def _bytes_of(body: U8, first: int, elements: int) -> U8:
    start = topk_bytes(first)
    return body[start : start + topk_block_bytes(elements)]


def _encode_block(block: F32, body: U8) -> int:
    refused = first_not_finite(block)
    if refused >= 0:
        return refused
    index, is_high = _select(magnitude_bits(block))
    kept = block[index]
    sums = _running_sums(kept, is_high), _running_sums(kept, ~is_high)
    refused = first_true(np.isinf(sums[0]) | np.isinf(sums[1]))
    if refused >= 0:
        return int(index[refused])
    high_count, low_count = topk_shares(index.size)
    low = sums[1][-1:] / np.float32(max(low_count, 1))
    high = sums[0][-1:] / np.float32(high_count)
    body[0:4] = flush(low).view(np.uint8)
    body[4:8] = flush(high).view(np.uint8)
    _pack(index, 12, body[TOPK_HEAD : _values_at(index.size)])
    _pack(is_high | (np.signbit(kept) << 1), 2, body[_values_at(index.size) :])
    return -1


def _select(bits: U32) -> tuple[Index, Mask]:
    """Return ascending indices of what is kept, and which of them are the larger half.

    A key holds the magnitude above and the index, counted down, below: keys are unique
    and sort by the order that the format asks for.
    """
    kept = topk_kept(bits.size)
    down = np.arange(TOPK_BLOCK - 1, TOPK_BLOCK - 1 - bits.size, -1, dtype=np.uint64)
    keys = (bits.astype(np.uint64) << np.uint64(12)) | down
    largest = np.sort(np.partition(keys, bits.size - kept)[bits.size - kept :])
    index = (TOPK_BLOCK - 1) - (largest & np.uint64(TOPK_BLOCK - 1)).astype(np.int64)
    order = np.argsort(index)
    return index[order], order >= kept - topk_shares(kept)[0]


def _running_sums(kept: F32, belongs: Mask) -> F32:
    terms = np.where(belongs, flush(np.abs(kept)), np.float32(0))
    with np.errstate(over="ignore"):
        sums: F32 = np.add.accumulate(terms)
    return sums


def _values_at(kept: int) -> int:
    return TOPK_HEAD + -(-12 * kept // 8)


def _pack(numbers: NDArray[np.int64], width: int, out: U8) -> None:
    """Write `width` bits of each number, lowest first; the last byte is padded."""
    bits = (numbers[:, None] >> np.arange(width)) & 1
    out[:] = np.packbits(bits.astype(np.uint8), bitorder="little")


def _unpack(packed: U8, width: int, count: int) -> tuple[Index, bool]:
    """Return `count` numbers, and whether the padding after them is zero."""
    bits = np.unpackbits(packed, bitorder="little").astype(np.int64)
    numbers = bits[: count * width].reshape(count, width) << np.arange(width)
    return numbers.sum(axis=1), not bits[count * width :].any()


def _decode_block(body: U8, block: F32) -> bool:
    kept = topk_kept(block.size)
    levels = body[:TOPK_HEAD].copy().view(np.float32)
    index, is_index_padded = _unpack(body[TOPK_HEAD : _values_at(kept)], 12, kept)
    value, is_value_padded = _unpack(body[_values_at(kept) :], 2, kept)
    is_sound = (
        (levels.view(np.uint32) < INFINITY).all()
        and (np.diff(index) > 0).all()
        and index[-1] < block.size
    )
    if not (is_sound and is_index_padded and is_value_padded):
        return False
    levels[levels < TINY] = 0.0
    kept_values = levels[value & 1]
    block[:] = 0.0
    block[index] = np.where(value >> 1, np.float32(0) - kept_values, kept_values)
    return True
