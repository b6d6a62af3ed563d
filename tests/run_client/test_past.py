"""A run tells the same before a restart of its coordinator, after it, and later."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.run_client import RunClient, open_run
from atoll.run_client.directory import DirectoryRunClient
from atoll.telemetry import Event, load_past, render_status
from atoll.telemetry.past_recorder import NAME
from tests.cli import stores
from tests.run_client.conftest import END_ROUNDS, served

TOLD = (
    *("island", "incarnation", "state", "counted", "late", "refused", "last_verdict"),
    *("loss", "tokens", "inner_steps", "round", "marks", "deaths", "version"),
    "as_of_unix_s",
)
"""Keys of an island's row that a restart does not change."""


@dataclass(frozen=True)
class Story:
    """What a client tells of a run."""

    document: dict[str, Any]
    events: list[Event]
    history: dict[str, Any]
    staged: list[Event]
    """The updates of island a, by a filter."""

    @classmethod
    def of(cls, client: RunClient) -> Story:
        document = dict(client.status().document)
        staged = client.older_events(limit=1000, kind="update_staged", island="a")
        return cls(document, client.events(), client.history(), staged.events)

    @property
    def islands(self) -> list[dict[str, Any]]:
        return [{key: row[key] for key in TOLD} for row in self.document["islands"]]

    @property
    def happened(self) -> list[tuple[str, dict[str, Any]]]:
        """The events of the run, without those of its processes."""
        told = [json.loads(json.dumps(event.as_dict())) for event in self.events]
        return [
            (row["event"], row)
            for row in told
            if row["event"] not in ("coordinator_started", "coordinator_stopped")
        ]


@dataclass(frozen=True)
class Lives:
    """A run that was served three times, and its directory."""

    directory: Path
    trained: Story
    restarted: Story
    rebuilt: Story


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, user: None) -> Lives:
    """Serve a run to its end, once more, and once more without its saved past."""
    directory = tmp_path_factory.mktemp("starts") / "run"
    stories = []
    for number in range(3):
        with served(directory) as url:
            if number == 0:
                stores.Trained(url).wait()
            with closing(open_run(url)) as client:
                stories.append(Story.of(client))
        if number == 1:
            (directory / NAME).unlink()
    return Lives(directory, *stories)


def test_a_restarted_coordinator_tells_what_islands_have_counted(lives: Lives) -> None:
    """Rounds, losses and bytes of an earlier life are not 0, and say their time."""
    assert [row["counted"] for row in lives.trained.islands] == [END_ROUNDS * 2] * 2
    assert lives.restarted.islands == lives.trained.islands
    assert lives.rebuilt.islands == lives.trained.islands
    (row, _) = lives.restarted.document["islands"]
    assert row["bytes_up"] > 0
    assert row["as_of_unix_s"] < lives.restarted.document["started_unix_s"]
    page = render_status(lives.restarted.document, width=200, is_colour=False)
    assert "2 islands reported nothing since the coordinator started" in page


def test_a_restarted_coordinator_tells_what_happened(lives: Lives) -> None:
    """`events` has the events of every life, and each life has a name."""
    assert lives.restarted.happened == lives.trained.happened
    assert len(lives.trained.happened) > END_ROUNDS * 2
    assert len({event.process for event in lives.rebuilt.events}) == 3
    starts = [
        event.fields["was_clean"]
        for event in lives.rebuilt.events
        if event.name == "coordinator_started"
    ]
    assert starts == [True, True, True]


def test_the_past_is_the_same_in_every_life(lives: Lives) -> None:
    """Curves, marks and rounds do not depend on who folded the events."""
    parts = ("curves", "marks", "rounds")
    first = {part: lives.trained.history[part] for part in parts}

    assert {part: lives.restarted.history[part] for part in parts} == first
    assert {part: lives.rebuilt.history[part] for part in parts} == first
    assert len(first["rounds"]) == END_ROUNDS * 2
    assert [row["marks"] for row in first["rounds"]] == ["##"] * END_ROUNDS * 2
    assert all(row["arrivals"].keys() == {"a", "b"} for row in first["rounds"])
    assert lives.restarted.history["missed"] == 0
    assert lives.restarted.history["is_from_start"] is True


