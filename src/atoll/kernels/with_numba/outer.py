"""Differences, sums and outer steps in place: the sequences of `atoll.algorithm`.

`nesterov_hashed` takes Nesterov's outer step and the XXH3-128 of its results in one
pass over memory. The step alone is bound by memory. Hashing a strip while it is in the
first cache is almost free; a second pass would cost a third of the step, and a call per
piece makes threads queue for the interpreter. A vector is one cache line, so that an
iteration can prefetch exactly one line of each array.

XXH3 of a long input: eight 64-bit lanes absorb 64 bytes at a time, scramble after each
1024, and are folded to 128 bits at the end. The last 1024 bytes are not scrambled, and
the last 64 use another part of the secret. A test holds this equal to xxhash.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash
from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from atoll.kernels.layouts import F32, F64, LANES, STATE_PIECE, TINY, U8, U16
from atoll.kernels.with_numba.codecs import bf16_decode_loop
from atoll.kernels.with_numba.jit import (
    I16,
    I32,
    I64,
    LINE,
    PREFETCH_AHEAD,
    WRITES_AHEAD,
    every,
    fetch_line,
    flush,
    jit,
    larger,
    prefetch,
)


def difference(loaded: F32, local: F32, out: F32) -> None:
    """Let out = loaded - local."""
    _difference(loaded, local, out)


def difference_fed(
    loaded: F32, local: F32, residual: F32, decay: float, out: F32
) -> None:
    """Let out = (loaded - local) + decay * residual."""
    _difference_fed(loaded, local, residual, np.float32(decay), out)


def left_over(wanted: F32, sent: F32, residual: F32, lanes: F64) -> None:
    """Let residual = wanted - sent, and add the squares of `sent` to a norm's lanes."""
    _left_over(wanted, sent, residual, lanes)


@jit
def _difference(loaded: F32, local: F32, out: F32) -> None:
    for i in range(out.size):
        out[i] = loaded[i] - local[i]


@jit
def _difference_fed(
    loaded: F32, local: F32, residual: F32, decay: np.float32, out: F32
) -> None:
    for i in range(out.size):
        out[i] = (loaded[i] - local[i]) + residual[i] * decay


@jit
def _left_over(wanted: F32, sent: F32, residual: F32, lanes: F64) -> None:
    full_size = sent.size // LANES * LANES
    for first in range(0, full_size, LANES):
        row, rest = sent[first : first + LANES], residual[first : first + LANES]
        want = wanted[first : first + LANES]
        for line in range(first, first + LANES, LINE):
            fetch_line(residual, line + WRITES_AHEAD)
        for j in range(LANES):
            rest[j] = want[j] - row[j]
        for j in range(LANES):
            lanes[j] += np.float64(row[j]) * np.float64(row[j])
    for j in range(sent.size - full_size):
        residual[full_size + j] = wanted[full_size + j] - sent[full_size + j]
        lanes[j] += np.float64(sent[full_size + j]) * np.float64(sent[full_size + j])


def accumulate(total: F32, x: F32) -> None:
    """Let total = flush(total + x)."""
    _accumulate(total, x)


def accumulate_divided(total: F32, x: F32, by: float) -> None:
    """Let total = flush(flush(total + x) / by)."""
    _accumulate_divided(total, x, np.float32(by))


def accumulate_scaled(total: F32, x: F32, share: float) -> None:
    """Let total = flush(total + flush(share * x))."""
    _accumulate_scaled(total, x, np.float32(share))


def divide(total: F32, by: float) -> None:
    """Let total = flush(total / by)."""
    _divide(total, np.float32(by))


def scale(total: F32, share: float) -> None:
    """Let total = flush(share * total)."""
    _scale(total, np.float32(share))


def sgd(anchor: F32, mean: F32, lr: float) -> None:
    """Take the outer step of plain descent."""
    _sgd(anchor, mean, np.float32(lr))


def heavy_ball(
    anchor: F32, velocity: F32, mean: F32, lr: float, momentum: float
) -> None:
    """Take the outer step of Polyak's momentum."""
    _heavy_ball(anchor, velocity, mean, np.float32(lr), np.float32(momentum))


def nesterov(anchor: F32, velocity: F32, mean: F32, lr: float, momentum: float) -> None:
    """Take the outer step of Nesterov's momentum."""
    nesterov_loop(anchor, velocity, mean, np.float32(lr), np.float32(momentum))


