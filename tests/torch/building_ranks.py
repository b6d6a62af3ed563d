"""Two ranks that build a sharded model from a run, each its own rows."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import atoll.torch
from atoll.island import anchors


class Net(torch.nn.Module):
    """Two layers on a frozen base, a table, and a cache that is not saved."""

    cos: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 4).requires_grad_(False)
        self.first = torch.nn.Linear(4, 6)
        self.second = torch.nn.Linear(6, 3)
        self.register_buffer("table", torch.empty(3, dtype=torch.int64))
        self.register_buffer("cos", torch.arange(4).float().cos(), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(self.base(rows * self.cos)))
        return found


def live(rank: int, run: str, folder: str) -> None:
    """Build, and save what this rank has and how many bytes of weights it read."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    read: list[int] = []
    inner = anchors.AnchorWeights.read

    def counted(self: anchors.AnchorWeights, name: str, first: int, last: int):  # type: ignore[no-untyped-def]
        read.append(last - first)
        return inner(self, name, first, last)

    anchors.AnchorWeights.read = counted  # type: ignore[method-assign]

    def make() -> Net:
        net = Net()
        fully_shard(net.base, mesh=mesh)
        fully_shard(net.first, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    built = atoll.torch.build(make, run)
    state: dict[str, torch.Tensor] = {
        name: p.full_tensor()  # type: ignore[attr-defined]
        for name, p in built.named_parameters()
    }
    told = {
        **state,
        "table": built.table,
        "cos": built.cos,
        "read": torch.tensor(sum(read)),
    }
    save_file(told, Path(folder) / f"{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(live, args=tuple(sys.argv[1:3]), nprocs=2)  # type: ignore[no-untyped-call]