def test_a_directory_tells_the_same_as_its_coordinator(lives: Lives) -> None:
    """Nobody serves it: status, events and history come from files alone."""
    with closing(DirectoryRunClient(lives.directory)) as client:
        story = Story.of(client)

    assert story.islands == lives.trained.islands
    assert story.happened == lives.trained.happened
    for part in ("curves", "marks", "rounds"):
        assert story.history[part] == lives.trained.history[part]
    committed = [row["round"] for row in story.document["recent"]]
    assert committed[-1] == END_ROUNDS


def test_a_page_has_only_the_events_that_were_asked_for(lives: Lives) -> None:
    """Served or not, it has the same updates of one island, in their order."""
    with closing(DirectoryRunClient(lives.directory)) as client:
        recorded = Story.of(client).staged
        page = client.older_events(limit=2, kind="round_committed")
        pages = [page.events]
        while page.before is not None:
            page = client.older_events(page.before, limit=2, kind="round_committed")
            pages.insert(0, page.events)

        whole = client.events()

    assert recorded == [
        event
        for event in whole
        if event.name == "update_staged" and event.fields["island"] == "a"
    ]
    assert len(recorded) >= END_ROUNDS * 2
    for story in (lives.trained, lives.restarted, lives.rebuilt):
        assert [event.as_dict() for event in story.staged] == [
            event.as_dict() for event in recorded
        ]
    rounds = [event.fields["round"] for events in pages for event in events]
    assert len(rounds) == END_ROUNDS * 2


def test_older_events_come_by_pages(lives: Lives) -> None:
    """Pages of 7 from the end to the beginning are all events, once."""
    with closing(DirectoryRunClient(lives.directory)) as client:
        whole = client.events()
        page = client.older_events(limit=7)
        pages = [page.events]
        while page.before is not None:
            page = client.older_events(page.before, limit=7)
            pages.insert(0, page.events)

        assert [event for events in pages for event in events] == whole
        with pytest.raises(UsageError, match="before='x' is no cursor"):
            client.older_events("x")
        with pytest.raises(UsageError, match="no longer kept"):
            client.older_events("00000000-1:0")
        with pytest.raises(UsageError, match="limit=0 must be from 1 to 1000"):
            client.older_events(limit=0)


def test_a_life_that_was_killed_is_told(lives: Lives, tmp_path: Path) -> None:
    """Without its last words the next start is not clean; a torn line is skipped."""
    path = lives.directory / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert b"coordinator_stopped" in lines[-1]
    killed = tmp_path / "events.jsonl"
    killed.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    past = load_past(tmp_path)

    assert past.missed == 0
    assert {name: island.counted for name, island in past.islands.items()} == {
        "a": END_ROUNDS * 2,
        "b": END_ROUNDS * 2,
    }


def test_ages_are_those_of_the_run(lives: Lives) -> None:
    """The age on the page is the run's; a new process is called one."""
    document = lives.restarted.document
    page = render_status(document, width=200, is_colour=False)

    assert document["created_unix_s"] < document["started_unix_s"]
    assert " old, coordinator started " in page
    assert "up 0" not in page


def test_what_a_new_life_was_not_told_is_unknown(lives: Lives, tmp_path: Path) -> None:
    """Without any events no key of an island's row is a zero."""
    keys = (
        *TOLD,
        "wait_s",
        "bytes_up",
        "bytes_down",
        "wait_share",
        "seen_s",
        "utilisation",
        "tokens_per_s",
    )
    with closing(DirectoryRunClient(lives.directory)) as client:
        kept = {path: path.read_bytes() for path in lives.directory.glob("*.jsonl*")}
        for path in kept:
            path.unlink()
        try:
            rows = client.status().document["islands"]
            document = client.status().document
        finally:
            for path, data in kept.items():
                path.write_bytes(data)

    zeros = {key for row in rows for key in keys if row[key] == 0}
    assert zeros == set()
    assert (document["stall_share"], document["stall_share_mean"]) == (None, None)
    assert "-" in render_status(document, width=200, is_colour=False)
