"""The codecs of `wire` inside a compiled program: the same bits, as arrays.

An array keeps its shape in fp32 and bf16. The codecs with blocks flatten it, pad it
with zeros to whole blocks and return rows: `(..., blocks, elements of a block)`.
What no codec of the wire would encode, a NaN or an infinity, decodes to NaN: a program
cannot refuse, and must not hide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

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

Encoded = tuple[Array, ...]

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_POISON = E3M0_MAX_EXPONENT + 1


@dataclass(frozen=True)
class Codec:
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
        """Return what remains of an array of any shape once it is sent."""
        decoded = self.decode(self.encode(self.fold(x, lead=0)))
        return self.unfold(decoded, x.shape, lead=0)


def codec(name: str, *, key: str) -> Codec:
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
    """Return scales and codes: see `atoll.kernels.with_numpy.int8`."""
    largest = jnp.max(jnp.abs(rows), axis=-1)
    # XLA divides by one scalar by multiplying with its reciprocal: another number.
    scale = jnp.minimum(largest / _like(largest, 127.0), float(INT8_MAX_SCALE))
    scale = jnp.where(scale < TINY, 0.0, scale)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    divisor = jnp.where(scale == 0.0, 1.0, scale)[..., None]
    codes = jnp.clip(jnp.round(rows / _like(rows, divisor)), -127, 127)
    return scale, jnp.where(jnp.isnan(codes), 0.0, codes).astype(jnp.int8)


def _like(x: Array, value: Array | float) -> Array:
    """Return `value` as an array of which the compiler does not know that it is one."""
    return lax.optimization_barrier(jnp.broadcast_to(jnp.float32(value), x.shape))


def _int8_decode(encoded: Encoded) -> Array:
    scale, codes = encoded
    return flush(codes.astype(jnp.float32) * scale[..., None])


def _e3m0_encode(rows: Array) -> Encoded:
    """Return exponents and pairs of nibbles: see `atoll.kernels.with_numpy.e3m0`."""
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
    Codec("fp32", None, lambda x: (x,), lambda encoded: flush(encoded[0])),
    # As integers: a sum or a copy of bf16 may be widened on the way, these are not.
    Codec(
        "bf16",
        None,
        lambda x: (_nearest_bf16(_bits(x)),),
        lambda encoded: flush(_from_upper_half(encoded[0])),
    ),
    Codec("int8", INT8_BLOCK, _int8_encode, _int8_decode),
    Codec("e3m0", E3M0_BLOCK, _e3m0_encode, _e3m0_decode),
)
_BY_NAME = {each.name: each for each in _CODECS}
