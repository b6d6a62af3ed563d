"""What is where in the directory of a demo, beside the coordinator's own files."""

from __future__ import annotations

from pathlib import Path


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
