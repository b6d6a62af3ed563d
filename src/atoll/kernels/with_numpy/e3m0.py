"""e3m0: a sign and a power of two in four bits, by integer operations only.

With b the bits of |x|, e = (b + 0x400000) >> 23 is the exponent field of the nearest
power of two. A block stores its largest, E, and each element how far below it lies.
"""

from __future__ import annotations

import numpy as np

from atoll.kernels.layouts import (
    E3M0_BLOCK,
    E3M0_HEAD,
    E3M0_MAX_EXPONENT,
    E3M0_MIN_EXPONENT,
    E3M0_ZERO,
    F32,
    U8,
    e3m0_bytes,
)
from atoll.kernels.with_numpy.ranges import (
    INFINITY,
    block_rows,
    first_true,
    magnitude_bits,
)


def e3m0_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity.

    E is at most 254, and 0 when every element is zero. The code is E - e, at least 0;
    beyond 6, or where e is below 27, the element is zero: nibble 7.
    """
    for first, rows, packed in block_rows(x, body, E3M0_BLOCK, e3m0_bytes):
        refused = _encode_rows(rows, packed)
        if refused >= 0:
            return first + refused
    return -1


def e3m0_decode(body: U8, out: F32) -> int:
    """Write the powers of two; refuse E = 255 and a last nibble that is not padding."""
    for first, rows, packed in block_rows(out, body, E3M0_BLOCK, e3m0_bytes):
        refused = _decode_rows(packed, rows)
        if refused >= 0:
            return first + refused
    return -1


def _encode_rows(rows: F32, body: U8) -> int:
    bits = magnitude_bits(rows)
    refused = first_true(bits >= INFINITY)
    if refused >= 0:
        return refused
    exponent = ((bits + np.uint32(0x400000)) >> np.uint32(23)).astype(np.int16)
    largest = np.minimum(exponent.max(axis=1), E3M0_MAX_EXPONENT)
    largest[largest < E3M0_MIN_EXPONENT] = 0
    code = np.maximum(largest[:, None] - exponent, 0)
    nibble = code | (np.signbit(rows) << np.int16(3))
    nibble[(code >= E3M0_ZERO) | (exponent < E3M0_MIN_EXPONENT)] = E3M0_ZERO
    body[:, 0] = largest
    packed = body[:, E3M0_HEAD:]
    packed[:] = nibble[:, 0::2]
    packed[:, : rows.shape[1] // 2] |= (nibble[:, 1::2] << 4).astype(np.uint8)
    return -1


def _decode_rows(body: U8, rows: F32) -> int:
    largest, packed = body[:, :E3M0_HEAD], body[:, E3M0_HEAD:]
    width = int(rows.shape[1])
    refused = first_true(largest > E3M0_MAX_EXPONENT)
    if refused >= 0:
        return refused * width
    if width % 2 and int(packed[0, -1]) >> 4:
        return width - 1
    nibble = np.empty(rows.shape, np.int32)
    nibble[:, 0::2] = packed & 15
    nibble[:, 1::2] = packed[:, : width // 2] >> 4
    code = nibble & 7
    exponent = largest.astype(np.int32) - code
    bits = ((nibble >> 3) << 31) | (exponent << 23)
    bits[(code == E3M0_ZERO) | (exponent < E3M0_MIN_EXPONENT)] = 0
    rows[:] = bits.view(np.float32)
    return -1
