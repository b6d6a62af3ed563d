"""The kernels in plain numpy: the fallback, and the reference of the compiled ones.

Encoders and decoders return the index of the first element they refuse, or -1. After a
refusal their output is garbage. Scratch is bounded: no buffer is as long as the vector.

fp32 and bf16 are bits, rounded or not. int8 has a byte per element, and per block the
scale that makes its largest 127. e3m0 has a sign and a power of two in four bits, by
integer operations only: with b the bits of |x|, e = (b + 0x400000) >> 23 is the
exponent field of the nearest power of two. A block stores its largest, E, and each
element its distance below E. topk-2bit keeps the largest 64th of each block, each as a
sign and one of two levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from atoll.kernels.layouts import (
    E3M0_BLOCK,
    E3M0_HEAD,
    E3M0_MAX_EXPONENT,
    E3M0_MIN_EXPONENT,
    E3M0_ZERO,
    F32,
    F64,
    INT8_BLOCK,
    INT8_HEAD,
    INT8_MAX_SCALE,
    LANES,
    TINY,
    TOPK_BLOCK,
    TOPK_HEAD,
    U8,
    U16,
    e3m0_bytes,
    int8_bytes,
    topk_block_bytes,
    topk_bytes,
    topk_kept,
    topk_shares,
)

__all__ = [
    "accumulate",
    "accumulate_divided",
    "accumulate_scaled",
    "adam",
    "bf16_decode",
    "bf16_encode",
    "bf16_squares",
    "bf16_stochastic",
    "difference",
    "difference_fed",
    "divide",
    "e3m0_decode",
    "e3m0_encode",
    "e3m0_squares",
    "fp32_decode",
    "fp32_encode",
    "fp32_squares",
    "heavy_ball",
    "int8_decode",
    "int8_encode",
    "left_over",
    "nesterov",
    "round_bf16",
    "scale",
    "sgd",
    "sum_squares",
    "topk_decode",
    "topk_encode",
]


RANGE = 16384
"""Elements of a range: a handful of temporaries then fit a core's cache."""

U32 = NDArray[np.uint32]

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)


def ranges(elements: int) -> Iterator[slice[int, int, None]]:
    """Yield short ranges that cover a vector; each starts at a block of every codec."""
    for first in range(0, elements, RANGE):
        yield slice(first, min(first + RANGE, elements))


RowCode = Callable[[F32, U8], int]
"""Encodes or decodes rows, one per block; returns the index it refuses, or -1."""


