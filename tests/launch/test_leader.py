"""A leader starts its island again, passes on signals, and tells what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.errors import FINAL_EXIT
from atoll.launch.base import Report, State
from atoll.launch.leader import (
    CANCELLED,
    EXIT_CANCELLED,
    EXIT_GIVEN_UP,
    MODULE,
    NUM_BEFORE,
    exit_code,
    with_requirements,
)
from atoll.launch.spec import Restarts

DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('here', flush=True)\n"
    "time.sleep(600)\n"
)


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


def _words(message: Path, code: str, *more: str) -> list[str]:
    restarts = json.dumps({"most": 0})
    words = [sys.executable, "-m", MODULE, "--name", "a", "--restarts", restarts]
    words += ["--message", str(message), *(more or ("--index", "3"))]
    return [*words, "--", sys.executable, "-c", code]


def test_an_island_that_does_not_go_is_ended_by_its_leader(tmp_path: Path) -> None:
    """So the engine learns that it was told, and not that somebody killed it."""
    words = _words(tmp_path / "said", DEAF, "--index", "3", "--grace-s", "0.3")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as led:
        assert led.stdout is not None
        assert led.stdout.readline() == "here\n"
        led.send_signal(signal.SIGTERM)

        assert led.wait(100.0) == EXIT_CANCELLED
    assert json.loads((tmp_path / "said").read_text())["exit_code"] == -9


def test_a_failed_island_ends_with_one_code_and_its_own_is_told(tmp_path: Path) -> None:
    """An engine goes by the first, and people by the second."""
    done = subprocess.run(_words(tmp_path / "said", "raise SystemExit(5)"), check=False)

    assert done.returncode == EXIT_GIVEN_UP
    assert json.loads((tmp_path / "said").read_text()) == {
        "exit_code": 5,
        "restarts": 0,
        "why": "exit code 5",
    }


def test_an_island_that_was_ended_before_does_not_start(tmp_path: Path) -> None:
    """Its engine may start a container for it all the same."""
    words = _words(
        tmp_path / "said", "print('here')", "--index-from", "I", "--first", "2"
    )
    around = {**os.environ, "I": "1", CANCELLED: "0,3"}
    done = subprocess.run(words, env=around, capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (EXIT_CANCELLED, b"")


def test_who_is_told_to_go_in_the_pause_after_a_death_goes(tmp_path: Path) -> None:
    """Else an engine that starts islands again would take it for a failure."""
    words = _words(tmp_path / "said", "raise SystemExit(5)", "--index", "3", "--once")
    words[words.index("--restarts") + 1] = json.dumps({"first_pause_s": 30.0})
    around = {**os.environ, NUM_BEFORE: "9"}
    with subprocess.Popen(words, env=around, stdout=subprocess.PIPE, text=True) as led:
        assert led.stdout is not None
        said = led.stdout.readline()
        led.send_signal(signal.SIGTERM)

        assert led.wait(100.0) == EXIT_CANCELLED
    assert said == "atoll: a-3 ended with exit code 5, and exits in 60 s.\n"


@pytest.mark.parametrize(
    "module",
    ["leader", "bootstrap", "engines.local", "engines.slurm.leader"],
)
def test_processes_beside_an_island_start_light(module: str) -> None:
    """Each island has one or two of them, in every incarnation."""
    code = f"import sys, atoll.launch.{module}; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout == "False\n"


def test_an_index_that_is_none_is_told(tmp_path: Path) -> None:
    """Whatever started it was not the engine."""
    words = _words(tmp_path / "said", "", "--index-from", "NO_SUCH_INDEX")
    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert "NO_SUCH_INDEX='' is no index of an island" in done.stderr


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


def test_an_island_without_a_part_in_the_run_is_started_once() -> None:
    """Another start would end the same way, so it is not tried."""
    restarts = Restarts(first_pause_s=0.01, longest_pause_s=0.02)
    code = f"print('life', flush=True); raise SystemExit({FINAL_EXIT})"
    with _leader(code, restarts=restarts) as leader:
        output, _ = leader.communicate(timeout=100)

    assert leader.returncode == FINAL_EXIT
    assert output.splitlines() == [
        "life",
        "atoll: a-0 ended with exit code 6, and is not restarted: it has no part in "
        "the run. The error above names the remedy.",
    ]


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
    words = [sys.executable, "-m", MODULE, "--name", "a"]
    words += ["--index", "0"]
    words += ["--restarts", policy, "--leave-after-s", str(leave_after_s), "--"]
    return subprocess.Popen(
        [*words, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
