"""Islands that torchrun starts, beside one of a single process, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.security import Role, token_file
from tests.coordinator.serving import serving
from tests.e2e.stage import PATIENT_S, ROOT
from tests.torch.rank_loops import settings

pytestmark = pytest.mark.torch

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
KINDS = ("ddp", "fsdp", "alone")
"""The other kinds are in tests/torch/test_ranks.py, from processes that are forked."""


def start(kind: str, number: int, url: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start an island; its name is its kind."""
    launcher = () if kind == "alone" else TORCHRUN
    arguments = (kind, str(number), url, kind, str(folder))
    token = str(token_file(folder / "run", Role.ISLAND))
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "tests.e2e.sharded_island", *arguments],
        cwd=ROOT,
        env={**os.environ, "ATOLL_TOKEN_FILE": token, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.timeout(300)
def test_torchrun_starts_islands_of_one_run(tmp_path: Path) -> None:
    """Every rank of every island ends in the last round, on one anchor and velocity."""
    run = {"start_islands": len(KINDS)}
    with serving(tmp_path / "run", settings(3, run=run)) as coordinator:
        started = [
            start(kind, number, coordinator.url, tmp_path)
            for number, kind in enumerate(KINDS)
        ]
        try:
            codes = [each.wait(3 * PATIENT_S) for each in started]
        finally:
            for each in started:
                each.terminate()  # torchrun ends its ranks
                each.wait()
    assert codes == [0] * len(KINDS)
    ended = [json.loads(path.read_text()) for path in tmp_path.glob("*-?.json")]
    assert len(ended) == 5
    assert {each["round"] for each in ended} == {3}
    assert len({each["digest"] for each in ended}) == 1
