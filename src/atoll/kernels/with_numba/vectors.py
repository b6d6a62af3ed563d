"""Parts of the outer step written with vectors, where a compiler does not find them.

Each builds a few instructions of LLVM. A vector is one cache line, so that a turn of
the loop can fetch exactly one line of each array ahead; processors with shorter
registers use several. On arrays that are no multiple of a line, use the plain loops.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from atoll.kernels.layouts import TINY
from atoll.kernels.with_numba.building import every, larger

LINE = 16
"""fp32 elements of a vector."""

_AHEAD = 256
"""Elements between what is worked on and what is fetched."""

WRITES_AHEAD = 1024
"""The same for what is only written: its lines are fetched, and nobody guesses them."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_I128 = ir.IntType(128)
_FLOATS = ir.VectorType(ir.FloatType(), LINE)
_BITS = ir.VectorType(_I32, LINE)
_HALVES = ir.VectorType(_I16, LINE)
_WORDS = ir.VectorType(_I64, 8)

_STRIPES = 16
_SWAP = ir.Constant(ir.VectorType(_I32, 8), [1, 0, 3, 2, 5, 4, 7, 6])
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
            offset = builder.mul(loop.index, ir.Constant(_I64, LINE))
            step.take(builder.add(args[5], offset))
        return step.largest()

    given = (anchor, velocity, mean, lr, momentum, first, lines)
    return types.uint32(*given), build


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

    def take(self, at: Any) -> None:
        builder = self._builder
        ahead = builder.add(at, ir.Constant(_I64, _AHEAD))
        for array in self._arrays:
            _prefetch(builder, builder.gep(array, [ahead]))
        anchor_at, velocity_at, mean_at = (
            builder.gep(array, [at]) for array in self._arrays
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
        most = ir.Constant(_I32, 0)
        for lane in range(LINE):
            other = builder.extract_element(lanes, ir.Constant(_I32, lane))
            most = larger(builder, most, other)
        return most

    def _mean(self, at: Any) -> Any:
        builder = self._builder
        if self._is_half:
            half = builder.zext(_load(builder, at, _HALVES), _BITS)
            bits = builder.shl(half, every(_BITS, 16))
        else:
            bits = _load(builder, at, _BITS)
        magnitude = builder.and_(bits, every(_BITS, 0x7FFFFFFF))
        most = larger(builder, builder.load(self._largest), magnitude)
        builder.store(most, self._largest)
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
def absorb(typing: Any, lanes: Any, words: Any, at: Any, keys: Any, blocks: Any) -> Any:
    """Let the eight lanes of XXH3 take in blocks of 128 words, and scramble each."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes_at, words_at, keys_at = (
            make_array(signature.args[i])(context, builder, args[i]).data
            for i in (0, 1, 3)
        )
        state = alloca_once_value(builder, _load(builder, lanes_at, _WORDS))
        with for_range(builder, args[4]) as loop:
            start = builder.mul(loop.index, ir.Constant(_I64, 8 * _STRIPES))
            block = builder.gep(words_at, [builder.add(args[2], start)])
            after = _absorb_block(builder, builder.load(state), block, keys_at)
            builder.store(after, state)
        _store(builder, builder.load(state), lanes_at)
        return context.get_dummy_value()

    return types.void(lanes, words, at, keys, blocks), build


def _absorb_block(builder: Any, lanes: Any, block: Any, keys: Any) -> Any:
    for stripe in range(_STRIPES):
        data = _load(builder, _at(builder, block, 8 * stripe), _WORDS)
        keyed = builder.xor(data, _load(builder, _at(builder, keys, stripe), _WORDS))
        low = builder.and_(keyed, every(_WORDS, 0xFFFFFFFF))
        product = builder.mul(low, builder.lshr(keyed, every(_WORDS, 32)))
        swapped = builder.shuffle_vector(data, data, _SWAP)
        lanes = builder.add(builder.add(lanes, product), swapped)
    mixed = builder.xor(lanes, builder.lshr(lanes, every(_WORDS, 47)))
    last_key = _load(builder, _at(builder, keys, _STRIPES), _WORDS)
    return builder.mul(builder.xor(mixed, last_key), every(_WORDS, _SCRAMBLE))


@intrinsic
def fold_product(typing: Any, one: Any, other: Any) -> Any:
    """Return the upper half of a 128-bit product, xor its lower half."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.mul(*(builder.zext(arg, _I128) for arg in args))
        upper = builder.lshr(product, ir.Constant(_I128, 64))
        return builder.trunc(builder.xor(product, upper), _I64)

    return types.uint64(types.uint64, types.uint64), build


@intrinsic
def fetch_line(typing: Any, array: Any, at: Any) -> Any:
    """Have the line of element `at` fetched, which may lie past the end."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, args[0]).data
        _prefetch(builder, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, at), build


def _prefetch(builder: Any, place: Any) -> None:
    """Have a line fetched into the second cache; past the end it does nothing."""
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    call = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    how = [ir.Constant(_I32, number) for number in (0, 2, 1)]
    builder.call(call, [builder.bitcast(place, pointer), *how])


def _at(builder: Any, pointer: Any, index: int) -> Any:
    return builder.gep(pointer, [ir.Constant(_I64, index)])


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
        vector = builder.insert_element(vector, scalar, ir.Constant(_I32, lane))
    return vector
