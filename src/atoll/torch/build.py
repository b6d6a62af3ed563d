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
from atoll.torch.model import ModelTensor, modules_of

M = TypeVar("M")

CHANGES = 10
"""Number of rounds that may end while the weights are read."""


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

    The model is constructed on the meta device, which allocates no memory, then
    materialised and filled: from `checkpoint`, if that has weights, else from the run,
    with the constants that its founder uploaded.
    Buffers that are not persistent are computed as the constructor did. Make the
    optimizer afterwards: materialising replaces parameters.

    Args:
        make_model: constructs a module, or this rank's `Stage` or stages of a
            pipeline; it may shard them by `fully_shard`. It is called twice where the
            constructor's own values are used: values that differ are random.
        run: as for `join`; None reads ATOLL_RUN, unless `source` or `checkpoint` has
            all of the weights.
        source: from a tensor's name to its values, which take precedence over the
            run's; None for a name that it does not know.
        checkpoint: a directory of checkpoints whose newest may have the weights.
        initialise: called last, for buffers that the constructor draws at random or
            does not make by operations of torch.

    Raises:
        UsageError: a tensor, which is named, has no values; or the weights are external
            and nothing provides them.
        ModelError: a tensor has another shape in its source.
    """
    built, empty = make_empty(make_model, _is_rest)
    targets, values = empty.targets, empty.values
    _materialise(built, targets, torch.device(device))
    put_attributes(empty, torch.device(device))
    filled, source_name = _fill(built, targets, run, source, checkpoint)
    _fill_counters(targets, filled, values)
    require_all(targets, filled, source_name=source_name)
    _initialise_rest(built, targets, values, initialise)
    return built


def _is_rest(target: ModelTensor) -> bool:
    """Return whether no run has a tensor: it is not persistent, or a counter."""
    is_count = not target.tensor.is_floating_point() and not target.tensor.dim()
    return not target.is_parameter and (not target.is_persistent or is_count)


@torch.no_grad()
def _materialise(
    built: object, targets: list[ModelTensor], device: torch.device
) -> None:
    """Allocate memory for every tensor; tied ones share it."""
    if any(_is_sharded(target.tensor) for target in targets):
        for module, _ in modules_of(built):  # type: ignore[arg-type]
            module.to_empty(device=device)
        for target in targets:
            target.refresh()
            if target.tensor.is_floating_point():
                target.tensor.fill_(float("nan"))
        return
    for target in targets:
        if target.tensor.is_meta:
            target.put(unwritten(target.tensor.detach(), device))
        else:
            target.put(target.tensor.detach().to(device))


def _is_sharded(tensor: torch.Tensor) -> bool:
    sharded = getattr(torch.distributed, "tensor", None)
    return sharded is not None and isinstance(tensor, sharded.DTensor)


def _fill(
    built: object,
    targets: list[ModelTensor],
    run: MemoryRun | str | None,
    source: Source | None,
    checkpoint: str | Path | None,
) -> tuple[set[str], str]:
    """Return the names that are filled now, and the name of their source."""
    filled: set[str] = set()
    sources: list[str] = []
    if checkpoint is not None and _fill_from_checkpoint(built, checkpoint):
        return {name for s in targets for name in s.names}, f"checkpoint {checkpoint}"
    if source is not None:
        filled, sources = fill_by(targets, source), ["source="]
    is_full = all(
        s.name in filled for s in targets if s.is_persistent and not _is_rest(s)
    )
    if run is None and (is_full or source is not None):
        return filled, "source="
    if checkpoint is not None and run is None:
        raise UsageError(
            f"The weights of the checkpoint in {checkpoint} are external: a run has "
            "them. Give that run, or a source= that has them."
        )
    missing = [target for target in targets if target.name not in filled]
    filled |= _fill_from_run(missing, run)
    missing = [t for t in missing if t.is_persistent and t.name not in filled]
    if not all(map(_is_rest, missing)):
        with constants_of(run) as constants:
            filled |= fill_from(missing, constants)
    return filled, " and ".join([*sources, "the run"])


def _fill_from_run(targets: list[ModelTensor], run: MemoryRun | str | None) -> set[str]:
    for _ in range(CHANGES):
        try:
            with weights_of(run) as weights:
                return fill_from(targets, weights)
        except AnchorChanged:
            continue  # read all tensors again, so that they are of one anchor
    raise UsageError(
        f"{CHANGES} rounds have ended while the weights were read. Pause the run, or "
        "build the model nearer to it."
    )


def _fill_from_checkpoint(built: object, checkpoint: str | Path) -> bool:
    """Load a checkpoint; False if its weights are external."""
    saved = newest(checkpoint)
    if saved is None:
        raise UsageError(f"There is no checkpoint in {checkpoint}.")
    if saved.weights == "external":
        return False
    modules = [module for module, _ in modules_of(built)]  # type: ignore[arg-type]
    model = modules[0] if len(modules) == 1 else modules
    load(checkpoint, {"model": model}, components=["model"])
    return True


@torch.no_grad()
def _fill_counters(
    targets: list[ModelTensor], filled: set[str], values: dict[str, torch.Tensor | None]
) -> None:
    """Fill counters, which no run has, with the constructor's values."""
    for target in targets:
        value = values.get(target.name)
        if target.is_persistent and target.name not in filled and value is not None:
            target.tensor.copy_(value)
            filled.update(target.names)


