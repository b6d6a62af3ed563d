"""An island of several ranks that is killed goes on with its optimizer's moments."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import atoll
import atoll.torch
from atoll import RunSettings
from atoll.checkpoint import Policy
from tests.torch.processes import Group, run_groups

pytestmark = pytest.mark.torch

EVERY, ROUNDS = 4, 5


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    if kind == "ddp":
        return DistributedDataParallel(module)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return module


def live(rank: int, kind: str, run: str, directory: str, dies_at: int) -> Any:
    """Train until the run ends, or this rank kills itself."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    policy = Policy(directory, every_rounds=1, also={"scheduler": scheduler})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        island = atoll.torch.join(model, optimizer, run, island="a", checkpoint=policy)
    begun = island.inner_steps
    steps = [int(each["step"]) for each in optimizer.state.values()]
    with island:
        while True:
            model(torch.ones(2, 3)).square().mean().backward()
            island.report(tokens=1)
            if island.inner_steps == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            time.sleep(0.2)  # what computing takes
    said = [str(each.message) for each in told if "lost" in str(each.message)]
    return begun, steps, scheduler.last_epoch, island.inner_steps, island.round, said


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_that_were_killed_go_on(kind: str, tmp_path: Path) -> None:
    """Moments, learning rate and counts are those of the checkpoint."""
    run, directory = str(tmp_path / "bucket"), str(tmp_path / "saved")
    sync = {"sync_every": EVERY, "fragment_order": "by_size"}
    settings = {"run": {"end_rounds": ROUNDS}, "sync": sync}
    atoll.init(run, RunSettings.from_dict(settings))
    killed = run_groups(Group(live, (kind, run, directory, 10), ranks=2))
    assert all(isinstance(each, RuntimeError) for each in killed[0])
    ((first, second),) = run_groups(Group(live, (kind, run, directory, -1), ranks=2))

    begun, steps, epoch, made, round, lost = first
    assert begun == 2 * EVERY  # as far as the run has counted
    (saved,) = set(steps)
    assert saved in (EVERY, 2 * EVERY)  # the writing of the last may have died
    assert epoch - saved == made - begun - 1  # the last step ended the loop
    assert (made, round) == (ROUNDS * EVERY, ROUNDS)
    assert second[:5] == first[:5]
    assert len(lost) == 1
    assert "had made 10 inner steps. The run has counted 8" in lost[0]
    assert "2 inner steps with" in lost[0]
