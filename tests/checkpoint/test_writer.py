"""Kill -9 while a checkpoint is saved: the former one, or the new one, never a half."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atoll.checkpoint.manifest import begin, finished
from atoll.checkpoint.saver import (
    WriteJob,
    encode_components,
    finish,
    write_part,
)
from atoll.errors import RemoteError
from tests.checkpoint.objects import Weights

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_a_save_that_is_killed_at_any_point_leaves_a_valid_one(tmp_path: Path) -> None:
    """A real process is killed before and after every system call that a save makes.

    Afterwards the newest checkpoint is the former one or the new one, complete and
    without a warning, and the next process can save.
    """
    program = [sys.executable, "-W", "error", "-m", "tests.checkpoint.saving_process"]
    done = subprocess.run(
        [*program, str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a fork wants no threads
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    newest = [each["newest"] for each in found]
    assert len(newest) > 60
    assert set(newest) == {1.0, 2.0}
    assert newest == sorted(newest)  # from one system call on, it is the new one
    assert {each["next"] for each in found} == {3.0}
    assert {each["left"] for each in found} == {1}  # keep=1, and nothing half-made


class _Leaps:
    """A clock on which every look takes a minute."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 60.0
        return self._now_s


def _part(root: Path, *, rank: int) -> WriteJob:
    return WriteJob(
        unfinished=root / "checkpoint-00000001~",
        rank=rank,
        num_ranks=2,
        metadata={},
        keep=3,
        components=("model",),
    )


def test_a_rank_that_dies_is_named_and_nothing_is_finished(tmp_path: Path) -> None:
    """The leader waits for the slowest rank for a bounded time."""
    begin(tmp_path, 1)
    drafts = encode_components(["model"], {"model": Weights()}, is_leader=True)
    write_part(_part(tmp_path, rank=0), drafts)

    with pytest.raises(RemoteError, match="Rank 1 has not written its part"):
        finish(_part(tmp_path, rank=0), _Leaps(), threading.Event())

    assert finished(tmp_path) == []


def test_a_rank_that_cannot_write_says_so_at_once(tmp_path: Path) -> None:
    """The leader raises the other rank's disk error without waiting."""
    path = begin(tmp_path, 1)
    drafts = encode_components(["model"], {"model": Weights()}, is_leader=True)
    write_part(_part(tmp_path, rank=0), drafts)
    (path / "model-00001.json").mkdir()
    with pytest.raises(RemoteError, match="failed"):
        write_part(_part(tmp_path, rank=1), drafts)

    with pytest.raises(RemoteError, match="Rank 1 could not write its part"):
        finish(_part(tmp_path, rank=0), _Leaps(), threading.Event())
