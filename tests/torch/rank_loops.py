"""What the processes of islands of several ranks do in tests: tiny models, plain loops.

Every loop is given its rank first, as `processes.Group` says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import atoll.torch
from atoll import RunSettings
from atoll.exchange import MemoryRun
from atoll.torch import Island, Stage

WIDTH = 6
ROWS = 4
"""Of one micro-batch."""


class Net(torch.nn.Module):
    """Two layers, of sizes that no number of ranks divides, and a buffer."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(WIDTH, hidden), torch.nn.Linear(hidden, 3)]
        )
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[1](torch.tanh(self.layers[0](rows)))
        return out


def net(seed: int = 0, hidden: int = 7) -> Net:
    torch.manual_seed(seed)
    return Net(hidden)


def rows_of(island: int, step: int, part: int) -> torch.Tensor:
    """Return the rows of one micro-batch."""
    seed = 1000 * island + 10 * step + part
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def wrapped(kind: str, model: Net, ranks: int) -> torch.nn.Module:
    """Return the model as a kind of island has it."""
    match kind:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp":
            _shard_all(model, init_device_mesh("cpu", (ranks,)))
        case "hsdp":
            shape = (2, ranks // 2)
            names = ("replicate", "shard")
            _shard_all(model, init_device_mesh("cpu", shape, mesh_dim_names=names))
        case "tp":
            shape = (ranks // 2, 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            _shard_all(model, mesh["dp"])
        case "cube":
            axes = ("replicate", "dp", "tp")
            mesh = init_device_mesh("cpu", (1, ranks, 1), mesh_dim_names=axes)
            plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            _shard_all(model, mesh["replicate", "dp"])
    return model


def _shard_all(model: Net, mesh: Any) -> None:
    for part in model.layers:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def settings(rounds: int, **tables: dict[str, Any]) -> RunSettings:
    """Return settings of a run that ends by itself."""
    given: dict[str, dict[str, Any]] = {
        "run": {"end_rounds": rounds},
        "sync": {"sync_every": 3},
        "wire": {"up": "bf16", "down": "bf16"},
        "outer": {"lr": 0.7, "momentum": 0.5},
    }
    for name, table in tables.items():
        given[name] = given.get(name, {}) | table
    return RunSettings.from_dict(given)


def place_of(run: str | RunSettings) -> str | MemoryRun:
    """Return the run; one that is given by its settings is this process's own."""
    return MemoryRun(run) if isinstance(run, RunSettings) else run


def told(island: Island) -> dict[str, Any]:
    """Return what a test looks at."""
    return {
        "digest": island.digest,
        "round": island.round,
        "inner_steps": island.inner_steps,
        "tokens": island.metrics()["atoll/tokens"],
        "name": island.name,
        "seed": island.seed,
        "place": island.place,
    }


def train(
    rank: int,
    kind: str,
    ranks: int,
    number: int,
    run: str | RunSettings,
    name: str,
    hidden: int = 7,
    seed: int | None = None,
) -> dict[str, Any]:
    """Train until the run ends. One process alone takes all ranks' micro-batches."""
    whole = net(number if seed is None else seed, hidden)
    model = wrapped(kind, whole, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with atoll.torch.join(model, optimizer, place_of(run), island=name) as island:
        part, parts = island.place if kind != "alone" else (0, ranks)
        mine = [part] if kind != "alone" else range(parts)
        for step in steps():
            for each in mine:
                loss = model(rows_of(number, step, each)).square().mean()
                (loss / len(mine)).backward()
            see(model, part)
            island.report(tokens=ROWS * len(mine), loss=loss)
            last = float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
    return told(island) | {"loss": last}


def train_by_tokens(rank: int, run: RunSettings, name: str) -> list[float]:
    """Train two ranks on batches of different sizes; return the rate of each step."""
    model = wrapped("ddp", net(), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    rates = []
    with atoll.torch.join(model, optimizer, place_of(run), island=name) as island:
        scheduler = atoll.torch.WSD(optimizer, island, unit="tokens", warmup=100)
        for step in steps():
            rates.append(float(scheduler.get_last_lr()[0]))
            model(rows_of(0, step, rank)).square().mean().backward()
            island.report(tokens=ROWS + 2 * rank)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return rates


def see(model: torch.nn.Module, part: int) -> None:
    """Change the buffer, on every rank otherwise: the first one's is the model's."""
    for buffer in model.buffers():
        buffer += 1.0 + part


def steps() -> Iterator[int]:
    """Count inner steps; whoever counts too long is not told that its run has ended."""
    yield from range(10_000)
    raise AssertionError("the run does not end")


class First(torch.nn.Module):
    """The first stage of a `Net`."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        self.layer = whole.layers[0]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(rows))


class Last(torch.nn.Module):
    """Its second stage."""

    def __init__(self, whole: Net) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({"1": whole.layers[1]})
        self.seen: torch.Tensor
        self.register_buffer("seen", whole.seen)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers["1"](hidden)
        return out


def stage(rank: int, seed: int, hidden: int = 7) -> Stage:
    """Return the stage of a rank: one has names of its own, the other the model's."""
    whole = net(seed, hidden)
    if rank == 0:
        names = {"layer.": "layers.0."}
        return Stage(module=First(whole), index=0, num_stages=2, names=names)
    return Stage(module=Last(whole), index=1, num_stages=2)


def train_pipeline(
    rank: int,
    number: int,
    run: str | RunSettings,
    name: str,
    hidden: int = 7,
    seed: int | None = None,
) -> dict[str, Any]:
    """Train a pipeline of two stages until the run ends, a micro-batch at a time."""
    part = stage(rank, number if seed is None else seed, hidden)
    optimizer = torch.optim.AdamW(part.module.parameters(), lr=0.01)
    with atoll.torch.join(part, optimizer, place_of(run), island=name) as island:
        for step in steps():
            send_through(rank, part.module, rows_of(number, step, 0), hidden)
            see(part.module, 0)
            island.report(tokens=ROWS)
            optimizer.step()
            optimizer.zero_grad()
    return told(island)


def send_through(
    rank: int, module: torch.nn.Module, rows: torch.Tensor, width: int
) -> None:
    """Go forward and back through both stages."""
    if rank == 0:
        hidden = module(rows)
        gradient = torch.empty_like(hidden)
        dist.send(hidden.detach(), 1)
        dist.recv(gradient, 1)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(ROWS, width)
        dist.recv(hidden, 0)
        hidden.requires_grad_()
        module(hidden).square().mean().backward()
        assert hidden.grad is not None
        dist.send(hidden.grad, 0)


class Tied(torch.nn.Module):
    """A model whose output weights are its input weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok = torch.nn.Linear(WIDTH, 5, bias=False)
        self.head = torch.nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.tok(rows) @ torch.ones(5, WIDTH))
        return out


class Head(torch.nn.Module):
    """The last stage of a `Tied`, with a copy of the weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, 5, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(Tied(seed).tok.weight)


class Token(torch.nn.Module):
    """Its first stage."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.tok = Tied(seed).tok


def train_tied(rank: int, run: str | RunSettings) -> dict[str, Any]:
    """Train a tied pipeline: both copies take the sum of both gradients."""
    if rank == 0:
        part = Stage(module=Token(0), index=0, num_stages=2)
    else:
        ties = {"head.weight": "tok.weight"}
        part = Stage(module=Head(0), index=1, num_stages=2, ties=ties)
    (weight,) = part.module.parameters()
    optimizer = torch.optim.SGD([weight], lr=0.01)
    with atoll.torch.join(part, optimizer, place_of(run), island="a") as island:
        for step in steps():
            whole = Tied(0)
            whole.tok.weight.data.copy_(weight.data)
            whole(rows_of(0, step, 0)).square().mean().backward()
            weight.grad = whole.tok.weight.grad
            optimizer.step()
    return told(island) | {"weights": weight.detach().tolist()}


def train_tied_whole(rank: int, run: str | RunSettings) -> dict[str, Any]:
    """Train the same in one process."""
    model = Tied(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with atoll.torch.join(model, optimizer, place_of(run), island="a") as island:
        for step in steps():
            model(rows_of(0, step, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return told(island) | {"weights": model.tok.weight.detach().tolist()}


def look(rank: int, kind: str, ranks: int) -> dict[str, Any]:
    """Look at the anchor in every way that a loop can, in the middle of a window."""
    model = wrapped(kind, net(0), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = settings(9, wire={"up": "fp32", "down": "fp32"}, run={"max_islands": 2})
    with atoll.torch.join(model, optimizer, place_of(run)) as island:
        for step in range(5):
            model(rows_of(0, step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = values_of(model)
        with island.evaluating() as at:
            loss = float(model(rows_of(0, 99, 0)).square().mean().detach())
            shown = values_of(model)
        after = values_of(model)
        anchor = {name: value.tolist() for name, value in island.anchor().items()}
        island.sync_now()
        synced = island.round
        rows = list(atoll.torch.shard(list(range(20)), island))
        dealt = list(atoll.torch.shard(iter(range(20)), island))
    return {
        "round": at.round,
        "loss": loss,
        "is_restored": before == after,
        "differs": before != shown,
        "anchor": anchor,
        "synced": synced,
        "rows": rows,
        "dealt": dealt,
    }


def values_of(model: torch.nn.Module) -> list[list[float]]:
    """Return all weights, gathered if they are sharded."""
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().tolist()
        for p in model.parameters()
    ]


def wait_long(rank: int, ranks: int, url: str, told_at: str) -> dict[str, Any]:
    """Train beside an island that comes only when the leader has waited for long."""
    model = wrapped("ddp", net(1), ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.torch.join(model, optimizer, url, island="a") as island:
        if rank == 0:
            Path(told_at).touch()
        for step in steps():
            model(rows_of(0, step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return told(island) | {"wait_s": island.metrics()["atoll/wait_s"]}


def come_late(rank: int, url: str, told_at: str, late_s: float) -> dict[str, Any]:
    """Join when the others have waited for so long."""
    while not Path(told_at).exists():
        time.sleep(0.05)
    time.sleep(late_s)
    return train(rank, "alone", 1, 2, url, "b")
