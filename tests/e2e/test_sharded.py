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
from tests.torch.rank_resuming import live as resumable

pytestmark = pytest.mark.torch

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
KINDS = {
    "ddp": "alone",
    "fsdp": "alone",
    "hsdp": "alone",
    "pipeline": "whole",
    "alone": "alone",
}
"""Of islands, whose names they are, and as what one process does the same.

Stages of a pipeline train on the same rows; ranks of the others each have their own,
which one process takes in the order of ranks. Tensor parallel is not among them: it
multiplies narrower matrices, for which a processor may have another order.
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


def start(
    kind: str, folder: Path, module: str, *arguments: str
) -> subprocess.Popen[bytes]:
    """Start an island of a kind by a program that is given arguments."""
    launcher = () if kind == "alone" else (*TORCHRUN, str(RANKS))
    token = str(token_file(folder / "run", Role.ISLAND))
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "ATOLL_TOKEN_FILE": token, "OMP_NUM_THREADS": "1"},
    )


def launched(folder: Path) -> list[dict[str, Any]]:
    """Return what every rank of every kind of island comes to in one run."""
    with serving(folder / "run", run_settings()) as coordinator:
        url, module = coordinator.url, "tests.e2e.sharded_island"
        started = [
            start(kind, folder, module, kind, str(number), url, kind, str(folder))
            for number, kind in enumerate(KINDS)
        ]
        codes = ended(*started)
    assert codes == [0] * len(KINDS)
    return [json.loads(path.read_text()) for path in folder.glob("*-?.json")]


def ended(*started: subprocess.Popen[bytes]) -> list[int]:
    """Return how programs ended; none of them is left."""
    try:
        return [each.wait(5 * PATIENT_S) for each in started]
    finally:
        for each in started:
            each.terminate()  # torchrun ends its ranks
            each.wait()


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
    found = launched(tmp_path)
    expected = by_one_process_each(tmp_path / "single")

    assert len(found) == RANKS * (len(KINDS) - 1) + 1
    assert {each["round"] for each in found} == {3}
    tokens = {each["name"]: each["tokens"] for each in expected}
    assert all(each["tokens"] == tokens[each["name"]] for each in found)
    assert {each["digest"] for each in found} == {each["digest"] for each in expected}
    assert len({each["digest"] for each in expected}) == 1


@pytest.mark.timeout(600)
def test_an_island_whose_rank_is_killed_ends_where_it_would_have_ended(
    tmp_path: Path,
) -> None:
    """Kill -9 of one rank, then the same torchrun again: no bit of the run differs.

    The other island waits for it, and the run's rounds with it.
    """
    pair = {**run_settings().to_dict(), "run": {"start_islands": 2, "end_rounds": 5}}
    given = RunSettings.from_dict(pair)
    for place in ("run", "whole"):
        (tmp_path / place).mkdir()
    with serving(tmp_path / "run", given) as coordinator:
        url, module, folder = coordinator.url, "tests.e2e.killed_rank", str(tmp_path)
        b = start("alone", tmp_path, module, "alone", url, "b", folder, "-1")
        try:
            a = start("fsdp", tmp_path, module, "fsdp", url, "a", folder, "10")
            assert ended(a) != [0]
            a = start("fsdp", tmp_path, module, "fsdp", url, "a", folder, "-1")
            assert ended(a, b) == [0, 0]
        finally:
            ended(b)
    with serving(tmp_path / "whole", given) as coordinator:
        token = str(token_file(tmp_path / "whole", Role.ISLAND))
        saved = tmp_path / "whole-saved"
        groups = [
            Group(
                resumable,
                ("alone", coordinator.url, str(saved / name), -1, None, True, name),
                environment={"ATOLL_TOKEN_FILE": token},
            )
            for name in "ab"
        ]
        expected = [said for (said,) in run_groups(*groups, within_s=3 * PATIENT_S)]

    found = [json.loads(path.read_text()) for path in tmp_path.glob("[ab]-?.json")]
    assert [each["told"] for each in found] == [[]] * 3
    assert {each["digest"] for each in found} == {each["digest"] for each in expected}
    assert len({each["digest"] for each in expected}) == 1
