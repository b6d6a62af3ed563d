"""A model's tensors as JSON: a row each of name, shape, dtype, role, digest."""

from __future__ import annotations

from typing import get_args

from atoll.errors import CorruptError
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.messages import Role

ROLES: tuple[Role, ...] = get_args(Role)


def model_to_json(model: ModelSpec) -> object:
    """Return what JSON can hold of a model's tensors, which is all of it."""
    return [
        [tensor.name, list(tensor.shape), tensor.dtype, tensor.role, tensor.digest]
        for tensor in model.tensors
    ]


def spec_from_json(value: object) -> ModelSpec:
    """Return the model that `value` describes, or raise CorruptError."""
    if not isinstance(value, list):
        raise CorruptError("the journal's model is no list of tensors.")
    return ModelSpec(tuple(_tensor(row) for row in value))


def _tensor(row: object) -> TensorSpec:
    match row:
        case [str(name), list(shape), str(dtype), role, str(digest)] if role in ROLES:
            sizes = tuple(size for size in shape if type(size) is int and size >= 0)
            if len(sizes) == len(shape):
                return TensorSpec(
                    name=name, shape=sizes, dtype=dtype, role=role, digest=digest
                )
    raise CorruptError(f"{row!r:.200} in the journal describes no tensor.")
