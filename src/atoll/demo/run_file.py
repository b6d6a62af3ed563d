"""The demo's own run file, which comes with the package."""

from __future__ import annotations

import tomllib
from importlib.resources import files

from atoll.settings import RunSettings

QUICK_ROUNDS = 24
"""Enough to see the loss fall, in less than a minute."""


def text() -> str:
    """Return the run file as it is read, comments included."""
    return files("atoll.demo").joinpath("run.toml").read_text()


def settings(*, quick: bool = False) -> RunSettings:
    """Return the demo's settings; a quick one has fewer rounds."""
    read = RunSettings.from_dict(tomllib.loads(text()))
    return read.with_values({"run.end_rounds": QUICK_ROUNDS}) if quick else read
