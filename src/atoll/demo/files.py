"""The paths in the directory of a demo, and the run file of the package."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

from atoll.settings import RunSettings


def text(directory: Path) -> Path:
    """The eras."""
    return directory / "text"


def home(directory: Path) -> Path:
    """Credentials of this run, so that the user's own stay as they are."""
    return directory / "home"


def results(directory: Path, shard: int) -> Path:
    """What an island found out, when the run has ended."""
    return directory / f"island-{shard}.json"


def log(directory: Path, shard: int | None = None) -> Path:
    """What an island said; without a shard, what was said before there were any."""
    return directory / ("islands.log" if shard is None else f"island-{shard}.log")


def report(directory: Path) -> Path:
    """The page with the curves."""
    return directory / "report.html"


QUICK_ROUNDS = 24
"""Enough to see the loss fall, in less than a minute."""


def run_file_text() -> str:
    """Return the run file as it is read, comments included."""
    return files("atoll.demo").joinpath("run.toml").read_text()


def run_settings(*, quick: bool = False) -> RunSettings:
    """Return the demo's settings; a quick one has fewer rounds."""
    read = RunSettings.from_dict(tomllib.loads(run_file_text()))
    return read.with_values({"run.end_rounds": QUICK_ROUNDS}) if quick else read
