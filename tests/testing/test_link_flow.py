"""When bytes come out of a line: never too early, never out of order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.testing.link_flow import LineTime, PacedLine, in_flight_bytes, piece_bytes

RATES = st.floats(100.0, 1e9)
TIMES = st.floats(0.0, 10.0)
ENTRIES = st.lists(
    st.tuples(st.floats(0.0, 2.0), st.integers(0, 10**6)), min_size=1, max_size=40
)
TINY_S = 1e-6  # floating point, over minutes


def schedule(
    line: PacedLine[int], entries: list[tuple[float, int]]
) -> list[tuple[float, int, float]]:
    """Put pieces of (pause, size) on the line; return when, how much, and arrival."""
    now_s, rows = 0.0, []
    for number, (pause_s, size) in enumerate(entries):
        now_s += pause_s
        rows.append((now_s, size, line.enter(number, size, ready_s=now_s)))
    return rows


def test_two_pieces_follow_each_other_at_the_rate() -> None:
    """At 100 bytes/s and a delay of 5 s, 100 bytes are there after 6 s."""
    line = PacedLine[str](rate_bytes_per_s=100.0, delay_s=5.0)

    assert line.enter("first", 100, ready_s=0.0) == 6.0
    assert line.enter("second", 200, ready_s=0.5) == 8.0
    assert line.enter("after a pause", 100, ready_s=10.0) == 16.0


@given(ENTRIES, RATES, TIMES, TIMES, st.integers())
def test_no_piece_comes_early(
    entries: list[tuple[float, int]],
    rate: float,
    delay_s: float,
    jitter_s: float,
    seed: int,
) -> None:
    """A piece takes its bytes' time at the rate, and the delay, at the least."""
    line = PacedLine[int](
        rate_bytes_per_s=rate, delay_s=delay_s, jitter_s=jitter_s, seed=seed
    )
    for entered_s, size, arrival_s in schedule(line, entries):
        assert arrival_s >= entered_s + size / rate + delay_s - TINY_S


@given(ENTRIES, RATES, TIMES)
def test_over_no_stretch_of_time_is_the_rate_exceeded(
    entries: list[tuple[float, int]], rate: float, delay_s: float
) -> None:
    """Between two arrivals lies the time of all bytes that arrived after the first."""
    rows = schedule(PacedLine(rate_bytes_per_s=rate, delay_s=delay_s), entries)
    for first, (_, _, begin_s) in enumerate(rows):
        size = 0
        for _, more, end_s in rows[first + 1 :]:
            size += more
            assert (end_s - begin_s) * rate >= size * (1 - TINY_S) - rate * TINY_S


@given(ENTRIES, RATES, TIMES, TIMES, st.integers())
def test_nothing_overtakes_and_jitter_has_its_bound(
    entries: list[tuple[float, int]],
    rate: float,
    delay_s: float,
    jitter_s: float,
    seed: int,
) -> None:
    """Arrivals are in order, each at most `jitter_s` after that of a steady line."""
    steady = schedule(PacedLine(rate_bytes_per_s=rate, delay_s=delay_s), entries)
    rows = schedule(
        PacedLine(rate_bytes_per_s=rate, delay_s=delay_s, jitter_s=jitter_s, seed=seed),
        entries,
    )

    assert all(a <= b for (_, _, a), (_, _, b) in pairwise(rows))
    for (_, _, least_s), (_, _, arrival_s) in zip(steady, rows, strict=True):
        assert least_s <= arrival_s <= least_s + jitter_s + TINY_S


@given(ENTRIES, st.integers())
def test_the_same_seed_draws_the_same_jitter(
    entries: list[tuple[float, int]], seed: int
) -> None:
    """Two lines of one seed let everything arrive at the same times."""
    one, two = (PacedLine[int](jitter_s=1.0, seed=seed) for _ in range(2))

    assert schedule(one, entries) == schedule(two, entries)


@given(ENTRIES, st.integers(1, 10**6), RATES)
def test_who_waits_for_room_keeps_the_queue_short(
    entries: list[tuple[float, int]], queue_bytes: int, rate: float
) -> None:
    """Then a piece waits for no more than the queue, or passes an empty one."""
    line = PacedLine[int](rate_bytes_per_s=rate, queue_bytes=queue_bytes)
    now_s = 0.0
    for pause_s, size in entries:
        now_s += pause_s
        now_s += line.room_in_s(size, now_s=now_s)
        through_s = line.enter(0, size, ready_s=now_s) - now_s
        assert through_s <= max(queue_bytes, size) / rate + TINY_S


@given(ENTRIES, TIMES)
def test_what_has_arrived_comes_off_once_and_in_order(
    entries: list[tuple[float, int]], delay_s: float
) -> None:
    """Whenever one looks, the line gives what is due and says when the next is."""
    line = PacedLine[int](rate_bytes_per_s=1e5, delay_s=delay_s)
    arrivals = [arrival_s for _, _, arrival_s in schedule(line, entries)]
    taken: list[int] = []
    now_s = 0.0
    while (wait_s := line.next_in_s(now_s=now_s)) is not None:
        now_s = max(now_s + wait_s, arrivals[len(taken)])
        taken += line.arrived(now_s=now_s)
        assert all(arrivals[number] <= now_s for number in taken)

    assert taken == list(range(len(entries)))


@given(st.lists(st.tuples(st.booleans(), TIMES), max_size=30))
def test_time_stands_still_while_the_line_is_cut(
    changes: list[tuple[bool, float]],
) -> None:
    """A line's time is the clock's without the time it was cut, and never jumps."""
    time, now_s, whole_s = LineTime(), 0.0, 0.0
    for is_cut, lasts_s in changes:
        before_s = time.at(now_s)
        (time.cut if is_cut else time.mend)(now_s=now_s)
        assert time.at(now_s) == pytest.approx(before_s)
        assert time.is_cut is is_cut
        now_s += lasts_s
        whole_s += 0.0 if is_cut else lasts_s

    assert time.at(now_s) == pytest.approx(whole_s)


def test_pieces_are_two_milliseconds_within_reason() -> None:
    """100 Mbit/s are 25000 bytes in 2 ms; slow and fast lines have their bounds."""
    assert piece_bytes(12.5e6) == 25_000
    assert piece_bytes(10.0) == 1448
    assert piece_bytes(1e9) == 65_536
    assert piece_bytes(None) == 262_144


def test_a_full_line_holds_rate_times_delay() -> None:
    """12.5 MB/s for 40 ms are 500 KB."""
    assert in_flight_bytes(12.5e6, 0.04) == 500_000
    assert in_flight_bytes(None, 0.0) == 0