@torch.no_grad()
def _initialise_rest(
    built: M,
    targets: list[ModelTensor],
    values: dict[str, torch.Tensor | None],
    initialise: Callable[[M], object] | None,
) -> None:
    rest = [target for target in targets if not target.is_persistent]
    unknown: list[ModelTensor] = []
    for target in rest:
        value = values.get(target.name)
        if value is None:
            target.put(unwritten(target.tensor, target.tensor.device))
            unknown.append(target)
        else:
            target.put(value.to(target.tensor.device))
    before = [(target.tensor, target.tensor._version) for target in unknown]
    if initialise is not None:
        initialise(built)
    untouched = [
        target.name
        for target, (tensor, version) in zip(unknown, before, strict=True)
        if _is_untouched(target, tensor, version)
    ]
    if untouched:
        raise UsageError(
            f"{', '.join(map(repr, untouched[:8]))} is not persistent, and its "
            "constructor draws it at random, leaves it empty, or makes it by no "
            "operation of torch. Give initialise=, a function that gets the model and "
            "fills it."
        )


def _is_untouched(target: ModelTensor, tensor: torch.Tensor, version: int) -> bool:
    """Return whether a tensor was not written, or only in part."""
    target.refresh()
    is_same = target.tensor is tensor and tensor._version == version
    return is_same or has_no_value(target.tensor)


Source = Callable[[str], torch.Tensor | np.ndarray | None]
"""Returns the values of a tensor by its name in the model, or None."""


@torch.no_grad()
def fill_from(targets: list[ModelTensor], weights: RunWeights) -> set[str]:
    """Fill the tensors that the run has, and return the names that are filled now.

    A rank that holds rows of a tensor reads only those rows.

    Raises:
        ModelError: a tensor has another shape in the run.
    """
    filled: set[str] = set()
    order = {name: index for index, name in enumerate(weights.shapes)}
    present = [target for target in targets if _has_name_in(target, weights.shapes)]
    for target in sorted(present, key=lambda target: order[_name_in(target, order)]):
        name = _name_in(target, order)
        _require_shape(name, tuple(target.tensor.shape), weights.shapes[name])
        _fill_rows(target.tensor, name, weights)
        filled.update(target.names)
    return filled


@torch.no_grad()
def fill_by(targets: list[ModelTensor], source: Source) -> set[str]:
    """Fill from the caller's function, one whole tensor at a time."""
    filled: set[str] = set()
    for target in targets:
        array = next(
            (a for name in target.names if (a := source(name)) is not None), None
        )
        if array is None:
            continue
        value = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
        _require_shape(target.name, tuple(target.tensor.shape), tuple(value.shape))
        local, index = _local_part(target.tensor)
        local.copy_(value[index])
        filled.update(target.names)
    return filled


def require_all(
    targets: list[ModelTensor], filled: set[str], *, source_name: str
) -> None:
    """Raise unless every persistent tensor is filled.

    Raises:
        UsageError: some are not. The message has their names.
    """
    missing = [
        target
        for target in targets
        if target.is_persistent and target.name not in filled
    ]
    if not missing:
        return
    named = ", ".join(f"{target.name!r} ({_kind(target)})" for target in missing[:8])
    ellipsis = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    raise UsageError(
        f"{len(missing)} tensors of the model were not loaded from {source_name}: "
        f"{named}{ellipsis}. A run has the trained tensors, and the constants that its "
        "founder uploaded; give the rest with source=, a function from a name to a "
        "tensor."
    )


def _kind(target: ModelTensor) -> str:
    if not target.is_parameter:
        return "buffer"
    return "parameter" if target.tensor.requires_grad else "frozen"


def _has_name_in(target: ModelTensor, shapes: Mapping[str, object]) -> bool:
    return any(name in shapes for name in target.names)


def _name_in(target: ModelTensor, table: Mapping[str, object]) -> str:
    return next(name for name in target.names if name in table)


def _require_shape(
    name: str, model_shape: tuple[int, ...], source_shape: tuple[int, ...]
) -> None:
    if model_shape != source_shape:
        raise ModelError(
            f"{name!r} has shape {model_shape} here, and {source_shape} where it comes "
            "from. "
            "Build the model as the run's founder did."
        )


def _fill_rows(tensor: torch.Tensor, name: str, weights: RunWeights) -> None:
    """Fill this rank's part of a tensor, row after row."""
    local, index = _local_part(tensor)
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
    # torch.frombuffer needs writable memory, though nothing writes to it.
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    local.copy_(
        values.view(shape)[(slice(None), *index[1:])] if index else values.view(shape)
    )


def _local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return this rank's part of a tensor, and its index; () is the whole tensor."""
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
