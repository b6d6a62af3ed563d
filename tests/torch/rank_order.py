"""Islands of several ranks in a run that deals out its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import atoll.torch
from atoll import RunSettings
from atoll.errors import AtollError
from atoll.exchange import MemoryRun
from tests.torch.rank_loops import net, wrapped

NUM_ROWS, BATCH = 90, 4


def dealing_run() -> MemoryRun:
    return MemoryRun(
        RunSettings.from_dict(
            {
                "sync": {"sync_every": 3},
                "data": {"order": "run", "unit_rows": 16, "seed": 1},
            }
        )
    )


def train(rank: int, kind: str, num_workers: int) -> dict[str, Any]:
    """Train until the data ends; return this rank's rows, and those that counted."""
    run = dealing_run()
    module = wrapped(kind, net(0), 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    seen: list[int] = []
    numbers = torch.arange(NUM_ROWS)
    loader = DataLoader(
        TensorDataset(numbers), batch_size=BATCH, num_workers=num_workers
    )
    with atoll.torch.join(module, optimizer, run, island="a") as island:
        for (batch,) in atoll.torch.shard(loader, island):
            seen += batch.tolist()
            module(torch.ones(BATCH, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = island.inner_steps
    return {"rows": seen, "steps": steps, "counted": _counted(run) if not rank else []}


def _counted(run: MemoryRun) -> list[tuple[int, int]]:
    """Return the turns of each counted update."""
    from tests.torch.test_run_order import spans_of

    return [span for _, spans in spans_of(run) for span in spans]


def train_on_other_data(rank: int) -> str:
    """Return the error of ranks whose datasets have other lengths."""
    module = wrapped("ddp", net(0), 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    try:
        with atoll.torch.join(module, optimizer, dealing_run(), island="a") as island:
            atoll.torch.shard(list(range(NUM_ROWS + rank)), island)
    except AtollError as exc:
        return str(exc)
    return ""


def train_without_rank_1(rank: int) -> str:
    """Return the error of an island one rank of which does not shard."""
    module = wrapped("ddp", net(0), 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    try:
        with atoll.torch.join(module, optimizer, dealing_run(), island="a") as island:
            if rank == 0:
                atoll.torch.shard(list(range(NUM_ROWS)), island)
            optimizer.step()
    except AtollError as exc:
        return str(exc)
    return ""
