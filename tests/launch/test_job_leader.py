"""A leader starts its island again, and passes on what the engine says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.launch.base import Report, State
from atoll.launch.leader import EXIT_CANCELLED, exit_code, with_requirements
from atoll.launch.spec import Restarts

ENDS = "import sys; print('life', flush=True); sys.exit(7)"
LEAVES = (
    "import signal, sys, time\n"
    "def leave(number, frame):\n"
    "    print('left', flush=True)\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, leave)\n"
    "print('here', flush=True)\n"
    "time.sleep(600)\n"
)


def test_an_island_that_fails_is_started_again_and_then_left_dead() -> None:
    """The log has every life, and the leader ends as the last one did."""
    restarts = Restarts(first_pause_s=0.01, longest_pause_s=0.02)
    with _leader(ENDS, restarts=restarts) as led:
        said, _ = led.communicate(timeout=100)

    lines = said.splitlines()
    assert led.returncode == 7
    assert lines.count("life") == 3
    assert lines[1] == "atoll: a-0 ended with exit code 7, and is restarted in 0.01 s."
    assert lines[-1] == "atoll: a-0 ended with exit code 7, and is not restarted."


def test_sigterm_lets_the_island_leave() -> None:
    """It is told once, leaves, and is not started again."""
    with _leader(LEAVES) as led:
        assert led.stdout is not None
        assert led.stdout.readline() == "here\n"
        led.send_signal(signal.SIGTERM)
        said, _ = led.communicate(timeout=100)

    assert said == "left\n"
    assert led.returncode == EXIT_CANCELLED


def test_an_island_leaves_before_its_time_is_over() -> None:
    """The engine would end it without a word."""
    with _leader(LEAVES, leave_after_s=3.0) as led:
        led.communicate(timeout=100)

    assert led.returncode == EXIT_CANCELLED


@pytest.mark.parametrize(
    ("state", "code", "ended"),
    [
        (State.FINISHED, 0, 0),
        (State.FAILED, 3, 3),
        (State.FAILED, -9, 137),
        (State.FAILED, -15, 1),
        (State.FAILED, 143, 1),
        (State.FAILED, None, 1),
        (State.CANCELLED, 0, 143),
    ],
)
def test_how_a_leader_ends(state: State, code: int | None, ended: int) -> None:
    """A number that an engine understands: a signal as a shell would say it."""
    report = Report(index=0, name="a-0", state=state, exit_code=code)

    assert exit_code(report) == ended


def test_requirements_are_words_and_no_script(tmp_path: Path) -> None:
    """A shell reads them and runs nothing of theirs; the command's words stay."""
    pip = tmp_path / "python"
    pip.write_text('#!/bin/sh\nfor each in "$@"; do echo "[$each]"; done\n')
    pip.chmod(0o755)
    words = with_requirements(["echo", "a  b", "$HOME"], ["x>=1; $(id)", "y"])
    said = subprocess.run(
        words,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    assert said[-3:] == ["[x>=1; $(id)]", "[y]", "a  b $HOME"]
    assert with_requirements(["a"], []) == ["a"]


def _leader(
    code: str, *, restarts: Restarts | None = None, leave_after_s: float = 1e6
) -> subprocess.Popen[str]:
    policy = json.dumps((restarts or Restarts()).to_dict())
    words = [sys.executable, "-m", "atoll.launch.leader", "--name", "a"]
    words += ["--index", "0"]
    words += ["--restarts", policy, "--leave-after-s", str(leave_after_s), "--"]
    return subprocess.Popen(
        [*words, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
