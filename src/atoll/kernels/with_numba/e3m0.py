"""e3m0: a sign and a power of two in four bits, by integer operations only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import (
    E3M0_BLOCK,
    E3M0_HEAD,
    E3M0_MAX_EXPONENT,
    E3M0_MIN_EXPONENT,
    E3M0_ZERO,
    F32,
    U8,
)
from atoll.kernels.with_numba.jit import (
    INFINITY,
    MAGNITUDE,
    U32,
    first_at_least,
    jit,
    largest_magnitude,
)
from atoll.kernels.with_numba.nibbles import (
    largest_of_block,
    pack_block,
    unpack_block,
)

I32 = NDArray[np.int32]

_HALF = np.uint32(0x400000)
_LEAST = np.int32(E3M0_MIN_EXPONENT)
_MOST = np.int32(E3M0_MAX_EXPONENT)
_ZERO = np.int32(E3M0_ZERO)
_NONE = np.int32(0)


def e3m0_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity."""
    return _encode(x.view(np.uint32), body)


def e3m0_decode(body: U8, out: F32) -> int:
    """Write the powers of two; refuse E = 255 and a last nibble that is not padding."""
    return _decode(body, out.view(np.int32))


@jit
def _exponent(bits: np.uint32) -> np.int32:
    """Return the exponent field of the power of two nearest to a magnitude."""
    return np.int32(np.uint32(np.uint32(bits & MAGNITUDE) + _HALF) >> np.uint32(23))


@jit
def _nibble(bits: np.uint32, largest: np.int32) -> np.int32:
    exponent = _exponent(bits)
    code = max(np.int32(largest - exponent), _NONE)
    is_zero = (code >= _ZERO) | (exponent < _LEAST)
    sign = np.int32(np.uint32(bits >> np.uint32(28)) & np.uint32(8))
    return _ZERO if is_zero else np.int32(code | sign)


@jit
def _encode(x: U32, body: U8) -> int:
    at, whole = 0, x.size // E3M0_BLOCK * E3M0_BLOCK
    for first in range(0, whole, E3M0_BLOCK):
        most = largest_of_block(x, first)
        if most >= INFINITY:
            return first + first_at_least(x[first : first + E3M0_BLOCK], INFINITY)
        largest = _largest(most)
        body[at] = np.uint8(largest)
        pack_block(x, first, largest, body, at + E3M0_HEAD)
        at += E3M0_HEAD + E3M0_BLOCK // 2
    if whole == x.size:
        return -1
    refused = _encode_short(x[whole:], body[at:])
    return whole + refused if refused >= 0 else -1


@jit
def _encode_short(block: U32, body: U8) -> int:
    """Encode a block that is not whole: only the last one may be."""
    most = largest_magnitude(block)
    if most >= INFINITY:
        return first_at_least(block, INFINITY)
    largest = _largest(most)
    body[0] = np.uint8(largest)
    pairs = block.size // 2
    _pack(block, largest, body[E3M0_HEAD : E3M0_HEAD + pairs])
    if block.size % 2:
        last = _nibble(block[block.size - 1], largest)
        body[E3M0_HEAD + pairs] = np.uint8(last)
    return -1


@jit
def _largest(magnitude: np.uint32) -> np.int32:
    """Return the E of a block from its largest magnitude."""
    largest = min(_exponent(magnitude), _MOST)
    return _NONE if largest < _LEAST else largest


@jit
def _pack(block: U32, largest: np.int32, to: U8) -> None:
    for i in range(to.size):
        low = _nibble(block[2 * i], largest)
        high = _nibble(block[2 * i + 1], largest)
        to[i] = np.uint8(low | high << np.int32(4))


@jit
def _value(nibble: np.int32, largest: np.int32) -> np.int32:
    """Return the bits of the fp32 number that a nibble stands for."""
    code = np.int32(nibble & np.int32(7))
    exponent = np.int32(largest - code)
    is_zero = (code == _ZERO) | (exponent < _LEAST)
    sign = np.int32(np.int32(nibble >> np.int32(3)) << np.int32(31))
    return _NONE if is_zero else np.int32(sign | np.int32(exponent << np.int32(23)))


@jit
def _decode(body: U8, out: I32) -> int:
    at, whole = 0, out.size // E3M0_BLOCK * E3M0_BLOCK
    for first in range(0, whole, E3M0_BLOCK):
        largest = np.int32(body[at])
        if largest > _MOST:
            return first
        unpack_block(body, at + E3M0_HEAD, largest, out, first)
        at += E3M0_HEAD + E3M0_BLOCK // 2
    if whole == out.size:
        return -1
    refused = _decode_short(body[at:], out[whole:])
    return whole + refused if refused >= 0 else -1


@jit
def _decode_short(body: U8, block: I32) -> int:
    """Decode a block that is not whole: only the last one may be."""
    largest = np.int32(body[0])
    if largest > _MOST:
        return 0
    pairs = block.size // 2
    _unpack(body[E3M0_HEAD : E3M0_HEAD + pairs], largest, block)
    if block.size % 2:
        last = body[E3M0_HEAD + pairs]
        if last >= 16:
            return block.size - 1
        block[block.size - 1] = _value(np.int32(last), largest)
    return -1


@jit
def _unpack(packed: U8, largest: np.int32, block: I32) -> None:
    for i in range(packed.size):
        pair = np.int32(packed[i])
        block[2 * i] = _value(np.int32(pair & np.int32(15)), largest)
        block[2 * i + 1] = _value(np.int32(pair >> np.int32(4)), largest)
