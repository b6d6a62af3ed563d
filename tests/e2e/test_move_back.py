"""A run goes from a store to a coordinator, whatever dies on the way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.move_stage import MoveStage
from tests.e2e.places_again import rounds_at
from tests.e2e.rounds_again import require_all_work, require_same_end
from tests.e2e.stage import Island, Stage, settings_for, until

ROUNDS = 30
NAMES = "abc"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[MoveStage]:
    stage = MoveStage(tmp_path, settings_for(3, ROUNDS))
    yield stage
    stage.close()


def started(stage: MoveStage) -> list[Island]:
    """Return three islands that have trained for some rounds in a store."""
    stage.make()
    islands = [stage.island(name) for name in NAMES]
    stage.until_closed(3)
    return islands


def ended_at_coordinator(
    stage: MoveStage, islands: list[Island]
) -> dict[str, dict[str, Any]]:
    """Wait for the end; require all rounds, one anchor and everybody's work."""
    directory = stage.coordinator.directory
    again, reports = stage.ended_at(islands, stage.bucket, directory)
    assert again.rounds == [ROUNDS, ROUNDS]
    assert all(report["incarnation"] == 1 for report in reports.values())
    return {name: dict(report) for name, report in reports.items()}


def test_islands_follow_their_run_to_a_coordinator(stage: MoveStage) -> None:
    """They go on training, and every round is what doing it again comes to."""
    islands = started(stage)
    said = stage.move()
    assert said.returncode == 0, said.stderr
    assert "serve it now" in said.stdout
    stage.serve()
    at = stage.coordinator.committed()

    ended_at_coordinator(stage, islands)
    assert at < ROUNDS


POINTS = [
    pytest.param("before:say:move.", id="before islands are told"),
    pytest.param("after:say:move.", id="when the word is said"),
    pytest.param("after:disk:log/", id="when there is the beginning of a journal"),
    pytest.param("before:disk:states/1", id="before the states are whole"),
    pytest.param("after:disk:append log/", id="when the journal has its states"),
    pytest.param("before:say:moved.", id="when all but the last word is there"),
    pytest.param("after:say:moved.", id="when the run is at the coordinator"),
    pytest.param("after:rename", id="when its directory says so"),
]


@pytest.mark.parametrize("point", POINTS)
def test_a_move_that_dies_goes_on_when_it_is_said_again(
    stage: MoveStage, point: str
) -> None:
    """The run is at one place, and the same command takes it to the other.

    Nobody can serve it before it is there.
    """
    islands = started(stage)
    assert stage.move("--dies-at", point).returncode == -signal.SIGKILL
    assert ("moved" in stage.words()) == (point in LATE)
    is_served = stage.can_be_served()
    assert is_served == (point == "after:rename")
    said = stage.move()
    assert said.returncode == 0, said.stderr
    stage.serve(is_up=is_served)

    ended_at_coordinator(stage, islands)


LATE = ("after:say:moved.", "after:rename")


@pytest.mark.parametrize("point", ["after:say:move.", "before:disk:states/1"])
def test_a_move_that_dies_can_be_given_up(stage: MoveStage, point: str) -> None:
    """The run goes on in its store, and can be moved another time."""
    islands = started(stage)
    stage.move("--dies-at", point)
    said = stage.move("--back")
    assert said.returncode == 0, said.stderr
    assert stage.words() == ["move", "stay"]
    assert not (stage.coordinator.directory / "journal.arriving").exists()
    assert stage.move("--dies-at", "before:say:moved.").returncode < 0
    assert stage.move("--back").returncode == 0

    again, _ = stage.ended_at(islands, stage.bucket)
    assert again.rounds == [ROUNDS, ROUNDS]


def test_giving_up_too_late_says_where_the_run_is(stage: MoveStage) -> None:
    """The run is at the coordinator: its directory is made right on the way."""
    islands = started(stage)
    stage.move("--dies-at", "after:say:moved.")
    said = stage.move("--back")
    assert (said.returncode, "has moved to" in said.stderr) == (4, True)
    stage.serve()

    ended_at_coordinator(stage, islands)