def adam(
    anchor: F32,
    first: F32,
    second: F32,
    mean: F32,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    correction1: float,
    correction2: float,
) -> None:
    """Take the outer step of Adam; the corrections are 1 - beta**count."""
    rests = 1.0 - float(beta1), 1.0 - float(beta2)
    scalars = np.array(
        [beta1, beta2, *rests, eps, correction1, correction2, lr], np.float32
    )
    _adam(anchor, first, second, mean, scalars)


@jit
def _accumulate(total: F32, x: F32) -> None:
    for i in range(total.size):
        total[i] = flush(total[i] + x[i])


@jit
def _accumulate_divided(total: F32, x: F32, by: np.float32) -> None:
    for i in range(total.size):
        total[i] = flush(flush(total[i] + x[i]) / by)


@jit
def _accumulate_scaled(total: F32, x: F32, share: np.float32) -> None:
    for i in range(total.size):
        total[i] = flush(total[i] + flush(x[i] * share))


@jit
def _divide(total: F32, by: np.float32) -> None:
    for i in range(total.size):
        total[i] = flush(total[i] / by)


@jit
def _scale(total: F32, share: np.float32) -> None:
    for i in range(total.size):
        total[i] = flush(total[i] * share)


@jit
def _sgd(anchor: F32, mean: F32, lr: np.float32) -> None:
    for i in range(anchor.size):
        anchor[i] = flush(anchor[i] - flush(flush(mean[i]) * lr))


@jit
def _heavy_ball(
    anchor: F32, velocity: F32, mean: F32, lr: np.float32, momentum: np.float32
) -> None:
    for i in range(anchor.size):
        gathered = flush(flush(velocity[i] * momentum) + flush(mean[i]))
        velocity[i] = gathered
        anchor[i] = flush(anchor[i] - flush(gathered * lr))


@jit
def nesterov_loop(
    anchor: F32, velocity: F32, mean: F32, lr: np.float32, momentum: np.float32
) -> None:
    """Take Nesterov's step; the scalars are fp32 already."""
    for i in range(anchor.size):
        fresh = flush(mean[i])
        gathered = flush(flush(velocity[i] * momentum) + fresh)
        velocity[i] = gathered
        pull = flush(fresh + flush(gathered * momentum))
        anchor[i] = flush(anchor[i] - flush(pull * lr))


@jit
def _adam(anchor: F32, first: F32, second: F32, mean: F32, scalars: F32) -> None:
    beta1, beta2, rest1, rest2 = scalars[0], scalars[1], scalars[2], scalars[3]
    eps, correction1, correction2, lr = scalars[4], scalars[5], scalars[6], scalars[7]
    for i in range(anchor.size):
        fresh = flush(mean[i])
        square = flush(flush(fresh * fresh) * rest2)
        first[i] = flush(flush(first[i] * beta1) + flush(fresh * rest1))
        second[i] = flush(flush(second[i] * beta2) + square)
        root = flush(np.sqrt(flush(second[i] / correction2)))
        ratio = flush(flush(first[i] / correction1) / flush(root + eps))
        anchor[i] = flush(anchor[i] - flush(ratio * lr))


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


