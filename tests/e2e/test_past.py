"""A run tells one story: while it trains, after crashes, and when it is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import RunSettings
from atoll.run_client import open_run
from atoll.run_client.directory import DirectoryRunClient
from tests.e2e.stage import ROOT, Stage, settings_for, until

LONG_S = 200.0
"""Processes start slowly on a busy machine."""

ISLAND = "tests.e2e.past_island"
REPORTED = (
    *("island", "incarnation", "counted", "late", "refused", "marks", "deaths"),
    *("loss", "tokens", "inner_steps", "version"),
)
"""Keys of an island's row that no crash of the coordinator changes."""

PROCESSES = ("coordinator_started", "coordinator_stopped", "run_paused", "run_resumed")


@dataclass(frozen=True)
class Story:
    """The islands, the commits and the marks that a run tells of."""

    islands: list[dict[str, Any]]
    commits: list[tuple[int, int, str]]
    joins: list[tuple[str, int]]
    rounds: list[tuple[int, int, str]]

    @classmethod
    def of(
        cls,
        document: dict[str, Any],
        events: list[dict[str, Any]],
        past: dict[str, Any],
    ) -> Story:
        return cls(
            [{key: row[key] for key in REPORTED} for row in document["islands"]],
            [
                (event["fragment"], event["round"], event["digest"])
                for event in events
                if event["event"] == "round_committed"
            ],
            [
                (event["island"], event["incarnation"])
                for event in events
                if event["event"] == "island_joined"
            ],
            [(row["fragment"], row["round"], row["marks"]) for row in past["rounds"]],
        )


def story_of(stage: Stage) -> Story:
    """Return the story that the coordinator tells."""
    past = until("the past", lambda: _answer(stage, "/history"))
    events = stage.ask("GET", "/events?limit=1000").json()["events"]
    return Story.of(stage.status(), events, past)


def _answer(stage: Stage, target: str) -> Any:
    reply = stage.ask("GET", target)
    return reply.json() if reply.status == 200 else None


def settled(stage: Stage) -> Story:
    """Return the story of a paused run whose islands all wait."""
    stories = [story_of(stage)]

    def is_still() -> bool:
        time.sleep(4.0)  # islands that only wait send a heartbeat every 3 s
        stories.append(story_of(stage))
        return stories[-1] == stories[-2]

    until("the islands to wait", is_still, within_s=LONG_S)
    return stories[-1]


def until_committed(stage: Stage, round: int) -> None:
    """Return when every fragment has committed a round."""
    until(f"round {round}", lambda: stage.committed() >= round, within_s=LONG_S)


def same_again(stage: Stage, before: Story) -> Story:
    """Return the story once all islands have sent a heartbeat to the new process."""

    def story() -> Story | None:
        present = story_of(stage)
        return present if present.islands == before.islands else None

    found: Story = until("the islands' heartbeats", story, within_s=LONG_S)
    return found


def test_crashes_of_the_coordinator_change_nothing_of_the_story(stage: Stage) -> None:
    """Killed twice, with an island killed between: before, after and at the end."""
    stage.settings = settings_for(3, 14)
    stage.serve()
    a, b, c = (stage.island(name, module=ISLAND, step_s=0.01) for name in "abc")
    for crash, round in enumerate((3, 7), start=1):
        until_committed(stage, round)
        stage.ask("POST", "/control/pause")
        before = settled(stage)
        stage.kill()
        stage.serve()
        after = same_again(stage, before)
        assert after == before
        assert all(row["counted"] >= 2 * round for row in after.islands[:2])
        assert _starts(stage) == crash + 1
        assert "restarted" in found(stage)
        if crash == 1:
            c.kill()
            until("c to be silent", lambda: "silent" in found(stage), within_s=LONG_S)
        stage.ask("POST", "/control/resume")
    a.ends_well(LONG_S)
    b.ends_well(LONG_S)
    end = settled(stage)
    stage.kill()
    with closing(DirectoryRunClient(stage.directory)) as client:
        document = json.loads(json.dumps(client.status().document))
        events = [json.loads(json.dumps(e.as_dict())) for e in client.events()]
        recorded = Story.of(document, events, client.history())

    assert recorded == end
    assert [round for fragment, round, _ in end.commits if fragment == 0] == [
        *range(1, 15)
    ]
    assert end.joins == [(name, 1) for name, _ in end.joins]
    assert {name for name, _ in end.joins} == {"a", "b", "c"}
    marks = {row["island"]: row["marks"] for row in end.islands}
    assert "#" in marks["a"]
    assert marks["c"].endswith(("~", "."))


def found(stage: Stage) -> set[str]:
    """Return the kinds of the present findings."""
    return {row["kind"] for row in stage.status()["findings"]}


def _starts(stage: Stage) -> int:
    starts = stage.status()["starts"]
    assert isinstance(starts, int)
    return starts


@contextmanager
def stored_islands(
    url: str, folder: Path, names: str
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start islands of a run in a store; kill those that are left."""
    places = {
        "XDG_CONFIG_HOME": str(folder / "user"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "ATOLL_HEARTBEAT_S": "1",
    }
    islands = {
        name: subprocess.Popen(
            [
                *(sys.executable, "-m", ISLAND, url, name),
                *("--folder", str(folder), "--step-s", "0.05"),
            ],
            env={**os.environ, **places},
            cwd=ROOT,
        )
        for name in names
    }
    try:
        yield islands
    finally:
        for process in islands.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("killed", ["c"])
def test_a_bucket_tells_the_story_from_the_first_round_on(
    tmp_path: Path, killed: str
) -> None:
    """Curves while it trains; an island that was killed keeps those that it had put."""
    url = str(tmp_path / "bucket")
    given = {key: dict(value) for key, value in settings_for(3, 24).items()}
    atoll.init(url, RunSettings.from_dict(given))
    with (
        stored_islands(url, tmp_path, "abc") as islands,
        closing(open_run(url)) as first,
    ):
        pasts = tmp_path / "bucket" / "past"
        until(
            "the first pasts",
            lambda: pasts.exists() and len([*pasts.iterdir()]) > 2,
            within_s=LONG_S,
        )
        early = first.history()["curves"]
        islands[killed].kill()
        for name in "ab":
            assert islands[name].wait(LONG_S) == 0
    with closing(open_run(url)) as client:
        history, document = client.history(), client.status().document
        events = client.events()

    assert all(any(early["islands"][name]["tokens"]) for name in "abc")
    late = history["curves"]["islands"]
    rows = {row["island"]: row for row in document["islands"]}
    for name in "ab":
        steps = json.loads((tmp_path / f"{name}.json").read_text())["inner_steps"]
        assert late[name]["tokens"][-1] == rows[name]["tokens"] == 7 * steps
    assert any(late[killed]["tokens"])
    names = [event.name for event in events]
    assert names.count("island_left") == 2
    assert names.count("round_committed") == 24 * 2
    committed = [row["marks"] for row in history["rounds"]]
    slot = history["marks"]["islands"].index(killed)
    assert committed[-1].ljust(slot + 1, ".")[slot] in ".~"
