"""What is wrong with one rank's model or optimizer is refused on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import atoll
import atoll.torch
from atoll import RunSettings
from atoll.errors import UsageError
from tests.torch.processes import Group, run_groups

pytestmark = pytest.mark.torch


def replaced(rank: int, run: str) -> str:
    """Join with an optimizer that rank 1 has made too early; say what was raised."""
    module = torch.nn.Linear(2, 3)
    early = torch.optim.SGD(module.parameters(), lr=0.1)
    if rank == 1:
        module.weight = torch.nn.Parameter(module.weight.detach().clone())
    try:
        atoll.torch.join(DistributedDataParallel(module), early, run)
    except UsageError as exc:
        return str(exc)
    return "nothing was raised"


def test_an_optimizer_of_other_parameters_is_refused_on_every_rank(
    tmp_path: Path,
) -> None:
    """Rank 0 has no fault of its own, and does not wait for one that raised."""
    run = str(tmp_path / "bucket")
    atoll.init(run, RunSettings.from_dict({}))
    ((first, second),) = run_groups(Group(replaced, (run,), ranks=2))

    assert "trains 1 tensors that are not the model's" in second
    assert "does not train 'module.weight'" in second
    assert "trains 1 tensors that are not the model's" in first
