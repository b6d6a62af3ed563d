"""Islands that torchrun starts, beside one of a single process, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import RunSettings
from atoll.security import Role, token_file
from tests.coordinator.serving import serving
from tests.e2e.sharded_island import RANKS, live
from tests.e2e.stage import PATIENT_S, ROOT
from tests.torch.processes import Group, run_groups
from tests.torch.rank_loops import settings

pytestmark = pytest.mark.torch

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
KINDS = {
    "ddp": "alone",
    "fsdp": "alone",
    "hsdp": "alone",
    "tp": "whole",
    "pipeline": "whole",
    "alone": "alone",
}
"""Of islands, whose names they are, and as what one process does the same.

Ranks of tensor parallel and of a pipeline train on the same rows; the others each have
their own, which one process takes in the order of ranks.
"""


def run_settings() -> RunSettings:
    """Return settings of a run that nobody misses a round of, on any machine."""
    return settings(
        3,
        run={"start_islands": len(KINDS)},
        sync={"sync_every": 4, "num_fragments": 2, "overlap_steps": 2},
        wire={"up": "int8", "down": "int8"},
        limits={"deadline_min_s": 240.0, "deadline_max_s": 480.0},
    )


def start(kind: str, number: int, url: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start an island; its name is its kind."""
    launcher = () if kind == "alone" else (*TORCHRUN, str(RANKS))
    arguments = (kind, str(number), url, kind, str(folder))
    token = str(token_file(folder / "run", Role.ISLAND))
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.e2e.sharded_island", *arguments],
        cwd=ROOT,
        env={**os.environ, "ATOLL_TOKEN_FILE": token, "OMP_NUM_THREADS": "1"},
    )


def launched(folder: Path) -> list[dict[str, Any]]:
    """Return what every rank of every kind of island comes to in one run."""
    with serving(folder / "run", run_settings()) as coordinator:
        started = [
            start(kind, number, coordinator.url, folder)
            for number, kind in enumerate(KINDS)
        ]
        try:
            codes = [each.wait(5 * PATIENT_S) for each in started]
        finally:
            for each in started:
                each.terminate()  # torchrun ends its ranks
                each.wait()
    assert codes == [0] * len(KINDS)
    return [json.loads(path.read_text()) for path in folder.glob("*-?.json")]


def by_one_process_each(folder: Path) -> list[dict[str, Any]]:
    """Return what the same islands come to when each is one process."""
    with serving(folder, run_settings()) as coordinator:
        token = {"ATOLL_TOKEN_FILE": str(token_file(folder, Role.ISLAND))}
        groups = [
            Group(live, (same, number, coordinator.url, kind), environment=token)
            for number, (kind, same) in enumerate(KINDS.items())
        ]
        return [ended for (ended,) in run_groups(*groups, within_s=3 * PATIENT_S)]


@pytest.mark.timeout(600)
def test_torchrun_starts_islands_of_one_run(tmp_path: Path) -> None:
    """Islands of each kind end on the bits of single processes, in every rank.

    Those accumulate the same micro-batches in rank order. With two ranks a reduction
    has one order only, so that no kind differs by rounding.
    """
    ended = launched(tmp_path)
    expected = by_one_process_each(tmp_path / "single")

    assert len(ended) == RANKS * (len(KINDS) - 1) + 1
    assert {each["round"] for each in ended} == {3}
    tokens = {each["name"]: each["tokens"] for each in expected}
    assert all(each["tokens"] == tokens[each["name"]] for each in ended)
    assert {each["digest"] for each in ended} == {each["digest"] for each in expected}
    assert len({each["digest"] for each in expected}) == 1
