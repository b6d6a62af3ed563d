"""Building from runs that are elsewhere: whole, a stage, or the rows of a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import atoll
import atoll.torch
from atoll.torch import Stage
from tests.e2e.stage import Stage as Processes
from tests.torch.building_ranks import Net, build_rank
from tests.torch.processes import Group, run_groups
from tests.torch.runs import bits, settings_of

pytestmark = pytest.mark.torch


@pytest.fixture(params=["coordinator", "store"])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Give the name of a run that has no weights yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    sync = {"num_fragments": 2, "fragment_order": "by_size"}
    settings = settings_of(every=2, sync=sync)
    if request.param == "store":
        url = str(tmp_path / "bucket")
        atoll.init(url, settings)
        yield url
        return
    processes = Processes(tmp_path, settings=settings.to_dict())
    processes.serve()
    yield processes.url
    processes.close()


Tensors = dict[str, torch.Tensor]


def found(run: str) -> tuple[Tensors, Tensors]:
    """Found a run, and return its weights and its constants."""
    torch.manual_seed(3)
    model = Net()
    model.table.copy_(torch.tensor([2, 3, 5]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    island = atoll.torch.join(model, optimizer, run, island="founder")
    weights = island.anchor()
    island.leave()
    return weights, {
        "base.weight": model.base.weight.detach(),
        "base.bias": model.base.bias.detach(),
        "table": model.table,
    }


def test_a_run_elsewhere_fills_a_model_and_its_stages(run: str) -> None:
    """A stage has other names for its tensors, and takes its own only.

    Constants come from the run as well; a source= that has them wins.
    """
    weights, constants = found(run)
    whole = atoll.torch.build(Net, run)

    def last() -> Stage:
        module = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(4, 4))
        module[1].requires_grad_(False)
        names = {"0.": "second.", "1.": "base."}
        return Stage(module=module, index=1, num_stages=2, names=names)

    stage = atoll.torch.build(last, run)
    given = torch.tensor([7, 7, 7])
    other = atoll.torch.build(Net, run, source={"table": given}.get)

    for name, values in {**weights, **constants}.items():
        assert bits(whole.state_dict()[name]) == bits(values), name
    assert other.table.tolist() == given.tolist()
    assert bits(stage.module.get_parameter("1.weight")) == bits(
        constants["base.weight"]
    )
    assert bits(stage.module.get_parameter("0.weight")) == bits(
        weights["second.weight"]
    )


def test_ranks_take_their_own_rows(run: str) -> None:
    """Under FSDP2 no rank reads or holds what belongs to the other."""
    weights, constants = found(run)
    environment = {"XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"]}
    group = Group(build_rank, [run], ranks=2, environment=environment)
    [ranks] = run_groups(group)

    expected = {**weights, **constants, "cos": torch.arange(4).float().cos()}
    for values, _ in ranks:
        # Exact: a list holds every fp32 value without rounding.
        assert values == {n: t.flatten().tolist() for n, t in expected.items()}
    if run.startswith("http"):
        elements = sum(tensor.numel() for tensor in weights.values())
        assert sum(elements_read for _, elements_read in ranks) == elements