def by_rows(
    code: RowCode, values: F32, body: U8, block: int, size: Callable[[int], int]
) -> int:
    """Encode or decode short runs of blocks; return the index refused, or -1.

    Each is a matrix with a row per block; the short block at the end comes alone.
    """
    for span in ranges(values.size):
        full_end = span.start + (span.stop - span.start) // block * block
        for first, last in ((span.start, full_end), (full_end, span.stop)):
            if first < last:
                rows = -(-(last - first) // block)
                packed = body[size(first) : size(last)].reshape(rows, -1)
                refused = code(values[first:last].reshape(rows, -1), packed)
                if refused >= 0:
                    return first + refused
    return -1


def flush(values: F32) -> F32:
    """Set magnitudes below 2**-100 to +0.0, in place; NaN stays NaN."""
    values[np.abs(values) < TINY] = 0.0
    return values


def magnitude_bits(values: F32) -> U32:
    """Return the bits of every value without its sign; they sort as magnitudes do."""
    return values.view(np.uint32) & MAGNITUDE


def first_true(mask: NDArray[np.bool_]) -> int:
    """Return the index of the first true element in memory order, or -1."""
    flat = mask.reshape(-1)
    index = int(flat.argmax()) if flat.size else 0
    return index if flat.size and flat[index] else -1


def first_not_finite(values: F32) -> int:
    """Return the index of the first NaN or infinity, or -1."""
    return first_true(magnitude_bits(values) >= INFINITY)


# Halfway between the largest bf16 number and infinity; the tie goes to infinity.
_BF16_OVERFLOW = np.uint32(0x7F7F8000)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def fp32_encode(x: F32, out: F32) -> int:
    """Copy `x` bit by bit; refuse NaN and infinity."""
    for span in ranges(x.size):
        refused = first_not_finite(x[span])
        if refused >= 0:
            return span.start + refused
        out[span] = x[span]
    return -1


def fp32_decode(body: F32, out: F32) -> int:
    """Copy `body`, flushed; refuse NaN and infinity."""
    for span in ranges(out.size):
        out[span] = body[span]
        refused = first_not_finite(out[span])
        if refused >= 0:
            return span.start + refused
        flush(out[span])
    return -1


def bf16_encode(x: F32, out: U16) -> int:
    """Round to the nearest bf16, ties to even; refuse NaN, infinity and overflow."""
    for span in ranges(x.size):
        bits = x[span].view(np.uint32)
        refused = first_true((bits & MAGNITUDE) >= _BF16_OVERFLOW)
        if refused >= 0:
            return span.start + refused
        out[span] = _nearest_bf16(bits)
    return -1


def bf16_stochastic(x: F32, out: U16, seed: int, first: int) -> int:
    """Round to a neighbouring bf16, up with the probability that makes it unbiased.

    Element i of the fragment adds its own 16 bits below the cut:
    `mix(seed + (i + 1) * 0x9E3779B97F4A7C15) >> 48`, modulo 2**64, where mix is the
    output function of SplitMix64. `first` is where `x` starts in the fragment.
    """
    for span in ranges(x.size):
        bits = x[span].view(np.uint32)
        noise = _noise(seed, first + span.start, bits.size)
        refused = first_true((bits & MAGNITUDE) + noise >= INFINITY)
        if refused >= 0:
            return span.start + refused
        out[span] = (bits + noise) >> np.uint32(16)
    return -1


def bf16_decode(body: U16, out: F32) -> int:
    """Widen to fp32, flushed; refuse NaN and infinity."""
    for span in ranges(out.size):
        out[span].view(np.uint32)[:] = body[span]
        out[span].view(np.uint32)[:] <<= np.uint32(16)
        refused = first_not_finite(out[span])
        if refused >= 0:
            return span.start + refused
        flush(out[span])
    return -1


def round_bf16(x: F32, out: F32) -> None:
    """Round to the nearest bf16, ties to even, and widen again; NaN stays NaN."""
    for span in ranges(x.size):
        bits = x[span].view(np.uint32)
        rounded = _nearest_bf16(bits) << np.uint32(16)
        is_nan = (bits & MAGNITUDE) > INFINITY
        out[span].view(np.uint32)[:] = np.where(is_nan, bits, rounded)


def sum_squares(x: F32, lanes: F64) -> None:
    """Add the square of element i to lane i % 64, in order, in fp64."""
    for span in ranges(x.size):
        squares = np.square(x[span], dtype=np.float64)
        full_size = squares.size // LANES * LANES
        rows = np.vstack([lanes, squares[:full_size].reshape(-1, LANES)])
        lanes[:] = np.add.accumulate(rows, axis=0)[-1]
        lanes[: squares.size - full_size] += squares[full_size:]


def _nearest_bf16(bits: U32) -> U32:
    """Return the upper halves after rounding; meaningless for NaN."""
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return (bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)


def _noise(seed: int, first: int, count: int) -> U32:
    number = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    mixed: NDArray[np.uint64] = number * _GOLDEN + np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(48)).astype(np.uint32)


_MAX_SCALE_BITS = INT8_MAX_SCALE.view(np.uint32)


def int8_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity.

    scale = min(absmax / 127, INT8_MAX_SCALE), zero below 2**-100; code = rint(x /
    scale) within -127..127, zero where the scale is.
    """
    return by_rows(_encode_int8_rows, x, body, INT8_BLOCK, int8_bytes)


def int8_decode(body: U8, out: F32) -> int:
    """Write code * scale, flushed; refuse a code of -128 and an impossible scale."""
    return by_rows(_decode_int8_rows, out, body, INT8_BLOCK, int8_bytes)


def _encode_int8_rows(rows: F32, body: U8) -> int:
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


def _decode_int8_rows(rows: F32, body: U8) -> int:
    scale = np.ascontiguousarray(body[:, :INT8_HEAD]).view(np.float32)
    codes = body[:, INT8_HEAD:].view(np.int8)
    refused = first_true((scale.view(np.uint32) > _MAX_SCALE_BITS) | (codes == -128))
    if refused >= 0:
        return refused
    np.multiply(codes, scale, out=rows)
    flush(rows)
    return -1


def e3m0_encode(x: F32, body: U8) -> int:
    """Encode `x`; refuse NaN and infinity.

    E is at most 254, and 0 when every element is zero. The code is E - e, at least 0;
    beyond 6, or where e is below 27, the element is zero: nibble 7.
    """
    return by_rows(_encode_e3m0_rows, x, body, E3M0_BLOCK, e3m0_bytes)


def e3m0_decode(body: U8, out: F32) -> int:
    """Write the powers of two; refuse E = 255 and a last nibble that is not padding."""
    return by_rows(_decode_e3m0_rows, out, body, E3M0_BLOCK, e3m0_bytes)


def _encode_e3m0_rows(rows: F32, body: U8) -> int:
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


def _decode_e3m0_rows(rows: F32, body: U8) -> int:
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


Decode = Callable[..., int]
"""Fills fp32 elements from a part of a body; returns the index it refuses, or -1."""


def fp32_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the square of element i to lane i % 64, flushed; refuse NaN and infinity.

    `body` has exactly the bytes of `elements`. Return the index of the first element
    that is refused, or -1. The lanes are garbage after a refusal; the
    other functions here share this.
    """
    return _squares(fp32_decode, body.view(np.float32), elements, lanes)


