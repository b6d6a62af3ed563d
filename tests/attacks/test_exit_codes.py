"""What an island's process ends with, when bytes of its run do not verify."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.exchange.bucket import keys
from tests.cli.runs import atoll, environment

ISLAND = """
from atoll.island import join_run
from atoll.testing import VectorView, vector_model

host = join_run(None, VectorView(), vector_model({"w": (3,)}), island="a")
host.leave()
"""


@pytest.mark.parametrize("key", [keys.RUN, keys.SETTINGS])
def test_a_damaged_run_ends_an_island_with_5(tmp_path: Path, key: str) -> None:
    """The code of the table in docs/operations.md, and the traceback before it."""
    bucket, home = tmp_path / "bucket", tmp_path / "home"
    file = tmp_path / "run.toml"
    file.write_text("[run]\nname = 'reef'\n")
    assert atoll("init", bucket, file, home=home)[0] == 0
    command = [sys.executable, "-c", ISLAND]
    around = environment(home, ATOLL_RUN=str(bucket))
    assert subprocess.run(command, env=around, check=False).returncode == 0
    (bucket / key).write_bytes((bucket / key).read_bytes()[:-9])

    ended = subprocess.run(
        command, env=around, check=False, capture_output=True, text=True
    )

    assert ended.returncode == 5
    assert key in ended.stderr
    assert "Traceback" in ended.stderr
