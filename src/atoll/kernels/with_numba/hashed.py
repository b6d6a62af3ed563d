"""Nesterov's outer step and the XXH3-128 of its results, in one pass over memory.

The step alone is bound by memory. Hashing a strip while it is in the first cache makes
the hash almost free; taken piece by piece afterwards it costs a third of the step, and
a call per piece makes threads queue for the interpreter.

XXH3 of a long input: eight 64-bit lanes take in 64 bytes at a time, scramble after each
1024, and are folded to 128 bits at the end. The last 1024 bytes are not scrambled, and
the very last 64 meet another part of the secret. A test holds this equal to xxhash.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.kernels.layouts import F32, STATE_PIECE, U8, U16
from atoll.kernels.with_numba.floats import bf16_decode_loop
from atoll.kernels.with_numba.jit import jit
from atoll.kernels.with_numba.outer import nesterov_loop
from atoll.kernels.with_numba.vectors import (
    LINE,
    absorb,
    fold_product,
    nesterov_lines,
)

U64 = NDArray[np.uint64]

_STRIP = 1024
"""Elements: a strip of all arrays fits the first cache."""

_BLOCK_WORDS = 128
_PIECE_BYTES = 4 * STATE_PIECE
_INFINITY = np.uint32(0x7F800000)

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_START = np.array(
    [_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0]], np.uint64
)
_M64 = 2**64 - 1
_LOW_START = np.uint64(_PIECE_BYTES * _PRIME64[0] & _M64)
_HIGH_START = np.uint64(~(_PIECE_BYTES * _PRIME64[1]) & _M64)
_AVALANCHE = np.uint64(0x165667919E3779F9)


def _secret_words(at: int, count: int) -> U64:
    return np.frombuffer(_SECRET, np.uint64, count, offset=at)


_STRIPE_KEYS = _secret_words(0, 24)
_LAST_STRIPE_KEY = _secret_words(121, 8)
_LOW_KEY = _secret_words(11, 8)
_HIGH_KEY = _secret_words(117, 8)


def nesterov_hashed(
    anchor: F32, velocity: F32, mean: F32 | U16, lr: float, momentum: float, hashes: U8
) -> int:
    """Take Nesterov's step, and write the hashes of each piece of the results.

    The slices start at a piece. `mean` is fp32, or a bf16 body that is decoded on the
    way. `hashes` has a row per piece: 16 bytes of XXH3-128 of the anchor's bytes, then
    16 of the velocity's. Returns the index of the first number of `mean` that is not
    finite, or -1; the state is then spoilt.
    """
    whole = anchor.size // STATE_PIECE * STATE_PIECE
    values = np.float32(lr), np.float32(momentum)
    refused = -1
    if whole:
        words = np.empty((whole // STATE_PIECE, 4), np.uint64)
        lanes = np.empty((2, 8), np.uint64)
        refused = _pieces(anchor[:whole], velocity[:whole], mean, *values, lanes, words)
        hashes[: len(words)] = words.byteswap().view(np.uint8)
    if refused < 0 and whole < anchor.size:
        rest = anchor[whole:], velocity[whole:]
        nesterov_loop(*rest, _as_fp32(mean[whole:]), *values)
        hashes[-1] = np.frombuffer(b"".join(map(_xxh3, rest)), np.uint8)
        refused = whole
    if refused < 0:
        return -1
    bad = ~np.isfinite(_as_fp32(mean[refused:]))
    return refused + int(bad.argmax()) if bad.any() else -1


def _xxh3(array: F32) -> bytes:
    return xxhash.xxh3_128_digest(array.data)


def _as_fp32(mean: F32 | U16) -> F32:
    if mean.dtype == np.float32:
        return mean.view(np.float32)
    wide = np.empty(mean.size, np.float32)
    bf16_decode_loop(mean.view(np.uint16), wide)
    return wide


@jit
def _pieces(
    anchor: F32,
    velocity: F32,
    mean: F32 | U16,
    lr: np.float32,
    momentum: np.float32,
    lanes: U64,
    hashes: U64,
) -> int:
    """Step and hash strip by strip; return where a strip that is not finite starts."""
    anchor_words, velocity_words = anchor.view(np.uint64), velocity.view(np.uint64)
    lines = _STRIP // LINE
    for first in range(0, anchor.size, _STRIP):
        at, piece = first // 2, first // STATE_PIECE
        if first % STATE_PIECE == 0:
            _start(lanes)
        most = nesterov_lines(anchor, velocity, mean, lr, momentum, first, lines)
        if most >= _INFINITY:
            return first
        is_last = (first + _STRIP) % STATE_PIECE == 0
        blocks = _STRIP // 2 // _BLOCK_WORDS - is_last
        absorb(lanes[0], anchor_words, at, _STRIPE_KEYS, blocks)
        absorb(lanes[1], velocity_words, at, _STRIPE_KEYS, blocks)
        if is_last:
            at += blocks * _BLOCK_WORDS
            _finish(lanes[0], anchor_words, at, hashes[piece, :2])
            _finish(lanes[1], velocity_words, at, hashes[piece, 2:])
    return -1


@jit
def _start(lanes: U64) -> None:
    for row in range(2):
        for lane in range(8):
            lanes[row, lane] = _START[lane]


@jit
def _finish(lanes: U64, words: U64, at: int, hashes: U64) -> None:
    """Take in the last 1024 bytes of a piece, and fold the lanes to its hash."""
    for stripe in range(15):
        _take_in(lanes, words, at + 8 * stripe, _STRIPE_KEYS[stripe : stripe + 8])
    _take_in(lanes, words, at + 8 * 15, _LAST_STRIPE_KEY)
    hashes[0] = _fold(lanes, _HIGH_KEY, _HIGH_START)
    hashes[1] = _fold(lanes, _LOW_KEY, _LOW_START)


@jit
def _take_in(lanes: U64, words: U64, at: int, key: U64) -> None:
    for lane in range(8):
        keyed = words[at + lane] ^ key[lane]
        product = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
        lanes[lane] += product + words[at + (lane ^ 1)]


@jit
def _fold(lanes: U64, key: U64, start: np.uint64) -> np.uint64:
    result = start
    for i in range(0, 8, 2):
        result += fold_product(lanes[i] ^ key[i], lanes[i + 1] ^ key[i + 1])
    result = (result ^ (result >> np.uint64(37))) * _AVALANCHE
    return result ^ (result >> np.uint64(32))
