"""What is reduced, as a run sees it: one fragment per module, and one for parcels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from atoll.errors import UsageError
from atoll.protocol import ModelSpec, TensorSpec
from atoll.settings import RunSettings
from atoll.weights import FragmentLayout, lay_out

PARCEL = "parcel"
"""The tensor in which states travel from island to island; see `parcels`."""

SMALLEST_PARCEL, LARGEST_PARCEL = 2**14, 2**24
"""In elements. A parcel of a large model is as large as its largest fragment."""


def spec_of(modules: Sequence[torch.nn.Module]) -> ModelSpec:
    """Return the model of a run that reduces these modules, one after the other.

    Raises:
        UsageError: there is nothing to reduce, or a parameter is sharded.
    """
    tensors = [
        _spec(f"fragments.{number}.{name}", parameter)
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    ]
    sizes = [sum(p.numel() for p in module.parameters()) for module in modules]
    if not sizes or 0 in sizes:
        raise UsageError(
            f"reduces={list(modules)!r} must be modules with parameters. Pass the list "
            "that DiLoCo gets, or [model] for LocalSGD."
        )
    elements = min(max(*sizes, SMALLEST_PARCEL), LARGEST_PARCEL)
    parcel = TensorSpec(name=PARCEL, shape=(elements,), dtype="float32", role="buffer")
    return ModelSpec((*tensors, parcel))


def layout_of(
    model: ModelSpec, settings: RunSettings
) -> tuple[tuple[FragmentLayout, ...], FragmentLayout]:
    """Return the fragments in the order of the modules, and that of the parcels."""
    *fragments, parcel = lay_out(model, settings)
    assert parcel.is_buffers
    for number, fragment in enumerate(fragments):
        at_home = f"fragments.{number}."
        assert all(tensor.name.startswith(at_home) for tensor in fragment.tensors)
    return tuple(fragments), parcel


def _spec(name: str, parameter: torch.Tensor) -> TensorSpec:
    if isinstance(parameter, DTensor):
        raise UsageError(
            f"{name!r} is sharded over the processes of an island, and this "
            "integration is for islands of one process. Use atoll.torch.join."
        )
    return TensorSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        role="parameter",
    )
