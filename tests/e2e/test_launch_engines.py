"""One command starts islands on a real Slurm and a real Ray, and follows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runs import as_user
from tests.e2e.stage import PATIENT_S
from tests.launch.ray_cluster import ray_cluster
from tests.launch.slurm_cluster import slurm_cluster

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

RUN = """\
[run]
name = "reef"
start_islands = 2
end_rounds = 3
[sync]
sync_every = 2
"""
TRAIN = """\
import torch
import atoll.torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.torch.join(model, optimizer) as island:
    rows = torch.Generator().manual_seed(island.seed)
    while True:
        loss = model(torch.randn(4, 8, generator=rows)).square().mean()
        loss.backward()
        island.report(tokens=4, loss=loss)
        optimizer.step()
        optimizer.zero_grad()
print(f"{island.name}: round {island.round}, digest {island.digest}")
"""


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """An engine that runs, its options, and what the environment says of it."""
    if request.param == "slurm":
        with slurm_cluster(tmp_path_factory.mktemp("slurm") / "home") as cluster:
            yield "slurm", [], {"SLURM_CONF": str(cluster.conf)}
    else:
        with ray_cluster(num_nodes=2) as nodes:
            yield "ray", ["--option", f"address={nodes.cluster.address}"], {}


@pytest.mark.parametrize(
    ("engine", "place"),
    [
        ("slurm", "coordinator"),
        ("slurm", "inside"),
        ("ray", "inside"),
        ("ray", "bucket"),
    ],
    indirect=["engine"],
)
def test_islands_of_an_engine_train_one_model(
    engine: tuple[str, list[str], dict[str, str]],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run finishes, the command says so, and both islands hold one model.

    Served inside, the coordinator is one more thing that the engine runs.
    """
    name, options, around = engine
    as_user(monkeypatch, tmp_path / "home")
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(TRAIN)
    run = "../run.toml"
    if place == "bucket":
        run = str(tmp_path / "bucket")
        _atoll(["init", run, str(tmp_path / "run.toml")], tmp_path, around)
    words = ["launch", "--on", name, "-n", "2", run, *options]
    words += ["--dir", str(tmp_path / "reef.atoll")] if place != "bucket" else []
    words += ["--coordinator", "island0"] if place == "inside" else []
    done = _atoll([*words, "--", "python", "train.py"], tmp_path / "code", around)

    assert "ended  round 3 of 3" in done.stdout
    table = {
        row[0]: row[1:3] for row in map(str.split, done.stdout.splitlines()) if row
    }
    assert table[f"{name}-0"] == table[f"{name}-1"] == ["finished", "0"]
    assert len(set(re.findall(r"round 3, digest ([0-9a-f]{32})", done.stdout))) == 1


def _atoll(
    words: Sequence[str], where: Path, around: dict[str, str]
) -> subprocess.CompletedProcess[Any]:
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", *words],
        cwd=where,
        env={**os.environ, **around},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=4 * PATIENT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done
