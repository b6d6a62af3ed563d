"""Two islands of which one takes six times as long for an inner step.

How many inner steps each makes follows from rosters, and is asserted. The shares of
time, which a busy machine changes, are compared within one test, and printed with -s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.disk import SystemDisk
from atoll.journal import Journal
from tests.e2e.rounds_again import ended_well
from tests.e2e.stage import QUICK, Settings, Stage

EVERY, OVERLAP_STEPS = 60, 4
STEP_S = {"a": 0.006, "b": 0.036}

MODES: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "synchronous": (4, {}),
    "dynamic local updates": (16, {"dynamic_local_updates": True}),
    "asynchronous": (16, {"mode": "async"}),
}
"""How many rounds a run has, and how it closes them."""


@dataclass(frozen=True)
class Trained:
    """What the islands of one run have done, by island."""

    steps: dict[str, int]
    """Inner steps."""

    utilisation: dict[str, float]
    """The share of the time after the first round in which an island did not wait."""

    windows: dict[str, set[int]]
    """The windows that rosters have given."""

    ages: int
    """The highest age of an update that counted."""


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[dict[str, Stage]]:
    """Return a stage for each mode."""
    stages = {}
    for mode, (rounds, sync) in MODES.items():
        settings: Settings = {
            **QUICK,
            "run": {"name": "unequal", "start_islands": 2, "end_rounds": rounds},
            "sync": {
                "sync_every": EVERY,
                "num_fragments": 2,
                "overlap_steps": OVERLAP_STEPS,
                **sync,
            },
            # A busy machine delays an island beyond a learned deadline.
            "limits": {"deadline_min_s": 60.0},
        }
        folder = tmp_path / mode
        folder.mkdir()
        stages[mode] = Stage(folder, settings)
    yield stages
    for stage in stages.values():
        stage.close()


def trained(stage: Stage) -> Trained:
    """Train both islands to the end; nobody's work is lost, and none counts twice."""
    stage.serve()
    for name, step_s in STEP_S.items():
        stage.island(name, step_s=step_s, module="tests.e2e.paced_island")
    _, reports = ended_well(stage)
    disk = SystemDisk(stage.directory / "journal")
    try:
        rosters = [*Journal.open(disk).recorded.rosters.values()]
    finally:
        disk.close()
    entries = [entry for roster in rosters for entry in roster.entries]
    return Trained(
        steps={name: report["inner_steps"] for name, report in reports.items()},
        utilisation={
            name: utilisation(report["notes"]) for name, report in reports.items()
        },
        windows={
            name: {entry.window or EVERY for entry in entries if entry.island == name}
            for name in STEP_S
        },
        ages=max(entry.age for entry in entries),
    )


def utilisation(notes: list[dict[str, Any]]) -> float:
    """Return the share that was not waiting, from the second round to the last.

    In the first round no pace is known, and islands start one after the other.
    """
    first = next(note for note in notes if note["round"] >= 1)
    waited_s = notes[-1]["wait_s"] - first["wait_s"]
    return float(1.0 - waited_s / (notes[-1]["at_s"] - first["at_s"]))


@pytest.mark.timeout(300)
def test_a_fast_island_waits_for_a_slow_one_only_where_all_make_every_step(
    stages: dict[str, Stage],
) -> None:
    """It makes more inner steps with shorter windows of the other, and in async."""
    runs = {mode: trained(stage) for mode, stage in stages.items()}
    for mode, run in runs.items():
        shares = ", ".join(f"{n} {share:.1%}" for n, share in run.utilisation.items())
        stages[mode].tell(f"{mode}: {shares}, inner steps {run.steps}")

    waiting, dynamic, free = runs.values()
    # In step: the faster one makes the overlap more, and waits for the last outcome.
    assert abs(waiting.steps["a"] - waiting.steps["b"]) <= OVERLAP_STEPS
    assert waiting.windows == {"a": {EVERY}, "b": {EVERY}}
    assert waiting.ages == dynamic.ages == 0

    assert dynamic.windows["a"] == {EVERY}
    assert max(dynamic.windows["b"] - {EVERY}) < EVERY / 2
    assert dynamic.steps["b"] < dynamic.steps["a"] / 2

    assert free.windows == {"a": {EVERY}, "b": {EVERY}}
    assert free.steps["b"] < free.steps["a"] / 2
    assert free.ages >= 1
    for run in (dynamic, free):
        assert 1.0 - run.utilisation["a"] < (1.0 - waiting.utilisation["a"]) / 2
