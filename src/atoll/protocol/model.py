"""A model as its islands must agree on it, and the constants that a run can store.

A constant is identified by the digest of its bytes: equal constants are stored once, a
stored constant is never uploaded again, and bytes with another digest are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from atoll.errors import ModelError, UsageError
from atoll.settings import RunSettings

Role = Literal["parameter", "buffer", "constant"]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of the model, as all islands must have it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As numpy and torch spell it: float32, bfloat16, int64."""

    role: Role
    """parameter and buffer are carried; a constant is only compared."""

    digest: str = ""
    """Of a constant's bytes, in hex; empty for a tensor that is carried."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        digest = f" with digest {self.digest[:12]}" if self.digest else ""
        return f"{self.role} of shape {shape} and dtype {self.dtype}{digest}"


@dataclass(frozen=True)
class ModelSpec:
    """Every tensor of a model, in the model's own order."""

    tensors: tuple[TensorSpec, ...]

    def with_role(self, role: Role) -> tuple[TensorSpec, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.role == role)

    def require_same(self, run: ModelSpec) -> None:
        """Return when this island's model is the run's.

        Raises:
            ModelError: naming the first tensor that differs, and both sides.
        """
        for fact in _differences(self, run):
            raise ModelError(
                f"{fact} Build the model as the run's founder did, or start a new run."
            )


def _differences(island: ModelSpec, run: ModelSpec) -> Iterator[str]:
    own_tensors = {tensor.name: tensor for tensor in island.tensors}
    run_tensors = {tensor.name: tensor for tensor in run.tensors}
    for name, tensor in run_tensors.items():
        if name not in own_tensors:
            yield f"{name!r} is a {tensor} in the run, and absent from this island."
        elif own_tensors[name] != tensor:
            yield (
                f"{name!r} is a {tensor} in the run, and a {own_tensors[name]} in this "
                "island."
            )
    for name, tensor in own_tensors.items():
        if name not in run_tensors:
            yield f"{name!r} is a {tensor} in this island, and absent from the run."
    for index, (name, expected) in enumerate(
        zip(own_tensors, run_tensors, strict=False)
    ):
        if name != expected:
            yield (
                f"Tensor {index} is {expected!r} in the run, and {name!r} in this "
                "island: the order differs."
            )


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
"""The name of a dtype in safetensors, and the bytes of an element. A run stores no
constant of another dtype, because no file could deliver it to a user."""

_DIGEST = re.compile("[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return whether a text can be a constant's digest, and so name a file."""
    return _DIGEST.fullmatch(text) is not None


def bytes_of(constant: TensorSpec) -> int:
    """Return the size of a constant in bytes."""
    return DTYPES[constant.dtype][1] * math.prod(constant.shape)


def can_keep(constant: TensorSpec) -> bool:
    """Return whether a run can keep a tensor: a constant that has a size and a name."""
    is_known = constant.dtype in DTYPES and is_digest(constant.digest)
    return constant.role == "constant" and is_known


def keepable(model: ModelSpec) -> dict[str, TensorSpec]:
    """Return the constants of a model that a run can store, by digest."""
    return {tensor.digest: tensor for tensor in model.tensors if can_keep(tensor)}


def has(stored_digests: Collection[str], constant: TensorSpec) -> bool:
    """Return whether a run that keeps these digests has a constant.

    Every run has a constant without bytes.
    """
    return can_keep(constant) and (
        constant.digest in stored_digests or not bytes_of(constant)
    )


def to_bring(model: ModelSpec, settings: RunSettings) -> tuple[TensorSpec, ...]:
    """Return the constants that a founder brings.

    None of them, if `limits.max_constants_bytes` is 0.

    Raises:
        UsageError: they are more than the run keeps.
    """
    max_bytes = settings.limits.max_constants_bytes
    constants = tuple(
        constant for constant in keepable(model).values() if bytes_of(constant)
    )
    total = sum(map(bytes_of, constants))
    if max_bytes and total > max_bytes:
        raise UsageError(
            f"The model's constants take {total} bytes, above "
            f"limits.max_constants_bytes={max_bytes}. Raise it; or set it to 0, and "
            "the run keeps none: every island then brings its own."
        )
    return constants if max_bytes else ()


@dataclass(frozen=True)
class ConstantCatalogue:
    """The constants of a run's model, and which of them the run keeps."""

    constants: tuple[TensorSpec, ...]
    kept: tuple[str, ...]
    """Digests."""

    @classmethod
    def of(
        cls, model: ModelSpec | None, stored_digests: Collection[str]
    ) -> ConstantCatalogue:
        """Return the catalogue of a run's model; empty without a model."""
        constants = model.with_role("constant") if model else ()
        digests = {
            constant.digest for constant in constants if has(stored_digests, constant)
        }
        return cls(constants, tuple(sorted(digests)))

    @property
    def there(self) -> tuple[TensorSpec, ...]:
        """The constants that the run has."""
        return tuple(
            constant for constant in self.constants if has(self.kept, constant)
        )