def _secret_words(offset: int, count: int) -> U64:
    return np.frombuffer(_SECRET, np.uint64, count, offset=offset)


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
    full_size = anchor.size // STATE_PIECE * STATE_PIECE
    values = np.float32(lr), np.float32(momentum)
    refused = -1
    if full_size:
        words64 = np.empty((full_size // STATE_PIECE, 4), np.uint64)
        lanes = np.empty((2, 8), np.uint64)
        refused = _pieces(
            anchor[:full_size], velocity[:full_size], mean, *values, lanes, words64
        )
        hashes[: len(words64)] = words64.byteswap().view(np.uint8)
    if refused < 0 and full_size < anchor.size:
        rest = anchor[full_size:], velocity[full_size:]
        nesterov_loop(*rest, _as_fp32(mean[full_size:]), *values)
        hashes[-1] = np.frombuffer(b"".join(map(_xxh3, rest)), np.uint8)
        refused = full_size
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
        offset, piece = first // 2, first // STATE_PIECE
        if first % STATE_PIECE == 0:
            _start(lanes)
        largest = nesterov_lines(anchor, velocity, mean, lr, momentum, first, lines)
        if largest >= _INFINITY:
            return first
        is_last = (first + _STRIP) % STATE_PIECE == 0
        blocks = _STRIP // 2 // _BLOCK_WORDS - is_last
        absorb(lanes[0], anchor_words, offset, _STRIPE_KEYS, blocks)
        absorb(lanes[1], velocity_words, offset, _STRIPE_KEYS, blocks)
        if is_last:
            offset += blocks * _BLOCK_WORDS
            _finish(lanes[0], anchor_words, offset, hashes[piece, :2])
            _finish(lanes[1], velocity_words, offset, hashes[piece, 2:])
    return -1


@jit
def _start(lanes: U64) -> None:
    for row in range(2):
        for lane in range(8):
            lanes[row, lane] = _START[lane]


@jit
def _finish(lanes: U64, words64: U64, offset: int, hashes: U64) -> None:
    """Absorb the last 1024 bytes of a piece, and fold the lanes to its hash."""
    for stripe in range(15):
        _absorb_stripe(
            lanes, words64, offset + 8 * stripe, _STRIPE_KEYS[stripe : stripe + 8]
        )
    _absorb_stripe(lanes, words64, offset + 8 * 15, _LAST_STRIPE_KEY)
    hashes[0] = _fold(lanes, _HIGH_KEY, _HIGH_START)
    hashes[1] = _fold(lanes, _LOW_KEY, _LOW_START)


@jit
def _absorb_stripe(lanes: U64, words64: U64, offset: int, key: U64) -> None:
    for lane in range(8):
        keyed = words64[offset + lane] ^ key[lane]
        product = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
        lanes[lane] += product + words64[offset + (lane ^ 1)]


@jit
def _fold(lanes: U64, key: U64, start: np.uint64) -> np.uint64:
    result = start
    for i in range(0, 8, 2):
        result += fold_product(lanes[i] ^ key[i], lanes[i + 1] ^ key[i + 1])
    result = (result ^ (result >> np.uint64(37))) * _AVALANCHE
    return result ^ (result >> np.uint64(32))


_I128 = ir.IntType(128)
_FLOATS = ir.VectorType(ir.FloatType(), LINE)
_BITS = ir.VectorType(I32, LINE)
_HALVES = ir.VectorType(I16, LINE)
_QUADS = ir.VectorType(I64, 8)

_STRIPES = 16
_SWAP = ir.Constant(ir.VectorType(I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])
_SCRAMBLE = 0x9E3779B1


@intrinsic
def nesterov_lines(
    typing: Any,
    anchor: Any,
    velocity: Any,
    mean: Any,
    lr: Any,
    momentum: Any,
    first: Any,
    lines: Any,
) -> Any:
    """Take Nesterov's step on whole lines from `first` on.

    `mean` is fp32, or bf16 in u16. Returns the bits of its largest magnitude.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        step = _Step(context, builder, signature.args, args)
        with for_range(builder, args[6]) as loop:
            offset = builder.mul(loop.index, ir.Constant(I64, LINE))
            step.take(builder.add(args[5], offset))
        return step.largest()

    arguments = (anchor, velocity, mean, lr, momentum, first, lines)
    return types.uint32(*arguments), build


class _Step:
    """Builds the instructions of one turn: the sequence of `algorithm.outer`."""

    def __init__(self, context: Any, builder: Any, kinds: Any, args: Any) -> None:
        self._builder = builder
        self._arrays = [
            make_array(kind)(context, builder, arg).data
            for kind, arg in zip(kinds[:3], args[:3], strict=True)
        ]
        self._is_half = kinds[2].dtype == types.uint16
        self._lr, self._momentum = (_spread(builder, arg) for arg in args[3:5])
        self._largest = alloca_once_value(builder, every(_BITS, 0))

    def take(self, offset: Any) -> None:
        builder = self._builder
        ahead = builder.add(offset, ir.Constant(I64, PREFETCH_AHEAD))
        for array in self._arrays:
            prefetch(builder, builder.gep(array, [ahead]))
        anchor_at, velocity_at, mean_at = (
            builder.gep(array, [offset]) for array in self._arrays
        )
        fresh = self._flush(self._mean(mean_at))
        velocity = self._times(_load(builder, velocity_at, _FLOATS), self._momentum)
        velocity = self._flush(builder.fadd(velocity, fresh))
        _store(builder, velocity, velocity_at)
        pull = builder.fadd(fresh, self._times(velocity, self._momentum))
        change = self._times(self._flush(pull), self._lr)
        anchor = builder.fsub(_load(builder, anchor_at, _FLOATS), change)
        _store(builder, self._flush(anchor), anchor_at)

    def largest(self) -> Any:
        builder = self._builder
        lanes = builder.load(self._largest)
        largest = ir.Constant(I32, 0)
        for lane in range(LINE):
            other = builder.extract_element(lanes, ir.Constant(I32, lane))
            largest = larger(builder, largest, other)
        return largest

    def _mean(self, address: Any) -> Any:
        builder = self._builder
        if self._is_half:
            half = builder.zext(_load(builder, address, _HALVES), _BITS)
            bits = builder.shl(half, every(_BITS, 16))
        else:
            bits = _load(builder, address, _BITS)
        magnitude = builder.and_(bits, every(_BITS, 0x7FFFFFFF))
        largest = larger(builder, builder.load(self._largest), magnitude)
        builder.store(largest, self._largest)
        return builder.bitcast(bits, _FLOATS)

    def _times(self, vector: Any, scalar: Any) -> Any:
        return self._flush(self._builder.fmul(vector, scalar))

    def _flush(self, vector: Any) -> Any:
        builder = self._builder
        bits = builder.bitcast(vector, _BITS)
        magnitude = builder.and_(bits, every(_BITS, 0x7FFFFFFF))
        is_tiny = builder.fcmp_ordered(
            "<", builder.bitcast(magnitude, _FLOATS), every(_FLOATS, float(TINY))
        )
        return builder.select(is_tiny, every(_FLOATS, 0.0), vector)


@intrinsic
def absorb(
    typing: Any, lanes: Any, words64: Any, offset: Any, keys: Any, blocks: Any
) -> Any:
    """Let the eight lanes of XXH3 absorb blocks of 128 words, and scramble each."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes_at, words64_start, keys_at = (
            make_array(signature.args[i])(context, builder, args[i]).data
            for i in (0, 1, 3)
        )
        state = alloca_once_value(builder, _load(builder, lanes_at, _QUADS))
        with for_range(builder, args[4]) as loop:
            start = builder.mul(loop.index, ir.Constant(I64, 8 * _STRIPES))
            block = builder.gep(words64_start, [builder.add(args[2], start)])
            after = _absorb_block(builder, builder.load(state), block, keys_at)
            builder.store(after, state)
        _store(builder, builder.load(state), lanes_at)
        return context.get_dummy_value()

    return types.void(lanes, words64, offset, keys, blocks), build


def _absorb_block(builder: Any, lanes: Any, block: Any, keys: Any) -> Any:
    for stripe in range(_STRIPES):
        data = _load(builder, _address(builder, block, 8 * stripe), _QUADS)
        keyed = builder.xor(
            data, _load(builder, _address(builder, keys, stripe), _QUADS)
        )
        low = builder.and_(keyed, every(_QUADS, 0xFFFFFFFF))
        product = builder.mul(low, builder.lshr(keyed, every(_QUADS, 32)))
        swapped = builder.shuffle_vector(data, data, _SWAP)
        lanes = builder.add(builder.add(lanes, product), swapped)
    mixed = builder.xor(lanes, builder.lshr(lanes, every(_QUADS, 47)))
    last_key = _load(builder, _address(builder, keys, _STRIPES), _QUADS)
    return builder.mul(builder.xor(mixed, last_key), every(_QUADS, _SCRAMBLE))


@intrinsic
def fold_product(typing: Any, left: Any, right: Any) -> Any:
    """Return the upper half of a 128-bit product, xor its lower half."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.mul(*(builder.zext(arg, _I128) for arg in args))
        upper = builder.lshr(product, ir.Constant(_I128, 64))
        return builder.trunc(builder.xor(product, upper), I64)

    return types.uint64(types.uint64, types.uint64), build


def _address(builder: Any, pointer: Any, index: int) -> Any:
    return builder.gep(pointer, [ir.Constant(I64, index)])


def _load(builder: Any, pointer: Any, kind: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    loaded.align = 2
    return loaded


def _store(builder: Any, vector: Any, pointer: Any) -> None:
    stored = builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()))
    stored.align = 2


def _spread(builder: Any, scalar: Any) -> Any:
    vector = ir.Constant(_FLOATS, ir.Undefined)
    for lane in range(LINE):
        vector = builder.insert_element(vector, scalar, ir.Constant(I32, lane))
    return vector
