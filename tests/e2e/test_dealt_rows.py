"""Islands, as processes, that train the rows which a run in a bucket deals out."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.data import Spans
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.create import make_run
from atoll.run_client.base import Action, Command
from atoll.run_client.store import StoreRunClient
from atoll.settings import RunSettings
from atoll.store import open_store
from tests.e2e.stage import QUICK, ROOT, until
from tests.store.buckets import Settings
from tests.store.conftest import s3

__all__ = ["s3"]

ROWS, BATCH = 4000, 8

Started = dict[str, subprocess.Popen[bytes]]


def dealing(islands: int) -> RunSettings:
    """Return settings of a run of one fragment that ends with its data."""
    return RunSettings.from_dict(
        {
            **{key: dict(table) for key, table in QUICK.items()},
            "run": {"name": "stage", "start_islands": islands},
            "sync": {"sync_every": 10, "num_fragments": 1, "overlap_steps": 2},
            "data": {"order": "run", "unit_rows": 50},
        }
    )


@pytest.fixture
def started() -> Iterator[Started]:
    processes: Started = {}
    yield processes
    for process in processes.values():
        if process.poll() is None:
            process.kill()
            process.wait()


def start(started: Started, folder: Path, url: str, name: str) -> None:
    command = [
        *(sys.executable, "-m", "tests.e2e.dealt_island", url, name),
        *("--rows", str(ROWS), "--batch", str(BATCH)),
    ]
    places = {
        "XDG_CONFIG_HOME": str(folder / "user"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / f"{name}.log").open("a") as errors:
        started[name] = subprocess.Popen(
            command, env={**os.environ, **places}, cwd=ROOT, stderr=errors
        )


def lose_one(started: Started, folder: Path, url: str) -> None:
    """Let three islands train, kill and evict one of them; the others end the run."""
    store = open_store(url)
    make_run(store, dealing(3), url=url)
    for name in "abc":
        start(started, folder, url, name)
    until(
        "round 4 to be closed",
        lambda: any(
            item.key == keys.roster(0, 4)
            for item in store.items(keys.round_prefix(0, 4))
        ),
        within_s=120.0,
    )
    started["a"].kill()
    assert started["a"].wait() == -signal.SIGKILL
    client = StoreRunClient(url)
    client.control(Command(Action.EVICT, island="a"))
    client.close()
    for name in "bc":
        assert started[name].wait(timeout=300.0) == 0, log_of(folder, name)


def log_of(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text()[-2000:]


def require_each_row_once(url: str, folder: Path) -> None:
    """Compare the status and the exported ledger with all rows of the data."""
    client = StoreRunClient(url)
    data = client.status().document["data"]
    client.export_ledger(folder / "ledger.csv")
    client.close()
    counts = {name: data[name] for name in ("trained", "in_hand", "free", "refused")}
    assert counts == {"trained": ROWS, "in_hand": 0, "free": 0, "refused": 0}
    with (folder / "ledger.csv").open() as opened:
        lines = [line for line in csv.DictReader(opened) if line["state"] == "trained"]
    counted = [
        (int(line["first_turn"]), int(line["end_turn"]))
        for line in lines
        if line["verdict"] == "counted"
    ]
    assert sum(last - first for first, last in counted) == ROWS
    assert list(Spans(counted)) == [(0, ROWS)]
    assert {line["island"] for line in lines} == {"a", "b", "c"}


def test_a_killed_island_costs_no_row(started: Started, tmp_path: Path) -> None:
    """Its rows are dealt again once it is evicted, and every row counts once."""
    url = str(tmp_path / "bucket")

    lose_one(started, tmp_path, url)

    require_each_row_once(url, tmp_path)


def test_a_killed_island_costs_no_row_in_s3(
    started: Started, tmp_path: Path, s3: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the conditional puts of a real server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3["secret_access_key"])
    monkeypatch.setenv("AWS_REGION", s3["region"])
    url = f"s3://{s3['bucket']}/dealt"

    lose_one(started, tmp_path, url)

    require_each_row_once(url, tmp_path)
