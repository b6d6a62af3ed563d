"""A model without initialisation: empty, then filled, then proven full.

The weights come from a function, a run or a checkpoint; `require_all` proves that every
persistent tensor was filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from atoll.checkpoint import load, newest
from atoll.errors import ModelError, UsageError
from atoll.exchange import MemoryRun
from atoll.island.run_reader import AnchorChanged, RunWeights, constants_of, weights_of
from atoll.torch.construction import has_no_value, make_empty, put_attributes, unwritten
from atoll.torch.model import Spot, modules_of

M = TypeVar("M")

CHANGES = 10
"""So often a round may end while the weights are read."""


def build(
    make_model: Callable[[], M],
    run: MemoryRun | str | None = None,
    *,
    device: str | torch.device = "cpu",
    source: Source | None = None,
    checkpoint: str | Path | None = None,
    initialise: Callable[[M], object] | None = None,
) -> M:
    """Return a model whose every persistent tensor has been loaded, and none drawn.

    The model is constructed on the meta device, which takes no memory, then
    materialised and filled: from `checkpoint`, if that has weights, else from the run,
    with the constants that its founder brought.
    Buffers that are not persistent are computed as the constructor did. Make the
    optimizer afterwards: materialising replaces parameters.

    Args:
        make_model: constructs a module, or this rank's `Stage` or stages of a
            pipeline; it may shard them by `fully_shard`. It is called twice where the
            constructor's own values are used: what differs was drawn.
        run: as for `join`; None reads ATOLL_RUN, unless `source` or `checkpoint` has
            all of the weights.
        source: from a tensor's name to its values, which win over the run's; None for
            a name that it does not know.
        checkpoint: a directory of checkpoints whose newest may have the weights.
        initialise: called at last, for buffers that the constructor draws at random or
            does not make of operations.

    Raises:
        UsageError: a tensor has no values, by name; or the weights are external and
            nothing gives them.
        ModelError: a tensor has another shape where it comes from.
    """
    built, made = make_empty(make_model, _is_rest)
    spots, values = made.spots, made.values
    _materialise(built, spots, torch.device(device))
    put_attributes(made, torch.device(device))
    filled, where = _fill(built, spots, run, source, checkpoint)
    _fill_counters(spots, filled, values)
    require_all(spots, filled, where=where)
    _initialise_rest(built, spots, values, initialise)
    return built


def _is_rest(spot: Spot) -> bool:
    """Return whether a tensor is not a run's: not persistent, or an island's count."""
    is_count = not spot.tensor.is_floating_point() and not spot.tensor.dim()
    return not spot.is_parameter and (not spot.is_persistent or is_count)


@torch.no_grad()
def _materialise(built: object, spots: list[Spot], device: torch.device) -> None:
    """Give every tensor memory, and each tied one the same."""
    if any(_is_sharded(spot.tensor) for spot in spots):
        for module, _ in modules_of(built):  # type: ignore[arg-type]
            module.to_empty(device=device)
        for spot in spots:
            spot.refresh()
            if spot.tensor.is_floating_point():
                spot.tensor.fill_(float("nan"))
        return
    for spot in spots:
        if spot.tensor.is_meta:
            spot.put(unwritten(spot.tensor.detach(), device))
        else:
            spot.put(spot.tensor.detach().to(device))


def _is_sharded(tensor: torch.Tensor) -> bool:
    sharded = getattr(torch.distributed, "tensor", None)
    return sharded is not None and isinstance(tensor, sharded.DTensor)


def _fill(
    built: object,
    spots: list[Spot],
    run: MemoryRun | str | None,
    source: Source | None,
    checkpoint: str | Path | None,
) -> tuple[set[str], str]:
    """Return the names that have their values now, and where they came from."""
    filled: set[str] = set()
    sources: list[str] = []
    if checkpoint is not None and _fill_from_checkpoint(built, checkpoint):
        return {name for s in spots for name in s.names}, f"checkpoint {checkpoint}"
    if source is not None:
        filled, sources = fill_by(spots, source), ["source="]
    is_full = all(
        s.name in filled for s in spots if s.is_persistent and not _is_rest(s)
    )
    if run is None and (is_full or source is not None):
        return filled, "source="
    if checkpoint is not None and run is None:
        raise UsageError(
            f"The weights of the checkpoint in {checkpoint} are external: it says that "
            "a run has them. Give that run, or a source= that has them."
        )
    left = [spot for spot in spots if spot.name not in filled]
    filled |= _fill_from_run(left, run)
    left = [s for s in left if s.is_persistent and s.name not in filled]
    if not all(map(_is_rest, left)):
        with constants_of(run) as constants:
            filled |= fill_from(left, constants)
    return filled, " and ".join([*sources, "the run"])


def _fill_from_run(spots: list[Spot], run: MemoryRun | str | None) -> set[str]:
    for _ in range(CHANGES):
        try:
            with weights_of(run) as weights:
                return fill_from(spots, weights)
        except AnchorChanged:
            continue  # all of it again, so that it is of one anchor
    raise UsageError(
        f"{CHANGES} rounds have ended while the weights were read. Pause the run, or "
        "build the model nearer to it."
    )


def _fill_from_checkpoint(built: object, checkpoint: str | Path) -> bool:
    """Load a checkpoint that has weights; False: it says that they are external."""
    found = newest(checkpoint)
    if found is None:
        raise UsageError(f"There is no checkpoint in {checkpoint}.")
    if found.weights == "external":
        return False
    modules = [module for module, _ in modules_of(built)]  # type: ignore[arg-type]
    model = modules[0] if len(modules) == 1 else modules
    load(checkpoint, {"model": model}, components=["model"])
    return True


@torch.no_grad()
def _fill_counters(
    spots: list[Spot], filled: set[str], values: dict[str, torch.Tensor | None]
) -> None:
    """Begin counts of an island's own, which no run has, as the constructor does."""
    for spot in spots:
        value = values.get(spot.name)
        if spot.is_persistent and spot.name not in filled and value is not None:
            spot.tensor.copy_(value)
            filled.update(spot.names)