def bf16_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of a bf16 body; refuse NaN and infinity."""
    return _squares(bf16_decode, body.view(np.uint16), elements, lanes)


def e3m0_squares(body: U8, elements: int, lanes: F64) -> int:
    """Add the squares of an e3m0 body; refuse E = 255 and a wrong last nibble."""
    return _squares(e3m0_decode, body, elements, lanes, byte_offset=e3m0_bytes)


def _squares(
    decode: Decode,
    body: F32 | U16 | U8,
    elements: int,
    lanes: F64,
    *,
    byte_offset: Callable[[int], int] = int,
) -> int:
    values = np.empty(min(RANGE, elements), np.float32)
    for span in ranges(elements):
        part = values[: span.stop - span.start]
        refused = decode(body[byte_offset(span.start) : byte_offset(span.stop)], part)
        if refused >= 0:
            return span.start + refused
        sum_squares(part, lanes)
    return -1


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
        refused = _encode_topk_block(block, _topk_block(body, first, block.size))
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
        if not _decode_topk_block(_topk_block(body, first, block.size), block):
            return first
    return -1


def _topk_block(body: U8, first: int, elements: int) -> U8:
    start = topk_bytes(first)
    return body[start : start + topk_block_bytes(elements)]


def _encode_topk_block(block: F32, body: U8) -> int:
    refused = first_not_finite(block)
    if refused >= 0:
        return refused
    index, is_high = _select_largest(magnitude_bits(block))
    selected = block[index]
    sums = _running_sums(selected, is_high), _running_sums(selected, ~is_high)
    refused = first_true(np.isinf(sums[0]) | np.isinf(sums[1]))
    if refused >= 0:
        return int(index[refused])
    high_count, low_count = topk_shares(index.size)
    low = sums[1][-1:] / np.float32(max(low_count, 1))
    high = sums[0][-1:] / np.float32(high_count)
    body[0:4] = flush(low).view(np.uint8)
    body[4:8] = flush(high).view(np.uint8)
    _pack_bits(index, 12, body[TOPK_HEAD : _values_at(index.size)])
    _pack_bits(is_high | (np.signbit(selected) << 1), 2, body[_values_at(index.size) :])
    return -1


def _select_largest(bits: U32) -> tuple[Index, Mask]:
    """Return the ascending indices of the kept elements, and a mask of the larger half.

    A key holds the magnitude above and the index, counted down, below: keys are unique
    and sort by the order that the format asks for.
    """
    selected = topk_kept(bits.size)
    down = np.arange(TOPK_BLOCK - 1, TOPK_BLOCK - 1 - bits.size, -1, dtype=np.uint64)
    keys = (bits.astype(np.uint64) << np.uint64(12)) | down
    largest = np.sort(np.partition(keys, bits.size - selected)[bits.size - selected :])
    index = (TOPK_BLOCK - 1) - (largest & np.uint64(TOPK_BLOCK - 1)).astype(np.int64)
    order = np.argsort(index)
    return index[order], order >= selected - topk_shares(selected)[0]


def _running_sums(selected: F32, belongs: Mask) -> F32:
    terms = np.where(belongs, flush(np.abs(selected)), np.float32(0))
    with np.errstate(over="ignore"):
        sums: F32 = np.add.accumulate(terms)
    return sums


def _values_at(selected: int) -> int:
    return TOPK_HEAD + -(-12 * selected // 8)


def _pack_bits(numbers: NDArray[np.int64], width: int, out: U8) -> None:
    """Write `width` bits of each number, lowest first; the last byte is padded."""
    bits = (numbers[:, None] >> np.arange(width)) & 1
    out[:] = np.packbits(bits.astype(np.uint8), bitorder="little")


def _unpack_bits(packed: U8, width: int, count: int) -> tuple[Index, bool]:
    """Return `count` numbers, and whether the padding after them is zero."""
    bits = np.unpackbits(packed, bitorder="little").astype(np.int64)
    numbers = bits[: count * width].reshape(count, width) << np.arange(width)
    return numbers.sum(axis=1), not bits[count * width :].any()


def _decode_topk_block(body: U8, block: F32) -> bool:
    selected = topk_kept(block.size)
    levels = body[:TOPK_HEAD].copy().view(np.float32)
    index, is_index_padded = _unpack_bits(
        body[TOPK_HEAD : _values_at(selected)], 12, selected
    )
    value, is_value_padded = _unpack_bits(body[_values_at(selected) :], 2, selected)
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


# The codec refuses NaN and infinity.
_quiet_difference = np.errstate(over="ignore", invalid="ignore")


@_quiet_difference
def difference(loaded: F32, local: F32, out: F32) -> None:
    """Let out = loaded - local."""
    np.subtract(loaded, local, out=out)


@_quiet_difference
def difference_fed(
    loaded: F32, local: F32, residual: F32, decay: float, out: F32
) -> None:
    """Let out = (loaded - local) + decay * residual."""
    for span in ranges(out.size):
        np.subtract(loaded[span], local[span], out=out[span])
        out[span] += residual[span] * np.float32(decay)


@_quiet_difference
def left_over(wanted: F32, sent: F32, residual: F32, lanes: F64) -> None:
    """Let residual = wanted - sent, and add the squares of `sent` to a norm's lanes."""
    np.subtract(wanted, sent, out=residual)
    sum_squares(sent, lanes)


