"""A run goes from its coordinator into a store, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.exchange.bucket import keys
from atoll.store import Store, open_store
from tests.e2e.move_stage import control
from tests.e2e.rounds_again import (
    Again,
    Report,
    moved_rounds_again,
    require_all_work,
    require_same_end,
)
from tests.e2e.stage import PATIENT_S, ROOT, Island, Stage, settings_for, until

ROUNDS = 30
NAMES = "abc"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path, settings_for(3, ROUNDS))
    yield stage
    stage.close()


def started(stage: Stage) -> list[Island]:
    """Return three islands that have trained for some rounds at a coordinator."""
    stage.serve()
    islands = [
        stage.island(name, step_s=0.02, module="tests.e2e.following_island")
        for name in NAMES
    ]
    stage.until_committed(3)
    return islands


def store_of(stage: Stage) -> tuple[str, Store]:
    url = str(stage.folder / "bucket")
    return url, open_store(url)


def move(stage: Stage, *options: str) -> subprocess.CompletedProcess[str]:
    """Take the run to the store, or begin to."""
    url, _ = store_of(stage)
    command = [sys.executable, "-m", "tests.e2e.move_process", stage.url, url]
    environment = {**os.environ, **stage.environment}
    return subprocess.run(
        [*command, *options],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENT_S,
        check=False,
    )


def ended_in_store(
    stage: Stage, islands: list[Island]
) -> tuple[Again, dict[str, Report]]:
    """Wait for the end; require one anchor, and nobody's work lost or twice."""
    reports: dict[str, Report] = {each.name: each.wait() for each in islands}
    stage.close_coordinator()
    _, store = store_of(stage)
    again = moved_rounds_again(stage.directory, store, stage.folder / "updates")
    require_same_end(again, reports.values())
    for name, report in reports.items():
        require_all_work(again, name, report)
    assert again.rounds == [ROUNDS, ROUNDS]
    assert all(report["incarnation"] == 1 for report in reports.values())
    return again, reports


def is_in_store(stage: Stage) -> bool:
    _, store = store_of(stage)
    return any(item.key == keys.SETTINGS for item in store.items("settings/"))


def test_islands_follow_their_run_into_a_store(stage: Stage) -> None:
    """They go on training, and every round is what doing it again comes to."""
    islands = started(stage)
    said = move(stage)
    assert said.returncode == 0, said.stderr
    assert "The run has moved to" in said.stdout
    at = stage.committed()

    ended_in_store(stage, islands)
    assert at < ROUNDS


POINTS: list[Any] = [
    pytest.param("before:/control/move", True, id="before the coordinator is told"),
    pytest.param("after:/control/move", True, id="when nothing closes any more"),
    pytest.param("before:complete", False, id="before a state is complete"),
    pytest.param("after:members", False, id="while members are put"),
    pytest.param("after:run.json", True, id="when all but the last word is put"),
    pytest.param("after:settings/0", True, id="when the run is in the store"),
    pytest.param("after:/control/moved", True, id="when islands are sent on"),
]


@pytest.mark.parametrize(("point", "with_coordinator"), POINTS)
def test_a_move_that_dies_goes_on_when_it_is_said_again(
    stage: Stage, point: str, with_coordinator: bool
) -> None:
    """The run is at one place, and the same command takes it to the other.

    The coordinator may die at the same moment.
    """
    islands = started(stage)
    assert move(stage, "--dies-at", point).returncode == -signal.SIGKILL
    if with_coordinator:
        stage.kill()
        assert stage.serve()
    is_there = is_in_store(stage)
    assert is_there == ("settings" in point or "moved" in point)
    said = move(stage)
    assert said.returncode == 0, said.stderr

    ended_in_store(stage, islands)


def test_an_island_may_leave_while_its_run_is_on_its_way(stage: Stage) -> None:
    """It waits a while, departs where the run is then, and its work counts."""
    a, b, c = started(stage)
    move(stage, "--dies-at", "after:/control/move")
    c.signal(signal.SIGTERM)
    assert move(stage).returncode == 0

    _, reports = ended_in_store(stage, [a, b, c])
    assert reports["c"]["why"] == "terminated"


@pytest.mark.parametrize("with_coordinator", [False, True])
def test_work_of_an_island_that_has_left_counts_once(
    stage: Stage, with_coordinator: bool
) -> None:
    """Its round closes before the run goes, though the coordinator dies meanwhile."""
    a, b, c = started(stage)
    control(stage.url, "pause", stage.environment)
    c.signal(signal.SIGTERM)
    assert c.wait()["why"] == "terminated"
    move(stage, "--dies-at", "after:/control/move")
    if with_coordinator:
        stage.kill()
        assert stage.serve()
    assert move(stage).returncode == 0
    control(store_of(stage)[0], "resume", stage.environment)

    _, reports = ended_in_store(stage, [a, b, c])
    assert reports["c"]["why"] == "terminated"


def test_an_island_that_died_while_its_run_moves_begins_again(stage: Stage) -> None:
    """Its next life finds its name at the run's new place."""
    a, b, c = started(stage)
    move(stage, "--dies-at", "after:/control/move")
    c.kill()
    assert move(stage).returncode == 0
    again = stage.island("c", step_s=0.02, module="tests.e2e.following_island")

    reports = {each.name: each.wait() for each in (a, b, again)}
    stage.close_coordinator()
    updates, (_, store) = stage.folder / "updates", store_of(stage)
    rounds = moved_rounds_again(stage.directory, store, updates)
    require_same_end(rounds, reports.values())
    assert rounds.rounds == [ROUNDS, ROUNDS]
    assert reports["c"]["incarnation"] == 2
    for name in "ab":
        require_all_work(rounds, name, reports[name])


def test_a_move_can_be_given_up(stage: Stage) -> None:
    """Before the run is in the store it stays; after that it cannot."""
    islands = started(stage)
    move(stage, "--dies-at", "after:run.json")
    assert stage.status()["state"] == "moving"
    at = stage.committed()
    said = move(stage, "--back")
    assert said.returncode == 0, said.stderr
    until("a round to close", lambda: stage.committed() > at)
    said = move(stage)
    assert (said.returncode, "already: " in said.stderr) == (2, True)

    for each in islands:
        assert each.wait()["rounds"] == [ROUNDS, ROUNDS]


def test_giving_up_too_late_says_where_the_run_is(stage: Stage) -> None:
    """The run is in the store: the coordinator is told, and so is the operator."""
    islands = started(stage)
    move(stage, "--dies-at", "after:settings/0")
    said = move(stage, "--back")
    assert (said.returncode, "has moved to" in said.stderr) == (4, True)

    ended_in_store(stage, islands)