def test_one_directory_has_the_run(stage: MoveStage) -> None:
    """Another one does not get it, before or after it is there."""
    islands = started(stage)
    other = Stage(stage.folder, stage.settings, name="other")
    other.port = stage.coordinator.port
    stage.move("--dies-at", "before:say:moved.")
    said = stage.move(target=other)
    assert (said.returncode, "by another directory" in said.stderr) == (2, True)
    assert not other.directory.exists()
    assert stage.move().returncode == 0
    said = stage.move(target=other)
    assert (said.returncode, "has moved" in said.stderr) == (2, True)
    said = stage.say(stage.bucket, "http://127.0.0.1:1", "--dir", str(other.directory))
    assert (said.returncode, "Name that one" in said.stderr) == (2, True)
    stage.serve()

    ended_at_coordinator(stage, islands)


def test_an_island_may_leave_while_its_run_is_on_its_way(stage: MoveStage) -> None:
    """It waits a while, departs where the run is then, and its work counts."""
    a, b, c = started(stage)
    stage.move("--dies-at", "before:say:moved.")
    c.signal(signal.SIGTERM)
    assert stage.move().returncode == 0
    stage.serve()

    reports = ended_at_coordinator(stage, [a, b, c])
    assert reports["c"]["why"] == "terminated"


@pytest.mark.parametrize("point", ["before:/roster", "after:/roster", "after:say:move"])
def test_work_of_an_island_that_has_left_counts_once(
    stage: MoveStage, point: str
) -> None:
    """The move closes its round, though it dies before or after the roster is put."""
    a, b, c = started(stage)
    stage.control("pause")
    c.signal(signal.SIGTERM)
    assert c.wait()["why"] == "terminated"
    assert stage.move("--dies-at", point).returncode == -signal.SIGKILL
    assert stage.move().returncode == 0
    stage.serve()
    stage.control("resume")

    reports = ended_at_coordinator(stage, [a, b, c])
    assert reports["c"]["why"] == "terminated"


def test_an_island_that_died_while_its_run_moves_begins_again(stage: MoveStage) -> None:
    """Its next life is sent on by the store."""
    a, b, c = started(stage)
    stage.move("--dies-at", "after:say:move.")
    c.kill()
    assert stage.move().returncode == 0
    stage.serve()
    again = stage.island("c")

    reports = {each.name: each.wait() for each in (a, b, again)}
    stage.coordinator.close_coordinator()
    updates = stage.folder / "updates"
    rounds = rounds_at(updates, stage.bucket, stage.coordinator.directory)
    require_same_end(rounds, reports.values())
    assert rounds.rounds == [ROUNDS, ROUNDS]
    assert reports["c"]["incarnation"] == 2
    for name in "ab":
        require_all_work(rounds, name, reports[name])


def test_an_island_without_a_credential_waits_for_one(stage: MoveStage) -> None:
    """It says what it lacks, keeps its work, and goes on when it has got one."""
    stage.make()
    islands = [stage.island(name) for name in "ab"]
    stranger = stage.island("c", user="stranger")
    stage.until_closed(3)
    assert stage.move().returncode == 0
    stage.serve()
    told = "No token is known for"
    until("c to say what it lacks", lambda: told in stranger.log.read_text())
    stage.know("stranger")

    reports = ended_at_coordinator(stage, [*islands, stranger])
    assert reports["c"]["why"] == "ended"


def test_a_run_goes_to_a_store_and_back(stage: MoveStage) -> None:
    """From one coordinator to a store, and from there to another coordinator."""
    first = Stage(stage.folder, stage.settings, name="first")
    stage.serve(first)
    islands = [stage.island(name, url=first.url) for name in NAMES]
    first.until_committed(3)
    said = stage.say(first.url, stage.bucket)
    assert said.returncode == 0, said.stderr
    said = stage.move()
    assert said.returncode == 0, said.stderr
    stage.serve()

    places = first.directory, stage.bucket, stage.coordinator.directory
    again, reports = stage.ended_at(islands, *places)
    assert again.rounds == [ROUNDS, ROUNDS]
    assert all(report["incarnation"] == 1 for report in reports.values())
