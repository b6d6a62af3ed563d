"""The first process of a container tells its island, and what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.launch.leader import (
    CANCELLED,
    EXIT_CANCELLED,
    EXIT_GIVEN_UP,
    MODULE,
    NUM_BEFORE,
)

DEAF = (
    "import signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
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
