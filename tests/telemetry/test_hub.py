"""The hub: order, late readers, and sinks that are slow or broken."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

from atoll.errors import UsageError
from atoll.telemetry import (
    Event,
    EventBus,
)
from atoll.telemetry.bus import MAX_RETAINED

PATIENCE_S = 60.0


class Stuck:
    """A sink that is busy with its first event until it is released."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.is_busy = threading.Event()
        self.released = threading.Event()

    def __call__(self, event: Event) -> None:
        self.seen.append(event)
        self.is_busy.set()
        assert self.released.wait(PATIENCE_S)


def broken(event: Event) -> None:
    raise ValueError(event.name)


def rounds(events: list[Event]) -> list[object]:
    """Return the round each event is of; the name of one that has none."""
    return [event.fields.get("round", event.name) for event in events]


def test_events_are_numbered_and_timed() -> None:
    """The first is number 1, and the hub's clock says when."""
    events = EventBus(unix_s=lambda: 12.5)

    first = events.emit("run_created")
    second = events.emit("run_paused")

    assert (first.number, second.number, events.newest) == (1, 2, 2)
    assert first.at_unix_s == 12.5


def test_what_is_refused_is_told_to_nobody() -> None:
    """A wrong event takes no number."""
    events = EventBus()

    with pytest.raises(UsageError, match="No event"):
        events.emit("nothing")

    assert events.newest == 0


def test_a_late_reader_gets_what_is_kept() -> None:
    """Of 1,500 events the last 1,000 can be read, and those after a number."""
    events = EventBus()
    for number in range(1, MAX_RETAINED + 501):
        events.emit("run_ended", round=number)

    assert [event.number for event in events.after(0)] == list(
        range(501, MAX_RETAINED + 501)
    )
    assert [event.number for event in events.after(1498)] == [1499, 1500]
    assert [event.number for event in events.after(1000, limit=2)] == [1001, 1002]
    assert events.after(1500) == []


def test_a_number_from_an_earlier_life_misses_nothing() -> None:
    """A reader that outlived a coordinator's restart gets all that is kept."""
    events = EventBus()
    events.emit("run_created")

    assert [event.number for event in events.after(900)] == [1]


def test_a_sink_gets_every_event_in_order() -> None:
    """Also when several threads emit at the same time."""
    events, seen = EventBus(), list[Event]()
    subscription = events.subscribe(seen.append, name="list")

    with ThreadPoolExecutor(4) as pool:
        for number in range(400):
            pool.submit(events.emit, "run_ended", round=number)

    assert subscription.close(within_s=PATIENCE_S)
    assert [event.number for event in seen] == list(range(1, 401))
    assert {event.fields["round"] for event in seen} == set(range(400))


def test_a_late_sink_begins_where_it_asks() -> None:
    """Nothing is missed or doubled between what is kept and what is new."""
    events, seen = EventBus(), list[Event]()
    for number in range(3):
        events.emit("run_ended", round=number)

    subscription = events.subscribe(seen.append, name="late", after=1)
    events.emit("run_ended", round=3)

    assert subscription.close(within_s=PATIENCE_S)
    assert rounds(seen) == [1, 2, 3]


def test_a_stuck_sink_disturbs_nobody() -> None:
    """Emitting returns, and the others hear, while one sink hangs."""
    events, stuck, seen = EventBus(), Stuck(), SimpleQueue[Event]()
    events.subscribe(stuck, name="stuck", max_waiting=2)
    events.subscribe(seen.put, name="well")

    for number in range(10):
        events.emit("run_ended", round=number)

    heard = [seen.get(timeout=PATIENCE_S) for _ in range(10)]
    assert rounds(heard) == list(range(10))
    stuck.released.set()
    events.close(within_s=PATIENCE_S)


