"""Weights that come in, and the proof that all of them have come."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from atoll.errors import ModelError, UsageError
from atoll.island.anchors import Weights
from atoll.torch.build_places import Spot

Source = Callable[[str], torch.Tensor | np.ndarray | None]
"""Gives the values of a tensor by the model's name of it; None: it has none."""


@torch.no_grad()
def fill_from(spots: list[Spot], weights: Weights) -> set[str]:
    """Fill what a run carries or keeps, and return the names that have values now.

    A rank that holds rows of a tensor takes those rows, and no others.

    Raises:
        ModelError: a tensor has another shape in the run.
    """
    filled: set[str] = set()
    order = {name: place for place, name in enumerate(weights.shapes)}
    known = [spot for spot in spots if _name_in(spot, weights.shapes)]
    for spot in sorted(known, key=lambda each: order[_known_name(each, order)]):
        name = _known_name(spot, order)
        _require_shape(name, tuple(spot.tensor.shape), weights.shapes[name])
        _fill_rows(spot.tensor, name, weights)
        filled.update(spot.names)
    return filled


@torch.no_grad()
def fill_by(spots: list[Spot], source: Source) -> set[str]:
    """Fill from a function that the caller gave, one whole tensor at a time."""
    filled: set[str] = set()
    for spot in spots:
        given = next(
            (g for name in spot.names if (g := source(name)) is not None), None
        )
        if given is None:
            continue
        value = given if isinstance(given, torch.Tensor) else torch.from_numpy(given)
        _require_shape(spot.name, tuple(spot.tensor.shape), tuple(value.shape))
        local, index = _share(spot.tensor)
        local.copy_(value[index])
        filled.update(spot.names)
    return filled


def require_all(spots: list[Spot], filled: set[str], *, where: str) -> None:
    """Return when every persistent tensor has its values.

    Raises:
        UsageError: naming those that have none.
    """
    missing = [spot for spot in spots if spot.is_persistent and spot.name not in filled]
    if not missing:
        return
    named = ", ".join(f"{spot.name!r} ({_kind(spot)})" for spot in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    raise UsageError(
        f"{len(missing)} tensors of the model were not loaded from {where}: {named}"
        f"{more}. A run has what is trained, and the constants that its founder has "
        "brought; give the rest with source=, a function from a name to a tensor."
    )


def _kind(spot: Spot) -> str:
    if not spot.is_parameter:
        return "buffer"
    return "parameter" if spot.tensor.requires_grad else "frozen"


def _name_in(spot: Spot, shapes: Mapping[str, object]) -> bool:
    return any(name in shapes for name in spot.names)


def _known_name(spot: Spot, known: Mapping[str, object]) -> str:
    return next(name for name in spot.names if name in known)


def _require_shape(name: str, here: tuple[int, ...], there: tuple[int, ...]) -> None:
    if here != there:
        raise ModelError(
            f"{name!r} has shape {here} here, and {there} where it comes from. "
            "Build the model as the run's founder did."
        )


def _fill_rows(tensor: torch.Tensor, name: str, weights: Weights) -> None:
    """Fill a tensor, or what this rank holds of it, row after row."""
    local, index = _share(tensor)
    shape = weights.shapes[name]
    if not local.numel():
        return
    first, last = 0, math.prod(shape)
    rows = index[0] if index else slice(None)
    if shape and rows != slice(None):
        size = math.prod(shape[1:])
        first, last = rows.start * size, rows.stop * size
        shape = (rows.stop - rows.start, *shape[1:])
    dtype, data = weights.read(name, first, last)
    # A tensor needs memory that may be written, though nobody does.
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    local.copy_(
        values.view(shape)[(slice(None), *index[1:])] if index else values.view(shape)
    )


def _share(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return what this rank holds of a tensor, and which part that is; all is ()."""
    sharded = getattr(torch.distributed, "tensor", None)
    if sharded is None or not isinstance(tensor, sharded.DTensor):
        return tensor.data, ()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), tuple(
        slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True)
    )
