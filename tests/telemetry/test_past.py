"""The past as a fold: it is bounded, keeps sums, and is the same however it is cut."""

from __future__ import annotations

import json
import math
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.telemetry import Event, Past, history
from atoll.telemetry.curves import COUNT, GROWING, MAX_MARKS, MAX_ROWS, worst
from atoll.telemetry.history import MAX_ANSWER_BYTES
from atoll.telemetry.island_past import LAST_MARKS
from atoll.telemetry.past import MAX_ARRIVALS, MAX_ISLANDS, MAX_NOTES, MIN_ROUNDS
from atoll.telemetry.past_recorder import read_past, write_past
from tests.telemetry.streams import BEGIN_UNIX_S, Stream, training

ISLANDS = ("a", "b", "c")


@st.composite
def drawn_events(draw: st.DrawFn) -> list[Event]:
    """Draw the events of a run with deaths, restarts and losses of every kind."""
    stream = Stream()
    stream.start(fragments=2)
    rounds = [0, 0]
    acts = st.sampled_from(["commit", "report", "join", "left", "silent", "start"])
    for act in draw(st.lists(acts, max_size=60)):
        stream.at_unix_s += draw(st.sampled_from([0.0, 0.5, 4.0, 30.0]))
        name = draw(st.sampled_from(ISLANDS))
        slot = ISLANDS.index(name)
        if act == "commit":
            fragment = draw(st.integers(0, 1))
            rounds[fragment] += 1
            marks = draw(st.text("#~.! ", min_size=3, max_size=3))
            stream.commit(fragment, rounds[fragment], marks)
        elif act == "report":
            loss = draw(st.none() | st.floats(0.0, 10.0))
            is_finite = draw(st.booleans())
            steps = draw(st.integers(0, 1000))
            stream.report(name, steps, loss, loss_is_finite=is_finite)
        elif act == "join":
            stream.join(name, slot, draw(st.integers(1, 4)))
        elif act == "start":
            stream.start(fragments=2, was_clean=draw(st.booleans()))
        else:
            stream.emit(f"island_{act}", island=name, incarnation=1, reason="left")
    return stream.made


def folded(events: list[Event], past: Past | None = None) -> Past:
    """Return the past after some events."""
    past = past or Past()
    for event in events:
        past.add(event)
    return past


def state(past: Past) -> str:
    """Return everything that a past knows, as a text that can be compared."""
    return json.dumps(list(past.parts()))


@settings(max_examples=80)
@given(drawn_events(), st.data())
def test_a_past_that_was_saved_anywhere_is_the_same(
    events: list[Event], data: st.DataObject
) -> None:
    """Saved and restored between two events it continues as if nothing had been."""
    cut = data.draw(st.integers(0, len(events)))
    text = "\n".join(json.dumps(part) for part in folded(events[:cut]).parts())
    restored = Past.restored(json.loads(line) for line in text.splitlines())

    assert state(folded(events[cut:], restored)) == state(folded(events))


@given(drawn_events())
def test_events_that_come_twice_change_nothing(events: list[Event]) -> None:
    """The tail of a file is read again after a crash: life and number tell it."""
    past = folded(events)
    before = state(past)
    last = [event for event in events if event.process == past.process]

    assert state(folded(last, past)) == before


@settings(max_examples=60)
@given(drawn_events(), st.integers(4, 16))
def test_merged_rows_keep_every_total(events: list[Event], max_rows: int) -> None:
    """What only grows has the same last value, to the bit, however small the curves."""
    small, large = Past(), Past()
    small.curves.limit = max_rows
    folded(events, small)
    folded(events, large)

    assert len(small.curves) <= max_rows
    for island, columns in large.curves.islands.items():
        for name in GROWING:
            kept = small.curves.islands[island][name][-1:]
            assert repr(kept) == repr(columns[name][-1:])
        told = sum(columns[COUNT])
        assert sum(small.curves.islands[island][COUNT]) == told


def test_rates_between_merged_rows_are_those_of_the_run() -> None:
    """1,000 tokens a round of 10 s: every row that is left says so."""
    past = folded(list(training(islands=2, fragments=1, rounds=1500)))
    run = past.curves.run
    pairs = list(pairwise(zip(run["at"], run["tokens"], strict=True)))[:-1]

    assert past.curves.per_row > 1
    assert {(t2 - t1) / (at2 - at1) for (at1, t1), (at2, t2) in pairs} == {100.0}


def test_a_merged_loss_is_the_mean_of_what_was_told() -> None:
    """Losses 1, 2 and 6 in two ticks that become one row: 3."""
    stream = Stream()
    stream.start()
    stream.join("a", 0)
    for steps, loss in ((1, 1.0), (2, 2.0)):
        stream.report("a", steps, loss)
    stream.commit(0, 1, "#")
    stream.report("a", 3, 6.0)
    stream.commit(0, 2, "#")
    past = folded(stream.made)
    past.curves.limit = 1
    past.curves.shrink()

    assert list(past.curves.islands["a"]["loss"]) == [3.0]
    assert list(past.curves.islands["a"][COUNT]) == [3.0]


