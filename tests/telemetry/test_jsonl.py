"""Lines of JSON in a run's directory: whole, bounded, and never in the run's way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from atoll.errors import UsageError
from atoll.telemetry import (
    Event,
    EventBus,
    JsonlWriter,
)
from atoll.telemetry.events import checked

FULL = Path("/dev/full")


def ended(number: int) -> Event:
    """Return an event with a number to know it by."""
    return Event(number, 1.5, "run_ended", checked("run_ended", {"round": number}))


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(path: Path) -> list[int]:
    """Return the numbers of the events in a file."""
    return [line["number"] for line in read(path)]


def test_a_line_is_an_event(tmp_path: Path) -> None:
    """It can be read as soon as the event was written, by its owner only."""
    write = JsonlWriter(tmp_path)

    write(ended(7))

    (line,) = read(tmp_path / "events.jsonl")
    assert line == {"number": 7, "at": 1.5, "event": "run_ended", "round": 7}
    assert write.path.stat().st_mode & 0o777 == 0o600


def test_a_restart_appends(tmp_path: Path) -> None:
    """What an earlier life wrote stays."""
    JsonlWriter(tmp_path)(ended(1))
    JsonlWriter(tmp_path)(ended(2))

    assert numbers(tmp_path / "events.jsonl") == [1, 2]


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    """After a power cut in the middle of a line the next event has its own."""
    (tmp_path / "events.jsonl").write_text('{"number":1,"at"')

    JsonlWriter(tmp_path)(ended(2))

    torn, whole = (tmp_path / "events.jsonl").read_text().splitlines()
    assert torn == '{"number":1,"at"'
    assert json.loads(whole)["number"] == 2


def test_a_name_cannot_make_a_line(tmp_path: Path) -> None:
    """Line feeds and what terminals obey are written as their numbers."""
    name = 'a\n{"event":"forged"}\x1b[2J\u2028東'
    write = JsonlWriter(tmp_path)

    write(Event(1, 0.0, "island_silent", checked("island_silent", {"island": name})))

    (line,) = read(write.path)
    assert line["island"] == name
    assert write.path.read_bytes().isascii()
    assert b"\x1b" not in write.path.read_bytes()


def test_files_are_put_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    """No file exceeds its bound, and no more are kept than were asked for."""
    # A line of these is 51 or 52 bytes long, so two fit into 110.
    write = JsonlWriter(tmp_path, max_bytes=110, keep=4)

    for number in range(1, 12):
        write(ended(number))

    assert numbers(tmp_path / "events.jsonl") == [11]
    assert numbers(tmp_path / "events.1.jsonl") == [9, 10]
    assert numbers(tmp_path / "events.2.jsonl") == [7, 8]
    assert numbers(tmp_path / "events.3.jsonl") == [5, 6]
    assert len(os.listdir(tmp_path)) == 4
    assert write.lost == 0


def test_one_file_may_be_all(tmp_path: Path) -> None:
    """With one file kept, a full one is begun anew."""
    write = JsonlWriter(tmp_path, max_bytes=110, keep=1)

    for number in range(1, 4):
        write(ended(number))

    assert numbers(tmp_path / "events.jsonl") == [3]
    assert len(os.listdir(tmp_path)) == 1


def test_a_full_disk_is_told_once_and_survived(tmp_path: Path) -> None:
    """Events are counted while there is no room, and written when there is again."""
    said: list[str] = []
    write = JsonlWriter(tmp_path, on_failure=said.append)
    write.path.symlink_to(FULL)

    write(ended(1))
    write(ended(2))
    write.path.unlink()
    write(ended(3))

    assert write.lost == 2
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert "free some space" in said[0]
    assert numbers(write.path) == [3]


def test_a_second_failure_is_told_again(tmp_path: Path) -> None:
    """Once per time that it fails, not once for ever."""
    said: list[str] = []
    write = JsonlWriter(tmp_path, on_failure=said.append)
    for number in range(2):
        write.path.symlink_to(FULL)
        write(ended(number))
        write.path.unlink()
        write(ended(number))
        write.close()
        write.path.unlink()

    assert (len(said), write.lost) == (2, 2)


def test_a_directory_that_is_not_there_stops_nothing(tmp_path: Path) -> None:
    """Nothing raises into the run."""
    write = JsonlWriter(tmp_path / "absent")

    write(ended(1))

    assert write.lost == 1


def test_a_failure_told_through_the_hub_does_not_feed_itself(tmp_path: Path) -> None:
    """The event about a full disk fails too, and that is not told again."""
    events = EventBus()
    (tmp_path / "events.jsonl").symlink_to(FULL)
    write = JsonlWriter(
        tmp_path, on_failure=lambda said: events.emit("disk_failed", message=said)
    )
    heard = SimpleQueue[Event]()
    subscription = events.subscribe(write, name="jsonl")
    events.subscribe(heard.put, name="well")

    events.emit("run_created")
    while heard.get(timeout=60.0).name != "disk_failed":
        pass
    assert subscription.close(within_s=60.0)

    assert write.lost == 2  # the first event, and the one that tells of it
    assert [event.name for event in events.after(0)] == ["run_created", "disk_failed"]


def test_bounds_must_leave_room(tmp_path: Path) -> None:
    """No files, or files without bytes, are refused."""
    with pytest.raises(UsageError, match="keep=0"):
        JsonlWriter(tmp_path, keep=0)
