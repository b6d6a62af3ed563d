"""Two ranks that build a sharded model from a run, each its own rows."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import atoll.torch
from atoll.island import run_reader


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
        output: torch.Tensor = self.second(self.first(self.base(rows * self.cos)))
        return output


def build_rank(rank: int, run: str) -> tuple[dict[str, list[float]], int]:
    """Build, and return every tensor's values and the number of elements read."""
    mesh = init_device_mesh("cpu", (2,))
    element_counts: list[int] = []
    read = run_reader.AnchorWeights.read

    def counted(self: run_reader.AnchorWeights, name: str, first: int, last: int):  # type: ignore[no-untyped-def]
        element_counts.append(last - first)
        return read(self, name, first, last)

    run_reader.AnchorWeights.read = counted  # type: ignore[method-assign]

    def make() -> Net:
        net = Net()
        fully_shard(net.base, mesh=mesh)
        fully_shard(net.first, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    built = atoll.torch.build(make, run)
    tensors: dict[str, torch.Tensor] = {
        name: p.full_tensor()  # type: ignore[attr-defined]
        for name, p in built.named_parameters()
    }
    tensors |= {"table": built.table, "cos": built.cos}
    values = {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
    return values, sum(element_counts)