@pytest.mark.parametrize(
    ("some", "others", "expected"),
    [("##", "#~", "#~"), ("#~.!", "!.~#", "!..!"), ("# ", " ", "# "), ("", "#", "#")],
)
def test_a_merged_mark_is_the_worst(some: str, others: str, expected: str) -> None:
    """Refused before absent, late and counted; no member is no mark."""
    assert worst(some, others) == expected


def test_verdicts_are_counted_over_lives() -> None:
    """Three rounds before a restart, two after it: the second life knows all five."""
    stream = Stream()
    stream.start()
    stream.join("a", 0)
    stream.join("b", 1)
    for number in (1, 2, 3):
        stream.commit(0, number, "##")
    stream.start(was_clean=False)
    stream.commit(0, 4, "#~")
    stream.emit("update_late", island="b", fragment=0, round=4)
    stream.commit(0, 5, "#.")
    past = folded(stream.made)

    assert (past.islands["a"].counted, past.islands["b"].counted) == (5, 3)
    assert past.islands["b"].late == 1
    assert past.islands["b"].marks == "###~."
    assert past.was_clean is False
    assert (past.missed, past.is_from_start) == (0, True)


def test_totals_go_on_in_the_next_incarnation() -> None:
    """Seconds and bytes of an incarnation begin at 0; the island's do not."""
    stream = Stream()
    stream.start()
    stream.join("a", 0)
    stream.report("a", 10, 1.0)
    stream.join("a", 0, incarnation=2)
    unknown = folded(list(stream.made)).islands["a"]
    stream.report("a", 4, 1.0)
    island = folded(stream.made).islands["a"]

    assert unknown.bytes_up is None
    assert (island.bytes_up, island.totals()["bytes_up"]) == (400, 1400)
    assert (island.deaths, island.incarnation) == (1, 2)


def test_a_loss_that_is_no_number_is_told_from_silence() -> None:
    """NaN is in the row and known to be no number; silence is unknown."""
    stream = Stream()
    stream.start()
    stream.join("a", 0)
    stream.join("b", 1)
    stream.report("a", 1, None, loss_is_finite=False)
    past = folded(stream.made)

    assert math.isinf(past.curves.islands["a"]["loss"][-1])
    assert math.isnan(past.curves.islands["b"]["loss"][-1])
    assert past.islands["a"].loss_is_finite is False
    assert past.islands["b"].loss_is_finite is None
    answer = json.loads(history(past))["curves"]["islands"]
    assert answer["a"] == {"loss": [None], "tokens": [10], "not_finite": [0]}
    assert answer["b"]["loss"] == [None]


def test_missing_events_are_counted() -> None:
    """A gap in the numbers of a life is a number of events that nobody folded."""
    stream = Stream()
    stream.start()
    for _ in range(5):
        stream.emit("run_paused")
    kept = [event for event in stream.made if event.number not in (3, 4)]

    assert folded(kept).missed == 2
    assert folded(kept[2:]).is_from_start is False


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
names = st.sampled_from(
    ["island_joined", "round_committed", "loss_reported", "update_staged", "audit"]
)
keys = st.sampled_from(
    ["island", "slot", "marks", "fragment", "round", "loss", "tokens", "metrics"]
)


@given(st.lists(st.tuples(names, st.dictionaries(keys, values, max_size=8))))
def test_damaged_events_raise_nothing(rows: list[tuple[str, dict[str, Any]]]) -> None:
    """A value of another type counts as not told."""
    past = Past()
    for number, (name, fields) in enumerate(rows, start=1):
        past.add(Event(number, BEGIN_UNIX_S, name, fields, "00000001"))

    json.loads(history(past))
    assert past.folded == len(rows)


def test_the_past_is_bounded(tmp_path: Path) -> None:
    """Of 100 islands, 8 fragments and 16 metrics: 8 MB on disk, 2 MB an answer."""
    past = Past()
    for event in training(islands=100, fragments=8, rounds=500, metrics=16):
        past.add(event)
    size_bytes = write_past(tmp_path / "past", past)
    restored = read_past(tmp_path / "past")

    assert past.curves.per_row > 1
    assert len(past.curves) <= MAX_ROWS
    assert len(past.marks.columns) <= MAX_MARKS
    assert size_bytes <= 8_000_000
    cells = sum(
        len(column) for rows in past.curves.islands.values() for column in rows.values()
    )
    assert 8 * cells <= 10_000_000
    assert restored is not None
    assert state(restored) == state(past)
    every = ("loss", *GROWING, "metric-0", "metric-15")
    assert len(history(past)) <= MAX_ANSWER_BYTES
    assert len(history(past, columns=every)) <= MAX_ANSWER_BYTES


