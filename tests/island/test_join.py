"""SIGTERM while an island joins: it leaves the run, and exits with 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from atoll.coordinator.app import Coordinator
from atoll.retry import LEAVE_S
from atoll.security import Role, token_file
from atoll.testing import Link
from atoll.testing.fixtures import plain_settings
from tests.coordinator.serving import address_of, serving

ROOT = Path(__file__).parents[2]
ELEMENTS = 2**20
"""Four megabytes of weights, and as much of anything else."""

PATIENT_S = 60.0
"""Far above the usual duration, for a busy machine."""


@contextmanager
def joining(url: str, token: Path, home: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that joins a run, and end it after the block."""
    environment = {
        **os.environ,
        "ATOLL_TOKEN_FILE": str(token),
        "XDG_CONFIG_HOME": str(home),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.island.joining_process", url, str(ELEMENTS)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def terminated(process: subprocess.Popen[str], *, within_s: float) -> tuple[int, str]:
    """Send SIGTERM to a process, and return its exit code and output."""
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=within_s)
    return process.returncode, out + err


@contextmanager
def founding(
    folder: Path,
) -> Iterator[tuple[Coordinator, Link, subprocess.Popen[str]]]:
    """Give a process that publishes its first weights over a slow link."""
    directory = folder / "run"
    with ExitStack() as stack:
        served = stack.enter_context(serving(directory, plain_settings()))
        slow = Link(address_of(served.url), rate_bytes_per_s=2**18)
        link = stack.enter_context(slow)
        url = "http://{}:{}".format(*link.address)
        token = token_file(directory, Role.ISLAND)
        process = stack.enter_context(joining(url, token, folder / "home"))
        assert link.wait_carried(2**18, timeout_s=PATIENT_S)
        yield served, link, process


def test_sigterm_while_the_first_weights_are_on_their_way(tmp_path: Path) -> None:
    """The founder leaves: no island has to wait for its lease to found the run."""
    with founding(tmp_path) as (served, _, process):
        code, output = terminated(process, within_s=PATIENT_S)
        state, _ = served._threaded_service.look()

    assert (code, output) == (0, "joins\n")
    assert state.members.known["a"].has_left
    assert (state.founding, state.model) == (None, None)


def test_sigterm_while_the_coordinator_cannot_be_heard(tmp_path: Path) -> None:
    """Leaving takes at most `LEAVE_S`."""
    with founding(tmp_path) as (_, link, process):
        link.cut()
        code, output = terminated(process, within_s=LEAVE_S + 10.0)

    assert (code, output) == (0, "joins\n")


def test_sigterm_while_no_coordinator_is_there(tmp_path: Path) -> None:
    """It waits for one, and ends immediately."""
    directory = tmp_path / "run"
    with serving(directory, plain_settings()) as served:
        url = served.url
    token = token_file(directory, Role.ISLAND)
    with joining(url, token, tmp_path / "home") as process:
        assert process.stderr is not None
        assert "retrying " in process.stderr.readline()
        code, output = terminated(process, within_s=PATIENT_S)

    assert (code, output) == (0, "joins\n")
