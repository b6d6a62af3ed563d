"""Storms of real processes: everything counts once, and survivors lose nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.kill_storm.__main__ import command, storm

KILLS = 25
SEEDS = {None: 16, "file": 19}


@pytest.mark.timeout(400)  # half a minute when the machine does nothing else
@pytest.mark.parametrize("store", [None, "file"], ids=["coordinator", "file store"])
def test_every_step_counts_once_in_a_storm(tmp_path: Path, store: str | None) -> None:
    """The final anchor is exactly what rosters and updates come to, by process."""
    folder, seed = tmp_path / "storm", SEEDS[store]
    folder.mkdir()
    found = storm(folder, kills=KILLS, seed=seed, store=store, tell=_tell)

    repeat = f"{folder}; again by: {command(KILLS, seed, store)}"
    assert found == [], "\n".join([repeat, *found])


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
