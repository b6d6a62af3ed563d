"""Every bench runs at a tiny size, and prints its table with its limits and peers.

The figures of such a run measure nothing, so that a limit may be missed here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG_S = 240
"""A bench takes seconds; processes import torch or JAX, and the machine may be busy."""

BENCHES = sorted(
    path.stem for path in (ROOT / "bench").glob("*.py") if path.name[0] != "_"
)
TABLES = {
    "attacks": ["p99 ms", "missed", "quiet", "idle connections", "wrong invitation"],
    "codecs": ["peer ms", "limit", "e3m0 encode", ">= 0.2 ", "topk-2bit decode_add"],
    "collective": ["peer ms", "limit", "coordinator", "all-reduce fp32", "1000 Mbit/s"],
    "convergence": [
        *("clock s", "synchronous", "dynamic local updates", "naive asynchronous"),
        *("delayed Nesterov", "decoupled, quorum 2", "streaming, e3m0 up"),
        *("loss <= 1.005 ", "clock <= 0.35 ", "loss >= 1.1 ", "loss <= 1.015 "),
    ],
    "coordinator_memory": ["highest", "restart on the journal", "<= "],
    "data": [
        *("peer ms", "a pass, dealt", "<= 1.03 ", "claims per window", "the ledger"),
        *("1 of 4 dies every", "with shares by number"),
    ],
    "deadlines": ["rounds/h", "learned", "600 s", "learned, max 3600 s"],
    "death": ["limit s", "SIGKILL", "SIGSTOP", "<= 1 ", "Starved for", "torchft"],
    "hook": ["peer ms", "limit", "the hook", "the pace", "<= 1 "],
    "jax": ["bare train step", "compile s", "bf16", "e3m0"],
    "many_islands": ["http.server", "ratio", "rounds per second", "heartbeat, p99"],
    "memory": ["limit", "in flight", "peak", "e3m0"],
    "outer": ["peer ms", "limit", "FragmentState.apply", "2 threads", "<= 1.7 "],
    "over_http": ["peer ms", "limit", "raw socket", "aiohttp", "TLS", ">= 0.67 "],
    "round": [
        *("peer ms", "limit", "bf16 beside floor bf16", "beside naive", "beside gloo"),
        *("seal (island)", "send (island)", "reduce (coordinator)"),
        *("journal (coordinator)", "apply (island)", "rest", "torchft"),
    ],
    "sharded": ["at rest", "leader", "plain ms"],
    "simulator": ["limit", "events", "messages", ">= 60000 "],
    "store": ["USD/1000", "ours", "naive", "<= ", "holds", "s3fs"],
    "utilisation": [
        *("simulated", "planned", "limits", "no overlap", "data parallel"),
        "plan within 5 ",
    ],
}
"""Texts of each bench's output: columns, limits, peers and phases.

A peer whose package is missing is named in a sentence of the output.
"""
NO_ENGINE = "SeaweedFS is not here"
"""The output of `store` where the engine of its bucket is not installed."""


def test_every_bench_has_a_smoke_test() -> None:
    """A bench without a smoke test would rot."""
    assert sorted(TABLES) == BENCHES


@pytest.mark.timeout(LONG_S + 10)
@pytest.mark.parametrize("bench", BENCHES)
def test_bench_runs_and_prints_its_table(bench: str) -> None:
    """It ends with status 0; columns, limits and peers are in its output."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, f"bench/{bench}.py", "--smoke"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    missing = [text for text in _texts(bench) if text not in done.stdout]
    assert not missing, f"{missing} not in:\n{done.stdout}"


def _texts(bench: str) -> list[str]:
    folder = str(Path(sys.executable).parent)
    if bench == "store" and shutil.which("weed", path=folder) is None:
        return [NO_ENGINE]
    return TABLES[bench]
