"""Sets of turns against Python's own sets, and their packed bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import Spans
from atoll.data.spans import MAX_TURN, intersection, union
from atoll.errors import CorruptError

TURNS = st.frozensets(st.integers(0, 60), max_size=40)


def spans_of(turns: frozenset[int]) -> Spans:
    return Spans((turn, turn + 1) for turn in turns)


def turns_of(spans: Spans) -> set[int]:
    return {turn for first, last in spans for turn in range(first, last)}


@given(TURNS, TURNS)
def test_spans_compute_as_sets(one: frozenset[int], other: frozenset[int]) -> None:
    """Union, difference, intersection and inclusion are those of sets."""
    left, right = spans_of(one), spans_of(other)

    assert turns_of(left | right) == one | other
    assert turns_of(left - right) == one - other
    assert turns_of(left & right) == one & other
    assert (left <= right) == (one <= other)
    assert len(left) == len(one)
    assert bool(left) == bool(one)
    assert all((turn in left) == (turn in one) for turn in range(62))


@given(TURNS, TURNS, TURNS)
def test_every_result_is_in_its_only_form(
    one: frozenset[int], other: frozenset[int], third: frozenset[int]
) -> None:
    """Equal sets are equal and pack to the same bytes, however they were made."""
    made = (spans_of(one) | spans_of(other)) - spans_of(third)
    direct = spans_of((one | other) - third)

    assert made == direct
    assert hash(made) == hash(direct)
    assert made.pack() == direct.pack()
    assert Spans.unpack(made.pack()) == direct


@given(st.lists(TURNS, max_size=5))
def test_many_sets_join_and_meet(sets: list[frozenset[int]]) -> None:
    """Unions and intersections of several sets are those of sets."""
    spans = [spans_of(turns) for turns in sets]

    assert turns_of(union(spans)) == set().union(*sets)
    assert turns_of(intersection(spans)) == (
        set(sets[0]).intersection(*sets) if sets else set()
    )


@given(TURNS, st.integers(-1, 45))
def test_the_head_is_the_lowest_turns(turns: frozenset[int], count: int) -> None:
    """The head of a set has its lowest turns."""
    assert turns_of(spans_of(turns).head(count)) == set(sorted(turns)[: max(0, count)])


def test_a_packed_set_has_gaps_and_lengths() -> None:
    """Two intervals take four numbers, each in seven-bit groups, lowest first."""
    # Gap 5, length 3; gap 300 - 8 = 292 = 2 * 128 + 36, length 200 = 128 + 72.
    spans = Spans([(300, 500), (5, 8)])

    assert spans.pack() == bytes([5, 3, 0x80 | 36, 2, 0x80 | 72, 1])
    assert Spans.unpack(spans.pack()) == spans
    assert list(spans) == [(5, 8), (300, 500)]


def test_touching_intervals_are_one() -> None:
    """An interval that begins where another ends continues it."""
    assert list(Spans([(0, 4), (4, 6)])) == [(0, 6)]
    assert list(Spans([(0, 4)]) | Spans([(4, 6)])) == [(0, 6)]


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"\x05", "end after 1 bytes, within an interval"),
        (b"\x05\x80", "end after 2 bytes, within an interval"),
        (b"\x05\x00", "Interval 0 of packed turns is empty"),
        (b"\x00\x01\x00\x01", "Interval 1 of packed turns touches the one before"),
        (b"\x05\x81\x00", "number at byte 1 of packed turns is not in its shortest"),
        (b"\x80" * 40, "number at byte 0 of packed turns has more than 9 bytes"),
        (b"\xff" * 8 + b"\x7f\x01", "reach 9223372036854775808"),
    ],
)
def test_wrong_packed_bytes_are_refused(packed: bytes, message: str) -> None:
    """Bytes that no set packs to are refused by what is wrong in them."""
    with pytest.raises(CorruptError, match=message):
        Spans.unpack(packed)


@given(st.binary(max_size=40))
def test_packed_bytes_have_one_reading(packed: bytes) -> None:
    """Any bytes are refused, or are exactly the packed bytes of their set."""
    try:
        spans = Spans.unpack(packed)
    except CorruptError:
        return

    assert spans.pack() == packed
    assert spans.last <= MAX_TURN


def test_an_interval_must_have_turns() -> None:
    """An empty interval, or one of negative turns, is a fault of the caller."""
    with pytest.raises(ValueError, match="is not an interval"):
        Spans([(3, 3)])
