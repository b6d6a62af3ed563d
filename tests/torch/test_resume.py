"""`join(..., checkpoint=...)`: a plain loop that is killed and started again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll.torch
from atoll.checkpoint import COMPONENTS, Policy
from atoll.errors import AtollWarning, UsageError
from atoll.exchange import MemoryRun
from atoll.torch import Island
from tests.torch.networks import networks
from tests.torch.runs import bits, run_of

pytestmark = pytest.mark.torch

EVERY = 4
STEPS = 22


class Rows:
    """Data with a cursor: row n is a function of n."""

    def __init__(self) -> None:
        self.next = 0
        self.seen: list[int] = []

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> torch.Tensor:
        row, self.next = self.next, self.next + 1
        self.seen.append(row)
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(row))

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Killed(BaseException):
    """Stands for the end of a process."""


def die(island: Island) -> None:
    """End a life as a kill does: what was not being written is not saved."""
    checkpointing = island._checkpointing
    assert checkpointing is not None
    island._detach()
    island._handle.host.leave(depart=False)
    checkpointing._saver.__exit__(Killed, Killed(), None)


class Loop:
    """One start of a training script."""

    def __init__(self, run: MemoryRun, directory: Path, **policy: Any) -> None:
        self.run, self.directory, self.policy = run, directory, policy
        self.model = torch.nn.Sequential(*networks(1), torch.nn.Dropout(0.3))
        torch.manual_seed(5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1.0 / (1 + step)
        )
        self.rows = Rows()

    def run_until(self, steps: int) -> None:
        """Train up to an inner step of all lives, then die."""
        extra = {"scheduler": self.scheduler, "data": self.rows}
        policy = Policy(self.directory, extra=extra, **self.policy)
        island = atoll.torch.join(
            self.model, self.optimizer, self.run, island="a", checkpoint=policy
        )
        self.island = island
        for batch in self.rows:
            if island._handle.host.progress[0] >= steps:
                break
            self.model(batch).square().mean().backward()
            island.report(tokens=12)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        die(island)

    def bits(self) -> bytes:
        state = [bits(p) for p in self.model.parameters()]
        moments = [
            bits(value)
            for each in self.optimizer.state.values()
            for value in each.values()
        ]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return b"".join([*state, *moments]) + str(rates).encode()


def a_run() -> MemoryRun:
    sync = {"num_fragments": 2, "overlap_steps": 2}
    return run_of(1, every=EVERY, sync=sync)


@pytest.mark.parametrize("killed_at", [1, 5, 9, 10, 11, 13])
def test_a_loop_with_its_weights_goes_on_to_the_bit(
    tmp_path: Path, killed_at: int
) -> None:
    """Moments, learning rates, dropout and data are those of a loop never killed."""
    whole = Loop(a_run(), tmp_path / "whole")
    whole.run_until(STEPS)
    run = a_run()
    more: dict[str, Any] = {"components": COMPONENTS, "every_rounds": 1}

    Loop(run, tmp_path / "cut", **more).run_until(killed_at)
    again = Loop(run, tmp_path / "cut", **more)
    again.run_until(STEPS)

    resumed = again.island._handle.host.resumed
    assert resumed is not None
    assert resumed.is_exact, resumed.reason
    assert again.bits() == whole.bits()


def test_rows_that_have_counted_are_not_trained_again(tmp_path: Path) -> None:
    """The data stands behind the last row that the run has, and the rest is told."""
    run = a_run()
    first = Loop(run, tmp_path, every_rounds=1)
    first.run_until(11)
    second = Loop(run, tmp_path, every_rounds=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        second.run_until(15)

    assert second.rows.seen[0] == 10
    lost = [str(each.message) for each in told if "are lost" in str(each.message)]
    assert len(lost) == 1
    assert "had made 11 inner steps. The run has counted 10" in lost[0]
    assert "1 inner steps with 12 tokens are lost" in lost[0]


def test_a_restart_without_a_checkpoint_says_that_the_optimizer_is_fresh() -> None:
    """Nobody finds out from a loss curve that its moments are gone."""
    run, (model,) = a_run(), networks(1)
    for life in range(2):
        optimizer = torch.optim.AdamW(model.parameters())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            island = atoll.torch.join(model, optimizer, run, island="a")
        for _ in range(EVERY + 3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        island._handle.host.leave(depart=False)
        assert len(told) == life
        if told:
            assert issubclass(told[0].category, AtollWarning)
            assert "continues with a fresh optimizer" in str(told[0].message)


def test_what_is_no_policy_is_refused() -> None:
    """The message says what it may be."""
    (model,) = networks(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match="neither a directory nor an"):
        atoll.torch.join(model, optimizer, a_run(), checkpoint=7)  # type: ignore[arg-type]


def test_a_solo_island_keeps_its_weights_too(tmp_path: Path) -> None:
    """No run has them, so that the checkpoint does, by default."""
    (model,), directory = networks(1), tmp_path / "alone"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with atoll.torch.join(model, optimizer, "none", checkpoint=directory) as island:
        assert island._checkpointing
        assert island._checkpointing.is_exact
