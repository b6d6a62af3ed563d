"""Curves in the trackers of other projects, written by two processes and read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import UsageError
from atoll.telemetry.trackers import TRACKERS, TrackedRun
from tests.engines import interpreter_with

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("tracker_script.py")

LOCAL = {
    "WANDB_MODE": "offline",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "ANONYMIZED_TELEMETRY": "false",
}
"""Modes in which nothing is sent."""


@pytest.mark.parametrize("kind", TRACKERS)
def test_points_are_read_back_once(kind: str, tmp_path: Path) -> None:
    """A second process continues the run; every point has the axis of its curve."""
    python = interpreter_with("wandb")
    paths = {"HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    paths["MLFLOW_TRACKING_URI"] = (tmp_path / "mlflow").as_uri()
    environment = {**os.environ, **LOCAL, **paths, "PYTHONPATH": str(ROOT / "src")}
    for part in ("first", "second", "read"):
        done = subprocess.run(
            [python, SCRIPT, kind, tmp_path, part],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    points = json.loads((tmp_path / "points.json").read_text())
    metric = "lr/.6771." if kind == "mlflow" else "lr/=6771="
    expected = [
        ["loss_by_tokens/tokyo-1", "run/tokens", 1000, 2.5],
        ["loss_by_tokens/tokyo-1", "run/tokens", 2000, 2.25],
        [metric, "run/inner_steps", 20, 0.5],
        ["round_counted/fragment-0", "run/round", 1, 3.0],
    ]
    if kind == "mlflow":  # it has one axis
        expected = [[tag, "", step, value] for tag, _, step, value in expected]
    assert sorted(points) == sorted(expected)


@pytest.mark.parametrize("kind", TRACKERS)
def test_a_missing_library_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, kind, None)
    run = TrackedRun(run_id="r", name="r", settings={})

    with pytest.raises(UsageError, match=f"pip install {kind}"):
        TRACKERS[kind](run, "reef")
