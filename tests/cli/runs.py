"""Coordinators and islands in processes of their own, for tests of the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import main

CODE = "from atoll.cli import main; main()"
WAIT_S = 60.0

RUN_FILE = """
[run]
name = "lagoon"
start_islands = 2
end_rounds = 4

[sync]
sync_every = 4
num_fragments = 2
overlap_steps = 1

[outer]
momentum = 0.5
"""

ISLAND = """
import os, signal, sys
import numpy as np
from atoll.errors import RunEnded
from atoll.island import join_run
from atoll.testing import VectorView, vector_model

view = VectorView()
shapes = {"h.0.w": (20, 35), "h.1.w": (500,), "head": (33,)}
host = join_run(None, view, vector_model(shapes), island=None)
noise = np.random.default_rng(host.joined.slot)
while not host.has_ended:
    for local in view.local:
        local -= noise.normal(size=len(local)).astype(np.float32)
    host.stepped()
host.leave()
print(host.joined.island, host.digest)
"""


@dataclass(frozen=True)
class Served:
    """A coordinator in a process of its own, and what it said first."""

    process: subprocess.Popen[str]
    said: dict[str, Any]
    home: Path
    """Where this user's configuration is."""

    @property
    def url(self) -> str:
        return str(self.said["url"])

    @property
    def directory(self) -> Path:
        return Path(self.said["directory"])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Ask it to stop; return its exit status and its complaints."""
        self.process.send_signal(number)
        _, complaints = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, complaints


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return what a user's processes have around them."""
    ours = {"XDG_CONFIG_HOME": str(home), "OMP_NUM_THREADS": "1"}
    kept = {key: v for key, v in os.environ.items() if not key.startswith("ATOLL_")}
    return kept | ours | more


def started(
    *arguments: str | Path, home: Path, cwd: Path | None = None, **more: str
) -> subprocess.Popen[str]:
    """Start the command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *map(str, arguments)],
        cwd=cwd,
        env=environment(home, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit status, output and complaints of a process, when it has ended."""
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def atoll(
    *arguments: str | Path, home: Path, cwd: Path | None = None, **more: str
) -> tuple[int, str, str]:
    """Run the command line in a process of its own."""
    return ended(started(*arguments, home=home, cwd=cwd, **more))


@contextmanager
def serving(place: Path, *options: str | Path) -> Iterator[Served]:
    """Serve the run of `place` while the block lasts."""
    (place / "run.toml").write_text(RUN_FILE)
    arguments = ("serve", place / "run.toml", "--dir", place / "run", "--json")
    process = started(*arguments, *options, home=place / "home")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise AssertionError(ended(process))
        yield Served(process, json.loads(line), place / "home")
    finally:
        process.kill()
        process.communicate()


def run(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, str]:
    """Run the command line here; return its exit status and what it said."""
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return int(exit_.value.code or 0), said.out, said.err


def as_user(patch: pytest.MonkeyPatch, home: Path, **more: str) -> None:
    """Make this process that of a user, as far as Atoll can tell."""
    for key in [key for key in os.environ if key.startswith("ATOLL_")]:
        patch.delenv(key)
    variables: Mapping[str, str] = {"XDG_CONFIG_HOME": str(home), **more}
    for key, value in variables.items():
        patch.setenv(key, value)
