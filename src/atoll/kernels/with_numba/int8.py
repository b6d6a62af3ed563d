"""int8: a byte per element, and per block the scale that makes its largest 127."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import (
    F32,
    INT8_BLOCK,
    INT8_HEAD,
    INT8_MAX_SCALE,
    TINY,
    U8,
)
from atoll.kernels.with_numba.codes import PART, quantise_part, restore_part
from atoll.kernels.with_numba.jit import (
    INFINITY,
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

_ZERO = np.float32(0)
_127 = np.float32(127)
_MAX_SCALE_BITS = INT8_MAX_SCALE.view(np.uint32)


def int8_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity."""
    return _encode(x, x.view(np.uint32), body, body.view(np.int8))


def int8_decode(body: U8, out: F32) -> int:
    """Write code * scale, flushed; refuse a code of -128 and an impossible scale."""
    return _decode(body, body.view(np.int8), out)


@jit
def _encode(x: F32, bits: U32, body: U8, codes: NDArray[np.int8]) -> int:
    at = 0
    for first in range(0, x.size, INT8_BLOCK):
        block = x[first : first + INT8_BLOCK]
        block_bits = bits[first : first + INT8_BLOCK]
        largest = largest_magnitude(block_bits)
        if largest >= INFINITY:
            return first + first_at_least(block_bits, INFINITY)
        scale = min(np.float32(float_of(largest) / _127), INT8_MAX_SCALE)
        scale = _ZERO if scale < TINY else scale
        write_u32(body, at, bits_of(scale))
        to = codes[at + INT8_HEAD : at + INT8_HEAD + block.size]
        if scale == _ZERO:
            to[:] = 0
        elif block.size == INT8_BLOCK:
            for part in range(0, INT8_BLOCK, PART):
                quantise_part(block, part, scale, to, part)
        else:
            _quantise(block, scale, to)
        at += INT8_HEAD + block.size
    return -1


@jit
def _quantise(block: F32, scale: np.float32, to: NDArray[np.int8]) -> None:
    for i in range(block.size):
        code = np.rint(np.float32(block[i] / scale))
        to[i] = np.int8(min(max(code, -_127), _127))


@jit
def _decode(body: U8, codes: NDArray[np.int8], out: F32) -> int:
    at = 0
    for first in range(0, out.size, INT8_BLOCK):
        block = out[first : first + INT8_BLOCK]
        bits = read_u32(body, at)
        if bits > _MAX_SCALE_BITS:
            return first
        scale = float_of(bits)
        code = codes[at + INT8_HEAD : at + INT8_HEAD + block.size]
        refused = -1
        if block.size == INT8_BLOCK:
            bad = np.uint64(0)
            for part in range(0, INT8_BLOCK, PART):
                bad |= restore_part(code, part, scale, block, part)
            if bad:
                refused = _first_bad(code)
        else:
            for i in range(block.size):
                block[i] = flush(np.float32(code[i]) * scale)
            refused = _first_bad(code)
        if refused >= 0:
            return first + refused
        at += INT8_HEAD + block.size
    return -1


@jit
def _first_bad(code: NDArray[np.int8]) -> int:
    """Return the index of the first -128, which no encoder writes, or -1."""
    for i in range(code.size):
        if code[i] == -128:
            return i
    return -1
