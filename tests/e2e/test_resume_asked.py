"""Islands that are asked to save: by an operator, or by the end of their machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import atoll
import atoll.torch
from atoll import RunSettings, checkpoint
from atoll.checkpoint import Policy
from atoll.cli.control import control
from atoll.run_client import Action
from atoll.torch import Island
from tests.e2e.stage import Stage, until

pytestmark = pytest.mark.torch


class Loop:
    """A model of one weight, trained one step at a time."""

    def __init__(self, run: str, directory: Path) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        extra = {"scheduler": self.scheduler}
        policy = Policy(directory, every_rounds=1000, extra=extra)
        self.island: Island = atoll.torch.join(
            self.model, self.optimizer, run, island="a", checkpoint=policy
        )

    def step(self) -> bool:
        """Make one inner step, and say that there is more to come."""
        self.model(torch.ones(1, 1)).sum().backward()
        self.island.report(tokens=1)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return False


@pytest.mark.parametrize("place", ["coordinator", "store"])
def test_an_operator_has_islands_save(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """`atoll control RUN save` makes a checkpoint, then calls what was given."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(stage.folder / "user"))
    monkeypatch.setenv("ATOLL_HEARTBEAT_S", "0.1")
    if place == "store":
        run = str(tmp_path / "bucket")
        atoll.init(run, RunSettings.from_dict({"sync": {"sync_every": 10_000}}))
    else:
        stage.settings = {"sync": {"sync_every": 10_000}}
        stage.serve()
        run = stage.url
    loop, saved = Loop(run, tmp_path / "saved"), []
    loop.island.on_save(lambda: saved.append(loop.island.inner_steps))
    with loop.island:
        loop.step()
        control(run, Action.SAVE)
        until("the island has saved", lambda: loop.step() or saved)
        found = checkpoint.newest(tmp_path / "saved")

    assert found is not None
    assert found.metadata["inner_steps"] == saved[0]


def test_sigterm_saves_before_the_island_leaves(tmp_path: Path) -> None:
    """The scheduler has stepped as often as the optimizer, in what is saved."""
    run = str(tmp_path / "bucket")
    atoll.init(run, RunSettings.from_dict({"sync": {"sync_every": 10_000}}))
    loop, saved = Loop(run, tmp_path / "saved"), []
    loop.island.on_save(lambda: saved.append(loop.island.inner_steps))
    with loop.island:
        while True:
            loop.step()
            if loop.island.inner_steps == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    assert saved == [4]
    again = Loop(run, tmp_path / "saved")
    assert again.scheduler.last_epoch == 4
    assert again.optimizer.param_groups[0]["lr"] == again.scheduler.get_last_lr()[0]
    assert again.island.inner_steps == 4
    again.island.leave()
