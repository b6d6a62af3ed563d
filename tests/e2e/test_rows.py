"""Rows that a run deals out, trained by real processes that die and that come later."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.launch import Launched
from atoll.launch.launches import LaunchRecords
from atoll.run_client import try_status
from tests.cli.runs import as_user
from tests.e2e.stage import ROOT, Stage, until

ROWS, UNIT_ROWS = 6400, 32
KILLED_EVERY, KILLS = 6, 3
"""Rounds between two deaths of the island, and deaths."""

DEALT: dict[str, dict[str, object]] = {
    "run": {"name": "stage", "start_islands": 4},
    "sync": {"sync_every": 5, "num_fragments": 1, "overlap_steps": 1},
    "wire": {"up": "fp32", "down": "fp32"},
    "limits": {"deadline_max_s": 60.0},
    "data": {"order": "run", "unit_rows": UNIT_ROWS},
}
ISLAND = "tests.e2e.row_island"


def seen(folder: Path, name: str) -> Counter[int]:
    """Return how often the loop of an island was given each row, over all its lives."""
    numbers = np.fromfile(folder / f"{name}.seen", np.int64)
    return Counter(numbers.tolist())


@pytest.mark.timeout(400)
def test_a_pass_is_whole_although_an_island_dies_again_and_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four is killed every six rounds: trained / rows = 1.000.

    What a loop was given twice is in the lost window of a life that was killed.
    """
    monkeypatch.setenv("DEALT_ROWS", str(ROWS))
    stage.settings = DEALT
    stage.serve()
    others = [stage.island(name, module=ISLAND, step_s=0.02) for name in "abc"]
    victim = stage.island("d", module=ISLAND, step_s=0.02)
    for number in range(1, KILLS + 1):
        stage.until_committed(number * KILLED_EVERY)
        victim.kill()
        victim = stage.island("d", module=ISLAND, step_s=0.02)
        stage.until_event("island_joined", island="d", incarnation=number + 1)
    for island in (*others, victim):
        island.wait(200.0)

    rows = stage.status()["data"]
    trained = rows["trained"] / rows["total"]
    stage.tell(f"d died {KILLS} times: rows trained / rows = {trained:.3f}")
    states = ("trained", "partly", "refused", "in_hand", "free")
    assert {name: rows[name] for name in states} == {
        **dict.fromkeys(states, 0),
        "trained": ROWS,
    }
    alive = sum((seen(stage.folder, name) for name in "abc"), Counter[int]())
    assert max(alive.values()) == 1
    every = alive + seen(stage.folder, "d")
    assert sorted(every) == list(range(ROWS))


@pytest.mark.timeout(500)
def test_an_island_that_is_added_trains_rows_that_the_others_have_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are launched, `atoll scale` adds a third one, and the status adds up."""
    as_user(monkeypatch, tmp_path / "home")
    monkeypatch.setenv("DEALT_ROWS", str(ROWS))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    run_file, table = tmp_path / "run.toml", tmp_path / "rows.csv"
    run_file.write_text(_run_file())
    hold = tmp_path / "hold"
    hold.touch()
    process = subprocess.Popen(
        [
            *_atoll("launch", "--on", "local", "-n", "2", str(run_file)),
            *("--dir", str(tmp_path / "stage.atoll"), "--"),
            *("python", "-m", ISLAND, "--folder", str(tmp_path), "--step-s", "0.02"),
        ],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        url = until("training", lambda: _url_in_training(process), within_s=120.0)
        scaled = subprocess.run(
            _atoll("scale", url, "3"), cwd=tmp_path, capture_output=True, text=True
        )
        assert scaled.returncode == 0, scaled.stderr
        mid = until("a third island", lambda: _rows_of_three(url), within_s=120.0)
        hold.unlink()
        said, _ = process.communicate(timeout=200.0)
    finally:
        process.kill()
        process.communicate()
        for record in LaunchRecords().records():
            Launched(record.handle).cancel(grace_s=0.0)

    assert process.returncode == 0, said
    states = ("trained", "partly", "refused", "in_hand", "free")
    assert sum(mid[name] for name in states) == mid["total"] == ROWS
    loops = [seen(tmp_path, f"local-{index}") for index in range(3)]
    assert all(loops)
    whole = sum(loops, Counter[int]())
    assert whole == Counter(range(ROWS))
    exported = subprocess.run(
        _atoll("export", str(tmp_path / "stage.atoll"), "--ledger", str(table)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert exported.returncode == 0, exported.stderr
    assert _trained_in(table) == {
        f"local-{index}": len(rows) for index, rows in enumerate(loops)
    }


def _run_file() -> str:
    lines = []
    for section, values in DEALT.items():
        lines.append(f"[{section}]")
        lines += [
            f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            for key, value in {**values, **_STARTED.get(section, {})}.items()
        ]
    return "\n".join(lines).replace("'", '"')


_STARTED: dict[str, dict[str, object]] = {"run": {"start_islands": 2}}


def _atoll(*words: str) -> list[str]:
    return [sys.executable, "-m", "atoll.cli", *words]


def _status(url: str) -> dict[str, Any] | None:
    status = try_status(url)
    return dict(status.document) if status is not None else None


def _url_in_training(process: subprocess.Popen[str]) -> str | None:
    """Return the run's URL once some rounds are over."""
    assert process.poll() is None, process.communicate()
    for record in LaunchRecords().records():
        status = None if record.is_coordinator else try_status(record.handle.run)
        if status is not None and status.round >= 2:
            return record.handle.run
    return None


def _rows_of_three(url: str) -> dict[str, Any] | None:
    """Return the rows of the run once the third island holds some."""
    document = _status(url)
    rows = document["data"] if document else None
    return rows if rows and "local-2" in rows["by_island"] else None


def _trained_in(table: Path) -> dict[str, int]:
    """Return the trained rows by island in an exported ledger."""
    trained: Counter[str] = Counter()
    with table.open() as file:
        for line in csv.DictReader(file):
            if line["state"] == "trained":
                trained[line["island"]] += int(line["end_turn"]) - int(
                    line["first_turn"]
                )
    return dict(trained)
