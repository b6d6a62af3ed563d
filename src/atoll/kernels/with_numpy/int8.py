"""int8: a byte per element, and per block the scale that makes its largest 127."""

from __future__ import annotations

import numpy as np

from atoll.kernels.layouts import (
    F32,
    INT8_BLOCK,
    INT8_HEAD,
    INT8_MAX_SCALE,
    TINY,
    U8,
    int8_bytes,
)
from atoll.kernels.with_numpy.ranges import (
    INFINITY,
    block_rows,
    first_true,
    flush,
    magnitude_bits,
)

_MAX_SCALE_BITS = INT8_MAX_SCALE.view(np.uint32)


def int8_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity.

    scale = min(absmax / 127, INT8_MAX_SCALE), zero below 2**-100; code = rint(x /
    scale) within -127..127, zero where the scale is.
    """
    for first, rows, packed in block_rows(x, body, INT8_BLOCK, int8_bytes):
        refused = _encode_rows(rows, packed)
        if refused >= 0:
            return first + refused
    return -1


def int8_decode(body: U8, out: F32) -> int:
    """Write code * scale, flushed; refuse a code of -128 and an impossible scale."""
    for first, rows, packed in block_rows(out, body, INT8_BLOCK, int8_bytes):
        refused = _decode_rows(packed, rows)
        if refused >= 0:
            return first + refused
    return -1


def _encode_rows(rows: F32, body: U8) -> int:
    bits = magnitude_bits(rows)
    refused = first_true(bits >= INFINITY)
    if refused >= 0:
        return refused
    largest = bits.max(axis=1).view(np.float32)
    scale = np.minimum(largest / np.float32(127), INT8_MAX_SCALE)
    scale[scale < TINY] = 0.0
    # Divided by 1 instead of a zero scale, the values are so small that they give 0.
    divisor = np.where(scale == 0.0, np.float32(1), scale)
    codes = np.clip(np.rint(rows / divisor[:, None]), -127, 127)
    body[:, :INT8_HEAD] = scale.view(np.uint8).reshape(-1, INT8_HEAD)
    body[:, INT8_HEAD:] = codes.astype(np.int8).view(np.uint8)
    return -1


def _decode_rows(body: U8, rows: F32) -> int:
    scale = np.ascontiguousarray(body[:, :INT8_HEAD]).view(np.float32)
    codes = body[:, INT8_HEAD:].view(np.int8)
    refused = first_true((scale.view(np.uint32) > _MAX_SCALE_BITS) | (codes == -128))
    if refused >= 0:
        return refused
    np.multiply(codes, scale, out=rows)
    flush(rows)
    return -1
