"""Real processes that form a gloo world, and the functions that they run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes

Act = Callable[[Path], None]


def in_world(size: int, folder: Path, *acts: Act) -> None:
    """Have `size` processes do each act in one gloo world; raise what one raises.

    Args:
        folder: the argument of every act.
        acts: functions of a module, which each process imports.
    """
    # Forked from a process that has imported torch and done nothing else: importing it
    # in every rank would take longer than all that they do.
    multiprocessing.set_forkserver_preload(["tests.checkpoint.worlds"])
    args = (size, acts, folder, folder / f"world-{uuid4().hex}")
    start_processes(  # type: ignore[no-untyped-call]
        _enter, args, nprocs=size, start_method="forkserver"
    )


def _enter(
    rank: int, size: int, acts: tuple[Act, ...], folder: Path, meeting: Path
) -> None:
    torch.set_num_threads(1)
    address = f"file://{meeting}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    for act in acts:
        act(folder)
    dist.destroy_process_group()


def network(seed: int) -> nn.Sequential:
    """Return a small model with shapes that no number of ranks divides."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def sharded(seed: int, shape: tuple[int, ...] = ()) -> nn.Module:
    """Return the small model as FSDP2 shards it over the world, or over a mesh."""
    model = network(seed)
    sizes = shape or (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model


def sharded_both_ways(seed: int) -> nn.Module:
    """Return a model of tensor parallel layers that FSDP2 shards once more, 2 by 2."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["shard"])
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Make some inner steps on data that every rank has alike."""
    for step in range(steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        model(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, wherever its pieces are."""
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return everything that training has changed, whole."""
    tensors = {name: whole(value) for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": whole(value) for name, value in state.items()}
    return tensors


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Assert that two states have the same bits."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
