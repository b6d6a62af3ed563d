"""Islands as managed jobs of SkyPilot, whose pins are at odds with those of others.

So it is not in our virtual environment, and has one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import UsageError
from atoll.launch.registry import engine_names, open_launcher
from tests.engines import ROOT, interpreter_with

INSIDE = Path(__file__).with_name("in_skypilot.py")


def test_without_its_sdk_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the launcher is made, and before anything is launched."""
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(UsageError, match=r'needs sky.*pip install "atoll\[skypilot\]"'):
        open_launcher("skypilot")

    assert "skypilot" in engine_names()


@pytest.mark.timeout(600)
def test_it_holds_where_skypilot_is(tmp_path: Path) -> None:
    """Plans by its parser, calls by its signatures, and every claim of a launcher."""
    python = interpreter_with("sky")
    words = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-p",
        "no:cacheprovider",
    ]
    ended = subprocess.run(
        [
            *words,
            "-o",
            "filterwarnings=default",
            f"--basetemp={tmp_path / 'in'}",
            INSIDE,
        ],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),  # it writes there as soon as it is imported
            "PYTHONPATH": str(ROOT / "src"),
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout[-8000:]