# An overflow becomes infinite, as in the reference of `atoll.algorithm`.
_quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")


@_quiet
def accumulate(total: F32, x: F32) -> None:
    """Let total = flush(total + x)."""
    for span in ranges(total.size):
        total[span] += x[span]
        flush(total[span])


@_quiet
def accumulate_divided(total: F32, x: F32, by: float) -> None:
    """Let total = flush(flush(total + x) / by)."""
    accumulate(total, x)
    divide(total, by)


@_quiet
def accumulate_scaled(total: F32, x: F32, share: float) -> None:
    """Let total = flush(total + flush(share * x))."""
    for span in ranges(total.size):
        total[span] += flush(x[span] * np.float32(share))
        flush(total[span])


@_quiet
def divide(total: F32, by: float) -> None:
    """Let total = flush(total / by)."""
    for span in ranges(total.size):
        total[span] /= np.float32(by)
        flush(total[span])


@_quiet
def scale(total: F32, share: float) -> None:
    """Let total = flush(share * total)."""
    for span in ranges(total.size):
        total[span] *= np.float32(share)
        flush(total[span])


@_quiet
def sgd(anchor: F32, mean: F32, lr: float, share: float = 1.0) -> None:
    """Take the outer step of plain descent, by a share of the mean."""
    for span in ranges(anchor.size):
        _descend(anchor[span], flush(mean[span] * np.float32(share)), lr)


@_quiet
def heavy_ball(
    anchor: F32, velocity: F32, mean: F32, lr: float, momentum: float
) -> None:
    """Take the outer step of Polyak's momentum."""
    for span in ranges(anchor.size):
        _gather(velocity[span], flush(mean[span].copy()), momentum)
        _descend(anchor[span], velocity[span], lr)


@_quiet
def nesterov(
    anchor: F32,
    velocity: F32,
    mean: F32 | U16,
    lr: float,
    momentum: float,
    share: float = 1.0,
    is_first: bool = True,
    is_last: bool = True,
) -> int:
    """Take the outer step of Nesterov's momentum, delayed if a buffer is not filled.

    `mean` is fp32, or a bf16 body that is decoded on the way. Returns the index of its
    first number that is not finite, or -1; the state is then spoilt.
    """
    decay, ahead = momentum if is_first else 1.0, momentum if is_last else 0.0
    first_refused = -1
    for span in ranges(anchor.size):
        pull = _widened(mean[span])
        refused = first_not_finite(pull)
        if refused >= 0 > first_refused:
            first_refused = span.start + refused
        pull *= np.float32(share)
        flush(pull)
        _gather(velocity[span], pull, decay)
        pull += flush(velocity[span] * np.float32(ahead))
        _descend(anchor[span], flush(pull), lr)
    return first_refused


def _widened(mean: F32 | U16) -> F32:
    """Return a copy of fp32 numbers, or of bf16 numbers as fp32."""
    if mean.dtype == np.uint16:
        return (mean.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return mean.astype(np.float32)


@_quiet
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
    for span in ranges(anchor.size):
        fresh = flush(mean[span].copy())
        square = flush(flush(fresh * fresh) * np.float32(1.0 - float(beta2)))
        fresh = flush(fresh * np.float32(1.0 - float(beta1)))
        _gather(first[span], fresh, beta1)
        _gather(second[span], square, beta2)
        root = flush(np.sqrt(flush(second[span] / np.float32(correction2))))
        ratio = flush(first[span] / np.float32(correction1))
        ratio /= flush(root + np.float32(eps))
        _descend(anchor[span], flush(ratio), lr)


def _gather(velocity: F32, fresh: F32, momentum: float) -> None:
    velocity *= np.float32(momentum)
    flush(velocity)
    velocity += fresh
    flush(velocity)


def _descend(anchor: F32, direction: F32, lr: float) -> None:
    anchor += flush(direction * -np.float32(lr))
    flush(anchor)
