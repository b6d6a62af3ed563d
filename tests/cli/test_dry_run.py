"""`atoll launch --dry-run` on every engine, without its programs or credentials."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.launch.registry import engine_names
from tests.cli.runs import CODE

RUN = "https://reef.invalid:4711"
IMAGE = ("--image", "111122223333.dkr.ecr.eu-west-1.amazonaws.com/reef:1")
OPTIONS = {
    "kubernetes": IMAGE,
    "hf_jobs": IMAGE,
    "modal": IMAGE,
    "skypilot": IMAGE,
    "sagemaker": (
        *IMAGE,
        *("--option", "region=eu-west-1", "--option", "output=s3://reef/out"),
        *("--option", "role=arn:aws:iam::111122223333:role/reef"),
    ),
}
"""What an engine requires of every submission."""

SDKS = {
    "hf_jobs": "huggingface_hub",
    "kubernetes": "kubernetes",
    "modal": "modal",
    "ray": "ray",
    "sagemaker": "boto3",
    "skypilot": "sky",
}

WITHOUT_SDKS = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in %s:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def dry_run(
    engine: str, home: Path, *, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Plan two islands in an environment without programs and credentials."""
    (home / "train.py").write_text("")
    arguments = ("launch", "--dry-run", "--no-ship", "--on", engine, "-n", "2")
    island = (*OPTIONS.get(engine, ()), RUN, "--", "train.py")
    return subprocess.run(
        [sys.executable, "-c", before + CODE, *arguments, *island],
        cwd=home,
        env={
            "PATH": str(home),
            "HOME": str(home),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("engine", engine_names())
def test_a_submission_is_planned_without_programs_or_credentials(
    engine: str, tmp_path: Path
) -> None:
    """The plan names the run and the command; nothing is stored for a launch."""
    sdk = SDKS.get(engine)
    if sdk is not None and importlib.util.find_spec(sdk) is None:
        pytest.skip(f"{sdk} is not installed; the next test covers that")
    done = dry_run(engine, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert RUN in done.stdout
    assert "train.py" in done.stdout
    assert not [*tmp_path.glob(".config/atoll/launches/*.json")]


@pytest.mark.parametrize("engine", SDKS)
def test_an_engine_without_its_sdk_names_the_extra(engine: str, tmp_path: Path) -> None:
    """The command that installs it is in the error, and the exit code is 2."""
    done = dry_run(engine, tmp_path, before=WITHOUT_SDKS % {*SDKS.values()})

    assert done.returncode == 2
    extra = engine.replace("_", "-")
    assert f"The engine {engine} needs " in done.stderr
    assert f'pip install "atoll[{extra}]"' in done.stderr


def test_every_engine_is_covered() -> None:
    """Those without an SDK use programs of the machine alone."""
    assert set(engine_names()) - set(SDKS) == {"local", "slurm"}
