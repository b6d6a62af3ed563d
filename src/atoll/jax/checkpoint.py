"""Values of JAX in a checkpoint: the adapter that `atoll.checkpoint` loads by name.

An array is written whole, regardless of its sharding, and is restored with the
sharding of the array that it replaces. A key of `jax.random` is its numbers and their
kind.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np

from atoll.checkpoint.arrays import Bytes, HostArray
from atoll.checkpoint.frameworks import (
    FrameworkAdapter,
    Keep,
    Ranks,
    RestoreContext,
    StateHolder,
    TreePath,
)
from atoll.errors import CorruptError, UsageError
from atoll.jax.model import copy_out, is_random_key, on_host, put_like, require_here

ARRAY = "!jax.array"
KEY = "!jax.key"

KINDS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_OF_KIND = {kind: jax.numpy.dtype(name) for name, kind in KINDS.items()}


class JaxArray:
    """An array on any devices of this process. Implements `Array`."""

    offset = None

    def __init__(self, array: jax.Array) -> None:
        self.kind = KINDS[array.dtype.name]
        self.shape = tuple(array.shape)
        self._array = array

    @property
    def identity(self) -> Hashable:
        return ("jax", id(self._array))

    def flat(self) -> Bytes:
        flat: Bytes = on_host(self._array).reshape(-1).view(np.uint8)
        return flat

    def copy_to(self, into: Bytes) -> None:
        target = into.view(self._array.dtype).reshape(self.shape)
        copy_out([(self._array, target)])


class JaxFace:
    """Implements `FrameworkAdapter`."""

    def encode(self, value: object, keep: Keep) -> tuple[str, object] | None:
        if not isinstance(value, jax.Array):
            return None
        require_here("the array", value)
        if is_random_key(value):
            numbers = jax.random.key_data(value)
            kind = str(jax.random.key_impl(value))
            return KEY, {"kind": kind, "data": keep(JaxArray(numbers))}
        if value.dtype.name not in KINDS:
            raise UsageError(
                f"an array of {value.dtype} cannot be saved. Known are "
                f"{', '.join(KINDS)}"
            )
        return ARRAY, keep(JaxArray(value))

    def decode(
        self, tag: str, body: object, path: TreePath, context: RestoreContext
    ) -> object:
        if tag == ARRAY and isinstance(body, str):
            return _array(context.source.read(body), context.like(path))
        if tag == KEY and isinstance(body, dict):
            kind, data = body.get("kind"), body.get("data")
            if isinstance(kind, str) and isinstance(data, str):
                numbers = _array(context.source.read(data), None)
                return jax.random.wrap_key_data(numbers, impl=kind)
        raise CorruptError(f"{tag[:40]!r} with {str(body)[:60]!r} is no value of JAX.")

    def holder(
        self, value: object, objects: Mapping[str, object]
    ) -> StateHolder | None:
        return None

    def random(self) -> StateHolder | None:
        return None  # JAX draws from keys that the program holds

    def ranks(self) -> Ranks | None:
        return None


def _array(saved: HostArray, template: Any) -> jax.Array:
    values = saved.flat().view(_OF_KIND[saved.kind]).reshape(saved.shape)
    is_alike = isinstance(template, jax.Array) and template.shape == values.shape
    if is_alike and template.dtype == values.dtype:
        return put_like(values, template)
    put: jax.Array = jax.device_put(values)
    if put.dtype != values.dtype:  # JAX casts silently
        raise UsageError(
            f"The checkpoint has an array of {values.dtype}, which JAX makes "
            f"{put.dtype} here. Enable x64, as where it was saved: jax_enable_x64."
        )
    return put


FACE: FrameworkAdapter = JaxFace()
