"""Update, reduction and outer step of one piece of a parameter tree, in a program.

The sequences are those of `algorithm`; here they get their axes. `local` has the
islands first; the anchor has no such axis. A *folded* array has the shape that the
upload codec takes.

The codecs have the bits of those in `wire`, as arrays. An array keeps its shape in fp32
and bf16. The codecs with blocks flatten it, pad it with zeros to whole blocks and
return rows: `(..., blocks, elements of a block)`. NaN and infinity, which the codecs of
the wire refuse, decode to NaN: a program cannot refuse them, and must not hide them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from atoll.algorithm import adopt, compress, merge, outer
from atoll.algorithm.arithmetic import TINY, flush
from atoll.errors import UsageError
from atoll.kernels.layouts import (
    E3M0_BLOCK,
    E3M0_MAX_EXPONENT,
    E3M0_MIN_EXPONENT,
    E3M0_ZERO,
    INT8_BLOCK,
    INT8_MAX_SCALE,
)
from atoll.settings import RunSettings

MOST_CORRECTIONS = 65_536
MOST_ADAM_MOMENTUM = 0.9997
"""0.9997**65536 is below 2**-25: by then the correction is 1 in fp32."""


@dataclass(frozen=True)
class Cut:
    """How the reduction of a folded piece is spread over inner steps."""

    axis: int
    size: int
    """Elements along the axis that one inner step reduces."""

    length: int

    def start(self, age: Array) -> Array:
        """Return where the slice of this age starts; the last ones may overlap."""
        return jnp.minimum(age * self.size, self.length - self.size)


def cut(shape: tuple[int, ...], spec: tuple[object, ...], *, into: int) -> Cut:
    """Return how to cut a folded piece into slices of one size: with least to spare.

    Among axes that lie on no axis of the mesh, where there is one.
    """
    free = [i for i in range(len(shape)) if i >= len(spec) or spec[i] is None]
    axis = min(free or range(len(shape)), key=lambda i: -(-shape[i] // into) / shape[i])
    return Cut(axis, -(-shape[axis] // into), shape[axis])


class Law:
    """Sealing, merging, outer steps and adoption by the settings of a run."""

    def __init__(self, settings: RunSettings) -> None:
        _require_available(settings)
        self.up = codec(settings.wire.up, key="wire.up")
        self.down = codec(settings.wire.mean_codec, key="wire.down")
        self.feeds_back = settings.wire.error_feedback
        self.decay = settings.wire.error_feedback_decay
        self.outer = settings.outer
        self.sync = settings.sync
        self.rebases = settings.sync.adopt == "rebase" and settings.sync.overlap_steps
        self.num_velocities = {"sgd": 0, "adam": 2}.get(settings.outer.optimizer, 1)
        if settings.outer.optimizer == "adam":
            self._corrections = _corrections(settings.outer.momentum)

    def seal(
        self, anchor: Array, local: Array, residual: Array | None, dtype: str
    ) -> tuple[Encoded, Array | None]:
        """Return the islands' encoded updates of a piece, and the residuals."""
        loaded = cast(anchor, dtype)[None]
        pseudo = adopt.pseudo_gradient(loaded, local.astype(jnp.float32))
        if residual is None:
            return self.up.encode(self.up.fold(pseudo, lead=1)), None
        sent: list[Encoded] = []

        def roundtrip(wanted: Array) -> Array:
            sent.append(self.up.encode(self.up.fold(wanted, lead=1)))
            return self.up.unfold(self.up.decode(sent[0]), wanted.shape[1:], lead=1)

        _, lost = compress.seal(pseudo, residual, roundtrip, decay=self.decay)
        return sent[0], lost

    def merge(self, values: Array) -> Array:
        """Return one value of many, whose first axis is the islands' in their order."""
        flushed = flush(values)
        if self.outer.merge == "trimmed":
            return merge.trimmed(list(flushed))
        total = ordered_sum(flushed)
        return (
            total if len(values) == 1 else flush(total / _unfolded(len(values), total))
        )

    def step(
        self, anchor: Array, mean: Array, velocity: tuple[Array, ...], round_: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """Return anchor and velocity after the outer step of a round."""
        agreed = self.down.roundtrip(mean)
        change, velocity = self._change(agreed, velocity, round_)
        return outer.apply(anchor, change), velocity

    def adopt(self, anchor: Array, local: Array, at_seal: Array | None) -> Array:
        """Return the local weights once the outcome is known, in their own dtype."""
        now = local.astype(jnp.float32)
        if self.sync.adopt == "mix":
            agreed = jnp.broadcast_to(anchor, now.shape)
            moved = adopt.mix(agreed, now, keep_local=self.sync.keep_local)
        elif at_seal is None:
            moved = flush(jnp.broadcast_to(anchor, now.shape))
        else:
            moved = adopt.rebase(anchor[None], now, at_seal.astype(jnp.float32))
        return moved.astype(local.dtype)

    def _change(
        self, mean: Array, velocity: tuple[Array, ...], round_: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        lr, momentum = self.outer.lr, self.outer.momentum
        if self.outer.optimizer == "sgd":
            return outer.sgd(mean, lr=lr), ()
        if self.outer.optimizer == "adam":
            scalars = self._adam_scalars(round_, mean)
            first, second = velocity
            return outer.adam_step(
                mean,
                (first, second),
                lr=lr,
                momentum=momentum,
                scalars=scalars,
                sqrt=jnp.sqrt,
            )
        text = (
            outer.nesterov if self.outer.optimizer == "nesterov" else outer.heavy_ball
        )
        change, moved = text(mean, velocity[0], lr=lr, momentum=momentum)
        return change, (moved,)

    def _adam_scalars(self, round_: Array, template: Array) -> outer.AdamScalars:
        """Return the scalars of a round that is known only when the program runs."""
        table = jnp.asarray(self._corrections, jnp.float32)
        row = table[jnp.minimum(round_, len(self._corrections) - 1)]
        first, second = (_unfolded(value, template) for value in row)
        return outer.AdamScalars(outer.ADAM_BETA2, outer.ADAM_EPS, first, second)


def ordered_sum(values: Array) -> Array:
    """Return the sum along the first axis: the tree of `algorithm.merge`, by levels.

    Neighbours are added, then neighbours of these; a single one waits. That is the
    tree whose first half is the largest power of two below the number of values.
    """
    while (number := len(values)) > 1:
        paired = flush(values[0 : number - 1 : 2] + values[1:number:2])
        values = jnp.concatenate([paired, values[-1:]]) if number % 2 else paired
    return values[0]


def _unfolded(value: Array | float, template: Array) -> Array:
    """Return an array of one value that the compiler must take for any array.

    It divides by a scalar by multiplying with its reciprocal, which is another number
    in a third of all cases.
    """
    return lax.optimization_barrier(
        jnp.broadcast_to(jnp.float32(value), template.shape)
    )


def _corrections(momentum: float) -> list[tuple[float, float]]:
    """Return Adam's corrections of every outer step, until both are 1."""
    rows: list[tuple[float, float]] = []
    while not rows or (min(rows[-1]) < 1.0 and len(rows) < MOST_CORRECTIONS):
        scalars = outer.adam_corrections(momentum=momentum, count=len(rows) + 1)
        rows.append((scalars.correction1, scalars.correction2))
    return rows


def _require_available(settings: RunSettings) -> None:
    settings.require_synchronous("atoll.jax.diloco")
    settings.require_cut_data("atoll.jax.diloco")
    if settings.outer.merge == "radial":
        raise UsageError(
            "outer.merge='radial' needs norms of whole tensors in fp64, which a "
            "program of JAX does not have. Choose merge='mean' or 'trimmed'."
        )
    if settings.outer.weight != "uniform":
        raise UsageError(
            f"outer.weight={settings.outer.weight!r} has no meaning where all islands "
            "make the same inner steps. Choose weight='uniform'."
        )
    if settings.sync.dynamic_local_updates:
        raise UsageError(
            "sync.dynamic_local_updates=true has no meaning where all islands make the "
            "same inner steps. Remove it."
        )
    momentum = settings.outer.momentum
    if settings.outer.optimizer == "adam" and momentum > MOST_ADAM_MOMENTUM:
        raise UsageError(
            f"outer.momentum={momentum} with outer.optimizer='adam' is corrected for "
            f"more than {MOST_CORRECTIONS} rounds, which a program of JAX has no table "
            f"for. Choose at most {MOST_ADAM_MOMENTUM}."
        )


Encoded = tuple[Array, ...]

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_POISON = E3M0_MAX_EXPONENT + 1


@dataclass(frozen=True)
class TracedCodec:
    """One way to write fp32 values as smaller arrays; elementwise, or in blocks."""

    name: str
    block: int | None
    encode: Callable[[Array], Encoded]
    decode: Callable[[Encoded], Array]
    """Returns fp32 values, flushed."""

    def fold(self, x: Array, *, lead: int) -> Array:
        """Return `x` as this codec takes it; the first `lead` axes stay."""
        if self.block is None:
            return x if x.ndim > lead else x.reshape(*x.shape, 1)
        flat = x.reshape(*x.shape[:lead], -1)
        missing = -flat.shape[-1] % self.block
        padded = jnp.pad(flat, [(0, 0)] * lead + [(0, missing)])
        return padded.reshape(*x.shape[:lead], -1, self.block)

    def unfold(self, x: Array, shape: tuple[int, ...], *, lead: int) -> Array:
        """Return what `fold` was given, of this shape without the first axes."""
        if self.block is None:
            return x.reshape(*x.shape[:lead], *shape)
        flat = x.reshape(*x.shape[:lead], -1)
        return flat[..., : math.prod(shape)].reshape(*x.shape[:lead], *shape)

    def folded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that `fold` gives to an array of this one."""
        if self.block is None:
            return shape or (1,)
        return (-(-math.prod(shape) // self.block), self.block)

    def roundtrip(self, x: Array) -> Array:
        """Return an array of any shape as its receivers decode it."""
        decoded = self.decode(self.encode(self.fold(x, lead=0)))
        return self.unfold(decoded, x.shape, lead=0)


def codec(name: str, *, key: str) -> TracedCodec:
    """Return the codec that the setting `key` calls `name`.

    Raises:
        UsageError: it has no form inside a program.
    """
    if name not in _BY_NAME:
        raise UsageError(
            f"{key}={name!r} is not available inside a program of JAX. "
            f"Choose one of {', '.join(_BY_NAME)}."
        )
    return _BY_NAME[name]


def cast(x: Array, dtype: str) -> Array:
    """Return fp32 values as they are once loaded into `dtype`, in fp32 again.

    A plain conversion there and back is one that XLA may leave out.
    """
    if dtype == "float32":
        return x
    if dtype == "bfloat16":
        return _from_upper_half(_nearest_bf16(_bits(x)))
    return lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _floats(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _nearest_bf16(bits: Array) -> Array:
    """Return the upper halves after rounding to nearest, ties to even."""
    is_nan = (bits & _MAGNITUDE) > _INFINITY
    odd = (bits >> 16) & 1
    rounded = (bits + (odd + 0x7FFF)) >> 16
    return jnp.where(is_nan, (bits >> 16) | 0x40, rounded).astype(jnp.uint16)


def _from_upper_half(half: Array) -> Array:
    return _floats(half.astype(jnp.uint32) << 16)


def _int8_encode(rows: Array) -> Encoded:
    """Return scales and codes: see `atoll.kernels.with_numpy`."""
    largest = jnp.max(jnp.abs(rows), axis=-1)
    scale = jnp.minimum(largest / _unfolded(127.0, largest), float(INT8_MAX_SCALE))
    scale = jnp.where(scale < TINY, 0.0, scale)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    divisor = jnp.where(scale == 0.0, 1.0, scale)[..., None]
    codes = jnp.clip(jnp.round(rows / _unfolded(divisor, rows)), -127, 127)
    return scale, jnp.where(jnp.isnan(codes), 0.0, codes).astype(jnp.int8)


def _int8_decode(encoded: Encoded) -> Array:
    scale, codes = encoded
    return flush(codes.astype(jnp.float32) * scale[..., None])


def _e3m0_encode(rows: Array) -> Encoded:
    """Return exponents and pairs of nibbles: see `atoll.kernels.with_numpy`."""
    bits = _bits(rows)
    magnitude = bits & _MAGNITUDE
    exponent = ((magnitude + 0x400000) >> 23).astype(jnp.int32)
    largest = jnp.minimum(jnp.max(exponent, axis=-1), E3M0_MAX_EXPONENT)
    largest = jnp.where(largest < E3M0_MIN_EXPONENT, 0, largest)
    code = jnp.maximum(largest[..., None] - exponent, 0)
    is_zero = (code >= E3M0_ZERO) | (exponent < E3M0_MIN_EXPONENT)
    sign = (bits >> 31).astype(jnp.int32) << 3
    nibble = jnp.where(is_zero, E3M0_ZERO, code | sign).astype(jnp.uint8)
    is_poisoned = jnp.any(magnitude >= _INFINITY, axis=-1)
    head = jnp.where(is_poisoned, _POISON, largest).astype(jnp.uint8)
    return head, nibble[..., 0::2] | (nibble[..., 1::2] << 4)


def _e3m0_decode(encoded: Encoded) -> Array:
    head, packed = encoded
    nibble = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.int32)
    nibble = nibble.reshape(*packed.shape[:-1], -1)
    largest = head.astype(jnp.int32)[..., None]
    exponent = largest - (nibble & 7)
    bits = ((nibble >> 3) << 31) | (exponent << 23)
    is_zero = ((nibble & 7) == E3M0_ZERO) | (exponent < E3M0_MIN_EXPONENT)
    values = lax.bitcast_convert_type(jnp.where(is_zero, 0, bits), jnp.float32)
    return jnp.where(largest == _POISON, jnp.nan, values)


_CODECS = (
    TracedCodec("fp32", None, lambda x: (x,), lambda encoded: flush(encoded[0])),
    # As integers: a sum or a copy of bf16 may be widened on the way, these are not.
    TracedCodec(
        "bf16",
        None,
        lambda x: (_nearest_bf16(_bits(x)),),
        lambda encoded: flush(_from_upper_half(encoded[0])),
    ),
    TracedCodec("int8", INT8_BLOCK, _int8_encode, _int8_decode),
    TracedCodec("e3m0", E3M0_BLOCK, _e3m0_encode, _e3m0_decode),
)
_BY_NAME = {codec_.name: codec_ for codec_ in _CODECS}
