"""Four islands by one command; one of them is killed, and the run is trained anyway."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.launch import Launched
from atoll.launch.launches import LaunchRecords
from atoll.run_client import try_status
from tests.cli.runs import as_user

ROOT = Path(__file__).parents[2]
WAIT_S = 280.0
LOOK_S = 0.02

ALL_ARE_NEEDED = {"run.start_islands": 4, "run.quorum": 4, "run.end_rounds": 24}
"""So that no round is closed without the one that was killed."""


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_a_killed_island_comes_back_and_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of one island: it is restarted under its name, and all hold one model."""
    as_user(monkeypatch, tmp_path / "home")
    words = ["launch", "--on", "local", "-n", "4", ROOT / "examples" / "run.toml"]
    words += ["--dir", tmp_path / "demo-run.atoll"]
    for key, value in ALL_ARE_NEEDED.items():
        words += ["--set", f"{key}={value}"]
    words += ["--", "python", ROOT / "examples" / "train.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", *map(str, words)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _kill_when_training(process, "local-2")
        said, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate()
        for record in LaunchRecords().records():
            Launched(record.handle).cancel(grace_s=0.0)

    assert process.returncode == 0, err
    assert "local-2 | atoll: local-2 ended with signal 9 (SIGKILL)" in said
    assert "ended  round 24 of 24" in said
    table = {row[0]: row[1:3] for row in map(str.split, said.splitlines()) if row}
    assert [table[f"local-{index}"] for index in range(4)] == [
        ["finished", "0"],
        ["finished", "0"],
        ["finished", "1"],
        ["finished", "0"],
    ]
    assert len(set(re.findall(r"round 24, digest ([0-9a-f]{32})", said))) == 1


def _kill_when_training(process: subprocess.Popen[str], island: str) -> None:
    """Kill an island as soon as the first round is over."""
    until_s = time.monotonic() + WAIT_S
    while process.poll() is None:
        assert time.monotonic() < until_s, "no round was ever closed"
        for record in LaunchRecords().records():
            status = None if record.is_coordinator else try_status(record.handle.run)
            if status is not None and status.round >= 1:
                reports = {it.name: it for it in Launched(record.handle).poll()}
                os.kill(int(reports[island].host.split()[1]), signal.SIGKILL)
                return
        time.sleep(LOOK_S)
    raise AssertionError(process.communicate())
