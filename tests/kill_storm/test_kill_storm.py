"""Storms of real processes: everything counts once, and survivors lose nothing."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.kill_storm.__main__ import Trial, storm

KILLS = 25
TRIALS = {
    "coordinator": Trial(kills=KILLS, seed=16),
    "asynchronous": Trial(kills=KILLS, seed=21, mode="async"),
    "file store": Trial(kills=KILLS, seed=19, store="file"),
    "asynchronous file store": Trial(
        kills=KILLS, seed=4202, store="file", mode="async"
    ),
}


@pytest.mark.timeout(400)  # half a minute when the machine does nothing else
@pytest.mark.parametrize("trial", TRIALS.values(), ids=[*TRIALS])
def test_every_step_counts_once_in_a_storm(tmp_path: Path, trial: Trial) -> None:
    """The final anchor is exactly what rosters and updates come to, by process."""
    _blow(tmp_path, trial)


@pytest.mark.timeout(400)
def test_a_killed_coordinator_counts_every_acknowledged_update_once(
    tmp_path: Path,
) -> None:
    """Twenty SIGKILLs at random moments of an asynchronous run; the islands live."""
    seed = random.SystemRandom().randrange(10**6)
    _blow(tmp_path, Trial(kills=20, seed=seed, mode="async", victims="server"))


def _blow(tmp_path: Path, trial: Trial) -> None:
    folder = tmp_path / "storm"
    folder.mkdir()
    found = storm(folder, trial, tell=_tell)

    assert found == [], "\n".join([f"{folder}; again by: {trial.command}", *found])


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