def test_a_slow_sink_is_told_of_what_it_missed() -> None:
    """What found no room is counted and becomes an event for all."""
    events, stuck, heard = EventBus(), Stuck(), SimpleQueue[Event]()
    events.subscribe(stuck, name="slow", max_waiting=2)
    events.emit("run_ended", round=0)
    assert stuck.is_busy.wait(PATIENCE_S)
    for number in range(1, 6):  # 0 is with the sink, 1 and 2 wait, 3 to 5 find no room
        events.emit("run_ended", round=number)
    assert events.counters().dropped == {"slow": 3}

    events.subscribe(heard.put, name="well")
    stuck.released.set()

    told = heard.get(timeout=PATIENCE_S)
    assert told.name == "events_dropped"
    assert dict(told.fields) == {"sink": "slow", "dropped": 3, "reason": "slow"}
    events.close(within_s=PATIENCE_S)
    assert rounds(stuck.seen) == [0, 1, 2, "events_dropped"]


def test_a_broken_sink_is_told_of_ever_less() -> None:
    """A sink that always raises fills neither the log nor its own queue."""
    events, heard = EventBus(), list[Event]()
    broken_one = events.subscribe(broken, name="broken")
    well = events.subscribe(heard.append, name="well")
    for number in range(100):
        events.emit("run_ended", round=number)

    assert broken_one.close(within_s=PATIENCE_S)
    assert well.close(within_s=PATIENCE_S)

    told = [event for event in heard if event.name == "events_dropped"]
    # 1, 2, 4, ... 64 are seven at most, and the last word is one more.
    assert 1 <= len(told) <= 8
    assert told[-1].fields["reason"] == "raised ValueError"
    assert told[-1].fields["dropped"] == 100
    assert len(heard) == 100 + len(told)


def test_a_sink_may_emit() -> None:
    """A sink that tells of its trouble hears itself, and nothing hangs."""
    events, seen = EventBus(), SimpleQueue[Event]()

    def telling(event: Event) -> None:
        if event.name == "run_created":
            events.emit("disk_failed", message="full")
        seen.put(event)

    events.subscribe(telling, name="telling")
    events.emit("run_created")

    names = [seen.get(timeout=PATIENCE_S).name for _ in range(2)]
    assert names == ["run_created", "disk_failed"]
    events.close(within_s=PATIENCE_S)


def test_closing_does_not_wait_for_ever() -> None:
    """A sink that hangs is left behind after the time that is given."""
    events, stuck = EventBus(), Stuck()
    subscription = events.subscribe(stuck, name="stuck")
    events.emit("run_created")
    assert stuck.is_busy.wait(PATIENCE_S)

    events.close(within_s=0.0)

    assert not subscription.close(within_s=0.0)
    stuck.released.set()
    assert subscription.close(within_s=PATIENCE_S)


def test_after_closing_events_are_kept_and_sinks_are_left_alone() -> None:
    """The last words of a coordinator can still be read."""
    events, seen = EventBus(), list[Event]()
    events.subscribe(seen.append, name="list")
    events.emit("run_created")
    events.close(within_s=PATIENCE_S)

    events.emit("run_ended", round=1)
    events.close(within_s=PATIENCE_S)

    assert [event.name for event in seen] == ["run_created"]
    assert [event.name for event in events.after(0)] == ["run_created", "run_ended"]


def test_events_are_counted_by_name() -> None:
    """Also those that are kept no longer."""
    events = EventBus()
    events.subscribe(lambda event: None, name="none")
    for number in range(MAX_RETAINED + 1):
        events.emit("run_ended", round=number)
    events.close(within_s=PATIENCE_S)

    assert events.counters().events == {"run_ended": MAX_RETAINED + 1}
    assert events.counters().dropped == {"none": 0}


def test_a_queue_has_room_for_one() -> None:
    """A sink that could never get anything is refused."""
    with pytest.raises(UsageError, match="max_waiting=0 must be at least 1"):
        EventBus().subscribe(broken, name="none", max_waiting=0)
