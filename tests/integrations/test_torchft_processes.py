"""Processes that train with torchft through a coordinator, and their deaths."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.exchange import MemoryRun
from atoll.integrations.torchft import run_settings
from atoll.settings import RunSettings
from tests.e2e.stage import ROOT, Island, Stage
from tests.integrations.island_process import SYNC_EVERY
from tests.integrations.trainings import Training, diloco, train_island
from tests.torch.runs import together

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

START_S = 180.0
"""A process that imports torch and compiles kernels may take long on a busy machine."""

PACE = ("--step-s", "0.02")
"""Slow enough that a process can start while another trains a few rounds."""


def settings_for(islands: int) -> RunSettings:
    """Return a run of two fragments that so many islands begin."""
    return run_settings(2).with_values(
        {"run.start_islands": islands, "sync.sync_every": SYNC_EVERY}
    )


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, settings_for(2).to_dict())
    stage.serve()
    yield stage
    stage.close()


def start(stage: Stage, number: int, *options: str) -> Island:
    """Start an island of torchft on a stage."""
    name = f"island-{number}"
    told, log = stage.folder / f"{name}.json", stage.folder / f"{name}.log"
    module = "tests.integrations.island_process"
    with log.open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, stage.url, str(number), str(told), *options],
            env=stage.environment,
            cwd=ROOT,
            stderr=errors,
        )
    island = Island(name, process, told, log)
    stage.islands.append(island)
    return island


def test_processes_train_as_threads_do(stage: Stage) -> None:
    """Two processes and a coordinator agree on the weights of a run in memory."""
    islands = [start(stage, number, "--steps", "4") for number in (0, 1)]
    trainings = [Training(number, fragments=2) for number in (0, 1)]
    run, wrap = MemoryRun(settings_for(2)), diloco(SYNC_EVERY, fragment_sync_delay=1)
    together(
        *(
            lambda each=each: train_island(run, each, wrap, steps=2 * SYNC_EVERY)
            for each in trainings
        )
    )

    agreed = [island.wait(START_S)["agreed"] for island in islands]

    assert agreed == [each.agreed().numpy().tobytes().hex() for each in trainings]


def test_a_death_costs_the_survivor_nothing(stage: Stage) -> None:
    """Every step of the survivor counts, and the dead island's next life catches up.

    It dies as a power cut would end it, with an update under way or about to leave;
    its next life begins with other weights and ends with the survivor's.
    """
    survivor = start(stage, 0, "--together", "4", *PACE)
    killed = start(stage, 1, "--steps", "999", "--dies-after", "3", *PACE)
    assert killed.process.wait(START_S) == -signal.SIGKILL
    again = start(stage, 1, "--together", "4", "--seed", "5", *PACE)

    it, next_life = survivor.wait(START_S), again.wait(START_S)

    assert all(step["counted"] for step in it["steps"])
    assert [each["step"] for each in it["steps"]] == [*range(1, len(it["steps"]) + 1)]
    assert it["agreed"] == next_life["agreed"]