@torch.no_grad()
def _initialise_rest(
    built: M,
    spots: list[Spot],
    values: dict[str, torch.Tensor | None],
    initialise: Callable[[M], object] | None,
) -> None:
    rest = [spot for spot in spots if not spot.is_persistent]
    unknown: list[Spot] = []
    for spot in rest:
        value = values.get(spot.name)
        if value is None:
            spot.put(unwritten(spot.tensor, spot.tensor.device))
            unknown.append(spot)
        else:
            spot.put(value.to(spot.tensor.device))
    before = [(spot.tensor, spot.tensor._version) for spot in unknown]
    if initialise is not None:
        initialise(built)
    left = [
        spot.name
        for spot, (tensor, version) in zip(unknown, before, strict=True)
        if _is_untouched(spot, tensor, version)
    ]
    if left:
        raise UsageError(
            f"{', '.join(map(repr, left[:8]))} is not persistent, and its constructor "
            "draws it at random, leaves it empty, or makes it of no operation of torch."
            " Give initialise=, a function that is given the model and fills it."
        )


def _is_untouched(spot: Spot, tensor: torch.Tensor, version: int) -> bool:
    """Return whether nobody has written a tensor, or not all of it."""
    spot.refresh()
    is_same = spot.tensor is tensor and tensor._version == version
    return is_same or has_no_value(spot.tensor)


Source = Callable[[str], torch.Tensor | np.ndarray | None]
"""Gives the values of a tensor by the model's name of it; None: it has none."""


@torch.no_grad()
def fill_from(spots: list[Spot], weights: RunWeights) -> set[str]:
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


def _fill_rows(tensor: torch.Tensor, name: str, weights: RunWeights) -> None:
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
