"""Which constants of a model a run can keep, and what they take.

A constant is known by the digest of its bytes: two that are equal are one, one that is
there is never brought twice, and whatever does not have its digest is not it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.protocol.messages import ModelSpec, TensorSpec
from atoll.settings import RunSettings

DTYPES = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}
"""What safetensors calls a dtype, and the bytes of an element. A run keeps no constant
of another dtype, because no file could give it to a user."""

_DIGEST = re.compile("[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return whether a text can be a constant's digest, and so name a file."""
    return _DIGEST.fullmatch(text) is not None


def bytes_of(constant: TensorSpec) -> int:
    """Return what a constant takes."""
    return DTYPES[constant.dtype][1] * math.prod(constant.shape)


def can_keep(constant: TensorSpec) -> bool:
    """Return whether a run can keep a tensor: a constant that has a size and a name."""
    is_known = constant.dtype in DTYPES and is_digest(constant.digest)
    return constant.role == "constant" and is_known


def keepable(model: ModelSpec) -> dict[str, TensorSpec]:
    """Return by digest what a run can keep of a model."""
    return {each.digest: each for each in model.tensors if can_keep(each)}


def has(kept: Collection[str], constant: TensorSpec) -> bool:
    """Return whether a run that keeps these digests has a constant.

    What takes no bytes is everywhere.
    """
    return can_keep(constant) and (constant.digest in kept or not bytes_of(constant))


def to_bring(model: ModelSpec, settings: RunSettings) -> tuple[TensorSpec, ...]:
    """Return the constants that a founder brings.

    None of them, if `limits.max_constants_bytes` is 0.

    Raises:
        UsageError: they are more than the run keeps.
    """
    most = settings.limits.max_constants_bytes
    constants = tuple(each for each in keepable(model).values() if bytes_of(each))
    total = sum(map(bytes_of, constants))
    if most and total > most:
        raise UsageError(
            f"The model's constants take {total} bytes, above "
            f"limits.max_constants_bytes={most}. Raise it; or set it to 0, and the run "
            "keeps none: every island then brings its own."
        )
    return constants if most else ()


@dataclass(frozen=True)
class Catalogue:
    """The constants of a run's model, and which of them the run keeps."""

    constants: tuple[TensorSpec, ...]
    kept: tuple[str, ...]
    """Digests."""

    @classmethod
    def of(cls, model: ModelSpec | None, kept: Collection[str]) -> Catalogue:
        """Return what a run has of its model; of no model, nothing."""
        constants = model.with_role("constant") if model else ()
        there = {each.digest for each in constants if has(kept, each)}
        return cls(constants, tuple(sorted(there)))

    @property
    def there(self) -> tuple[TensorSpec, ...]:
        """The constants that the run has."""
        return tuple(each for each in self.constants if has(self.kept, each))
