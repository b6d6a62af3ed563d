"""Four islands by one command; one of them is killed, and the run is trained anyway."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ATOLL = [sys.executable, "-m", "atoll.cli"]
WAIT_S = 280.0


def environment(home: Path) -> dict[str, str]:
    kept = {key: v for key, v in os.environ.items() if not key.startswith("ATOLL_")}
    return kept | {"XDG_CONFIG_HOME": str(home)}


def islands(home: Path) -> dict[str, dict[str, Any]]:
    """Return what another terminal sees of the islands."""
    words = [*ATOLL, "ps", "--all", "--json"]
    done = subprocess.run(words, env=environment(home), capture_output=True, check=True)
    return {
        island["name"]: island
        for each in json.loads(done.stdout)
        for island in each["islands"]
    }


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_a_killed_island_comes_back_and_the_run_is_finished(tmp_path: Path) -> None:
    """SIGKILL of one island: it is restarted under its name, and all hold one model."""
    words = ["launch", "--on", "local", "-n", "4", ROOT / "examples" / "run.toml"]
    words += ["--dir", tmp_path / "first.atoll", "--"]
    words += ["python", ROOT / "examples" / "train.py"]
    process = subprocess.Popen(
        [*ATOLL, *map(str, words)],
        cwd=tmp_path,
        env=environment(tmp_path / "home"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = _until_trained(process)
        victim = islands(tmp_path / "home")["local-2"]
        os.kill(int(victim["place"].split()[1]), signal.SIGKILL)
        out, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.communicate()
        subprocess.run(
            [*ATOLL, "cancel", str(tmp_path / "first.atoll"), "--grace-s", "0"],
            env=environment(tmp_path / "home"),
            capture_output=True,
            check=False,
        )

    said += out
    assert process.returncode == 0, err
    assert re.search(r"^local-2 is running \(restart 1\)", said, re.MULTILINE), said
    assert "local-2 | atoll: local-2 ended with signal 9 (SIGKILL)" in said
    assert "ended, round 40 of 40" in said
    table = {row[0]: row[1:3] for row in map(str.split, out.splitlines()) if row}
    assert {table[f"local-{index}"][0] for index in (0, 1, 3)} == {"finished"}
    # One that is started again when the last round closes is not needed any more.
    assert table["local-2"] in (["finished", "1"], ["cancelled", "1"], ["failed", "1"])
    assert len(set(re.findall(r"round 40, digest ([0-9a-f]{32})", said))) == 1


def _until_trained(process: subprocess.Popen[str]) -> str:
    """Return what was said until an island has made its first hundred inner steps."""
    assert process.stdout is not None
    until_s, said = time.monotonic() + WAIT_S, ""
    while "| step 100, loss" not in said:
        line = process.stdout.readline()
        assert line, f"{said}{process.communicate()[1]}"
        assert time.monotonic() < until_s, said
        said += line
    return said
