"""The kind of parallelism of a model: the ranks of its island, and the role of each.

A plain module is an island of one process, also inside a world of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from atoll.errors import ModelError, UsageError
from atoll.torch.model import Stage

KNOWN_MESHES = (
    "one dimension (FSDP2), two of which the first replicates (HSDP), or two of which "
    "the second is tensor parallel"
)


@dataclass(frozen=True, eq=False)
class RankGroup:
    """The ranks of an island, and the stages that this rank holds."""

    ranks: tuple[int, ...]
    """In the world of torch.distributed; the first is the leader."""

    timeout: timedelta
    """Of the group that the model trains with."""

    stages: tuple[Stage, ...]
    """The stages on this rank; a model that is no pipeline is its only stage."""

    has_own_data: bool
    """Whether the tokens of this rank are added to those of the others."""


def rank_group_of(model: torch.nn.Module | Stage | Sequence[Stage]) -> RankGroup | None:
    """Return the ranks that train a model, or None: this process alone.

    Raises:
        UsageError: its kind of parallelism is not supported. The message has it.
    """
    if isinstance(model, torch.nn.Module):
        module = unwrapped(model)
        _refuse_unknown(module)
        return _group_of_module(module)
    stages = (model,) if isinstance(model, Stage) else tuple(model)
    if not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise UsageError(
            f"model={model!r} is neither a module nor stages of a pipeline. "
            "Pass a torch.nn.Module, an atoll.torch.Stage or a list of them."
        )
    return _group_of_stages(stages)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside torch.compile's wrappers."""
    while isinstance(inner := module._modules.get("_orig_mod"), torch.nn.Module):
        module = inner
    return module


def mesh_of(module: torch.nn.Module) -> DeviceMesh | None:
    """Return the largest mesh that parameters lie on.

    Raises:
        ModelError: a parameter has a mesh or a placement that is not supported.
    """
    largest: DeviceMesh | None = None
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            _require_known(name, mesh, parameter.placements)
            if largest is None or mesh.ndim > largest.ndim:
                largest = mesh
    return largest


def is_tensor_parallel(module: torch.nn.Module) -> bool:
    """Return whether ranks of the mesh's second dimension train on the same data."""
    mesh = mesh_of(module)
    if mesh is None or mesh.ndim < 2:
        return False
    return not all(
        isinstance(parameter.placements[0], Replicate)
        for parameter in module.parameters()
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == mesh.ndim
    )


def _group_of_module(module: torch.nn.Module) -> RankGroup | None:
    stage = Stage(module=_inner(module), index=0, num_stages=1)
    if isinstance(module, DistributedDataParallel):
        group = module.process_group
        ranks = tuple(dist.get_process_group_ranks(group))
        return _rank_group(ranks, _timeout_of(group), (stage,))
    mesh = mesh_of(module)
    if mesh is None:
        return None
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    timeout = _timeout_of(mesh.get_group(0))
    return _rank_group(ranks, timeout, (stage,))


def _group_of_stages(stages: tuple[Stage, ...]) -> RankGroup:
    if not dist.is_initialized():
        raise UsageError(
            "A stage of a pipeline is one of several ranks, and torch.distributed is "
            "not initialised. Call torch.distributed.init_process_group first."
        )
    for stage in stages:
        _refuse_unknown(unwrapped(stage.module))
    group = stages[0].group or dist.group.WORLD
    assert group is not None
    ranks = tuple(dist.get_process_group_ranks(group))
    inner = tuple(
        replace(stage, module=_inner(unwrapped(stage.module))) for stage in stages
    )
    return _rank_group(ranks, _timeout_of(group), inner)


def _rank_group(
    ranks: tuple[int, ...], timeout: timedelta, stages: tuple[Stage, ...]
) -> RankGroup:
    has_first = any(stage.index == 0 for stage in stages)
    return RankGroup(
        ranks=tuple(sorted(ranks)),
        timeout=timeout,
        stages=stages,
        has_own_data=has_first and all(_has_own_data(stage.module) for stage in stages),
    )


def _has_own_data(module: torch.nn.Module) -> bool:
    if not is_tensor_parallel(module):
        return True
    mesh = mesh_of(module)
    return mesh is not None and mesh.get_local_rank(1) == 0


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    if isinstance(module, DistributedDataParallel):
        inner: torch.nn.Module = unwrapped(module.module)
        return inner
    return module


def _refuse_unknown(module: torch.nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FullyShardedDataParallel):
            raise UsageError(
                "The model is wrapped in FullyShardedDataParallel (FSDP1), whose flat "
                "parameters have no separate names. Use "
                "torch.distributed.fsdp.fully_shard (FSDP2)."
            )
        if isinstance(part, DataParallel):
            raise UsageError(
                "The model is wrapped in torch.nn.DataParallel. Use "
                "DistributedDataParallel, one process per device."
            )
    has_mesh = any(isinstance(param, DTensor) for param in module.parameters())
    inner = _inner(module)
    if has_mesh and inner is not module:
        raise UsageError(
            "The model is in DistributedDataParallel and holds DTensors. Use "
            "fully_shard with a mesh of two dimensions (HSDP) instead."
        )
    if has_mesh and not isinstance(module, FSDPModule):
        raise UsageError(
            f"{type(module).__name__} holds DTensors, and the model as a whole is not "
            "fully_shard'ed: gradients of the rest would differ from rank to rank. "
            "Call fully_shard on the whole model last."
        )


def _require_known(
    name: str, mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    named = f"{name!r} lies on the mesh {_mesh_name(mesh)} as {_shown(placements)}"
    if mesh.ndim > 2:
        raise ModelError(
            f"{named}. Known are meshes of {KNOWN_MESHES}. Use one of these inside the "
            "island, and more islands instead of the other dimensions."
        )
    for placement in placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise ModelError(
                f"{named}. Known are Shard and Replicate: reduce it before joining."
            )
    if not isinstance(placements[-1 if mesh.ndim == 1 else 0], Shard | _StridedShard):
        is_hybrid = mesh.ndim == 2 and isinstance(placements[1], Shard | _StridedShard)
        if not is_hybrid:
            raise ModelError(
                f"{named}, and no dimension shards it. Known are meshes of "
                f"{KNOWN_MESHES}."
            )


def _mesh_name(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or tuple(f"dim{axis}" for axis in range(mesh.ndim))
    sizes = mesh.mesh.shape
    return "(" + ", ".join(f"{n}={s}" for n, s in zip(names, sizes, strict=True)) + ")"


def _shown(placements: Sequence[Placement]) -> str:
    return ", ".join(str(placement) for placement in placements)


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backend = group._get_backend(group._device_types[0])
    timeout: timedelta = backend.options._timeout
    return timeout