def test_the_past_of_a_large_run_is_small(tmp_path: Path) -> None:
    """Of 100 islands and 8 fragments, full everywhere: 8 MB on disk, 16 MB resident.

    Curves, marks, rounds with their arrivals, and notes have all reached their bounds.
    """
    past = Past()
    rounds = MAX_ROWS + 8
    for event in training(
        islands=100, fragments=8, rounds=rounds, arrivals_from=rounds - MIN_ROUNDS
    ):
        past.add(event)
    for index in range(MAX_NOTES):
        name, number = f"island-{index % 100:03}", past.number + 1
        event = Event(
            number, BEGIN_UNIX_S, "island_silent", {"island": name}, past.process
        )
        past.add(event)
    size_bytes = write_past(tmp_path / "past", past)
    tracemalloc.start()
    try:
        restored = read_past(tmp_path / "past")
        resident_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert restored is not None
    assert past.curves.per_row > 1
    assert past.marks.per_column > 1
    assert len(past.rounds) == MAX_ARRIVALS // 100
    assert len(past.rounds[-1]["arrivals"]) == 100
    assert len(past.notes) == MAX_NOTES
    assert size_bytes <= 8_000_000
    assert resident_bytes <= 16_000_000
    assert len(history(past)) <= MAX_ANSWER_BYTES


def test_islands_and_notes_are_bounded() -> None:
    """Names that come and go push out those that left; epochs stay to the last."""
    stream = Stream()
    stream.start()
    stream.emit("epoch_set", epoch=1, values={"run.quorum": 2})
    for index in range(MAX_ISLANDS + 50):
        stream.join(f"i{index}", slot=0)
        stream.emit("island_left", island=f"i{index}", incarnation=1, reason="left")
        stream.commit(0, index + 1, "#")
    past = folded(stream.made)

    assert len(past.islands) <= MAX_ISLANDS
    assert len(past.notes) == MAX_NOTES
    assert past.notes[0]["event"] == "run_created"
    assert [n["event"] for n in past.notes].count("epoch_set") == 1
    assert all(len(island.marks) <= LAST_MARKS for island in past.islands.values())


def test_a_slot_that_another_island_takes_has_no_marks_of_the_first() -> None:
    """The matrix never shows one island's rounds in the row of another."""
    stream = Stream()
    stream.start()
    stream.join("old", 0)
    stream.commit(0, 1, "!")
    stream.join("new", 0)
    stream.commit(0, 2, "#")
    past = folded(stream.made)

    assert list(past.islands) == ["new"]
    assert [column.marks for column in past.marks.columns] == [" ", "#"]


def test_an_answer_after_a_cursor_has_only_news() -> None:
    """One more round is one row, one column of marks and one round."""
    stream = Stream()
    stream.start()
    stream.join("a", 0)
    for number in (1, 2, 3):
        stream.at_unix_s += 10
        stream.commit(0, number, "#")
    past = folded(stream.made)
    first = json.loads(history(past))
    stream.at_unix_s += 10
    stream.commit(0, 4, "~")
    past.add(stream.made[-1])
    news = json.loads(history(past, after=first["cursor"]))

    assert (first["is_whole"], news["is_whole"]) == (True, False)
    assert first["curves"]["round"] == [1, 2, 3]
    assert (news["curves"]["from"], news["curves"]["round"]) == (3, [4])
    assert [column[3] for column in news["marks"]["columns"]] == ["~"]
    assert [row["round"] for row in news["rounds"]] == [4]
    assert news["notes"] == []
    stream.start()
    past.add(stream.made[-1])
    assert json.loads(history(past, after=news["cursor"]))["is_whole"] is True


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"after": "7"}, "after='7' is no cursor"),
        ({"after": "a:b:c"}, "after='a:b:c' is no cursor"),
        ({"parts": ["all"]}, "parts has 'all'. Known are: curves"),
        ({"columns": ["lr"]}, "columns has 'lr'. Known are: loss"),
    ],
)
def test_a_wrong_query_is_refused(query: dict[str, Any], message: str) -> None:
    """The message has the value and what is known."""
    with pytest.raises(UsageError, match=message):
        history(Past(), **query)


@pytest.mark.parametrize("damage", [b"", b"no gzip", b"\x1f\x8b" + bytes(40)])
def test_a_damaged_file_is_no_past(tmp_path: Path, damage: bytes) -> None:
    """It is a cache: the events are read again."""
    path = tmp_path / "past"
    path.write_bytes(damage)

    assert read_past(path) is None


def test_a_file_that_was_cut_is_no_past(tmp_path: Path) -> None:
    """Every prefix of a file is refused."""
    past = folded(list(training(islands=2, fragments=1, rounds=5)))
    path = tmp_path / "past"
    write_past(path, past)
    whole = path.read_bytes()
    for size in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:size])
        assert read_past(path) is None
