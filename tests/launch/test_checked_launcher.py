"""Answers that make no sense are told, by the engine and what it said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import Refused, Unreachable
from atoll.launch.base import Handle
from atoll.launch.registry import CheckedLauncher, open_launcher
from tests.cli.runs import as_user

HANDLE = Handle(
    id="atoll-a-0",
    engine="slurm",
    run="/no/run",
    name="a",
    num_islands=1,
    reference={"job": 7, "directory": "/no/place"},
)


class Reading:
    """A launcher that reads whatever it is asked."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: self._read()


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda: int("many"), "ValueError: .*'many'"),
        (lambda: json.loads("{}")["status"], "KeyError: 'status'"),
        (lambda: [][0], "IndexError"),
        (lambda: None.stage, "AttributeError: .*'stage'"),  # type: ignore[attr-defined]
        (lambda: int(None), "TypeError: .*NoneType"),  # type: ignore[call-overload]
        (lambda: int(float("inf")), "OverflowError: .*infinity"),
    ],
)
def test_an_odd_answer_is_told(read: Callable[[], object], told: str) -> None:
    """Whatever a launcher is asked: which engine, what was said, where it is read."""
    launcher = CheckedLauncher("slurm", Reading(read))
    message = (
        rf"The response of slurm to '.*' cannot be parsed: {told}.*checked_launcher\.py"
    )
    for ask in (
        lambda: launcher.poll(HANDLE),
        lambda: launcher.logs(HANDLE, 0),
        lambda: launcher.cancel(HANDLE),
    ):
        with pytest.raises(Unreachable, match=message):
            ask()


def test_an_error_of_ours_stays_what_it_is() -> None:
    """Who is refused learns just that."""

    def read() -> None:
        raise Refused("You may not.")

    with pytest.raises(Refused, match="You may not"):
        CheckedLauncher("slurm", Reading(read)).poll(HANDLE)


def test_every_launcher_is_given_out_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's programs may say anything, and it is no crash."""
    as_user(monkeypatch, tmp_path / "home")
    said = f"JobId=7 ArrayTaskId=0 JobName={HANDLE.id} JobState=RUNNING Restarts=many"
    for program in ("sbatch", "scontrol", "squeue", "scancel"):
        (tmp_path / program).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    message = r"The response of slurm to 'poll' .*'many' \(__init__\.py, line \d+\)"
    with pytest.raises(Unreachable, match=message):
        open_launcher("slurm").poll(HANDLE)
