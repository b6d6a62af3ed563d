"""Learned deadlines and dynamic local updates."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algorithm.arithmetic import fp32
from atoll.algorithm.pace import (
    FULL_FACTOR,
    LAST,
    MAX_WEIGHT,
    MIN_ARRIVALS,
    Arrivals,
    aged_weight,
    buffer_share,
    deadline_s,
    dynamic_steps,
    factor,
)
from atoll.errors import UsageError

seconds = st.floats(0.0, 1e6)


def test_an_unknown_island_gets_the_upper_bound() -> None:
    """Until five arrivals are known nobody is late before the upper bound."""
    four = Arrivals((1.0, 1.0, 1.0, 1.0))

    assert deadline_s(four, patience=3.0, lower_s=1.0, upper_s=600.0) == 600.0
    assert deadline_s(four.then(1.0), patience=3.0, lower_s=1.0, upper_s=600.0) < 2.0


def test_the_deadline_is_median_plus_patience_spreads() -> None:
    """Arrivals 8, 9, 10, 11, 12 with patience 2 are late after 12.9652 seconds."""
    # Median 10; distances 2, 1, 0, 1, 2 have median 1, times 1.4826; 10 + 2 * 1.4826.
    arrivals = Arrivals((12.0, 8.0, 11.0, 9.0, 10.0))
    late_after = deadline_s(arrivals, patience=2.0, lower_s=1.0, upper_s=600.0)

    assert late_after == pytest.approx(12.9652)


def test_arrivals_that_were_all_alike_leave_room() -> None:
    """With no spread at all, a twentieth of the median stands in for it."""
    # 10 + 3 * (10 * 0.05)
    arrivals = Arrivals((10.0,) * 5)

    assert deadline_s(arrivals, patience=3.0, lower_s=1.0, upper_s=600.0) == 11.5


def test_one_extraordinary_arrival_changes_nothing() -> None:
    """An hour's outage in the record does not make the island waited for an hour."""
    usual = Arrivals((9.0, 10.0, 11.0, 10.0, 9.0, 11.0, 10.0))
    once = usual.then(3600.0)

    assert deadline_s(once, patience=3.0, lower_s=1.0, upper_s=600.0) < 20.0


def test_a_change_of_pace_is_learned() -> None:
    """An island that became ten times slower is waited for once it kept that up."""
    arrivals = Arrivals((10.0,) * LAST)
    for _ in range(LAST // 2 + 1):
        arrivals = arrivals.then(100.0)

    assert len(arrivals.seconds) == LAST
    assert deadline_s(arrivals, patience=3.0, lower_s=1.0, upper_s=600.0) >= 100.0


@given(st.lists(seconds, max_size=30), st.floats(0.0, 100.0))
def test_deadlines_stay_within_bounds(arrived: list[float], patience: float) -> None:
    """Whatever was learned, a deadline lies between the two bounds."""
    arrivals = Arrivals()
    for arrival_s in arrived:
        arrivals = arrivals.then(arrival_s)
    late_after = deadline_s(arrivals, patience=patience, lower_s=2.0, upper_s=50.0)

    assert 2.0 <= late_after <= 50.0
    assert len(arrived) >= MIN_ARRIVALS or late_after == 50.0


def test_an_outage_for_less_than_half_of_the_record_changes_nothing() -> None:
    """Ten of 21 arrivals may be anything: the median is still one of the others."""
    # Eleven at 10 s: median 10, and at least half of all distances are 0.
    for strange_s in (0.0, 11.0, 3600.0):
        arrivals = Arrivals((10.0,) * (LAST // 2 + 1) + (strange_s,) * (LAST // 2))

        assert deadline_s(arrivals, patience=3.0, lower_s=1.0, upper_s=600.0) == 11.5


@given(st.lists(st.floats(0.95, 1.05), min_size=MIN_ARRIVALS, max_size=LAST))
def test_an_island_that_keeps_its_pace_is_never_late(paces: list[float]) -> None:
    """Within a twentieth of its usual time, no arrival of its record was late."""
    # The median is at least 57 s, and three spreads at least 3 * 0.05 of that:
    # 57 * 1.15 = 65.55 s, and nothing came after 63 s.
    arrivals = Arrivals(tuple(60.0 * pace for pace in paces))
    late_after = deadline_s(arrivals, patience=3.0, lower_s=1.0, upper_s=600.0)

    assert late_after > max(arrivals.seconds)


@given(st.lists(st.floats(0.01, 1e3), min_size=MIN_ARRIVALS, max_size=LAST))
def test_a_deadline_scales_with_the_pace(arrived: list[float]) -> None:
    """Windows 64 times longer have deadlines 64 times longer, to the bit."""
    # No number of seconds is in the rule but its bounds; 64 is a power of two.
    short = deadline_s(
        Arrivals(tuple(arrived)), patience=3.0, lower_s=1e-9, upper_s=1e9
    )
    longer = Arrivals(tuple(64.0 * second for second in arrived))

    assert deadline_s(longer, patience=3.0, lower_s=1e-9, upper_s=1e9) == 64.0 * short


@given(st.lists(seconds, min_size=MIN_ARRIVALS, max_size=LAST), st.floats(0.0, 10.0))
def test_more_patience_never_makes_an_island_late_sooner(
    arrived: list[float], patience: float
) -> None:
    """The one knob turns one way."""
    arrivals = Arrivals(tuple(arrived))
    late_after = deadline_s(arrivals, patience=patience, lower_s=1.0, upper_s=600.0)
    more = deadline_s(arrivals, patience=patience + 1.0, lower_s=1.0, upper_s=600.0)

    assert more >= late_after


@pytest.mark.parametrize("wrong", [-1.0, math.inf, math.nan])
def test_an_impossible_arrival_is_an_error(wrong: float) -> None:
    """Negative, infinite and undefined durations are refused with their value."""
    with pytest.raises(UsageError, match=f"arrival_s={wrong} must be finite"):
        Arrivals().then(wrong)


@given(st.integers(1, 1000), st.floats(1e-6, 1e6), st.integers(1, 8))
def test_equal_speeds_all_get_sync_every(
    sync_every: int, speed: float, num_islands: int
) -> None:
    """Islands of one speed all take sync_every inner steps, at any speed."""
    # Exact quotients: in fp64, floor(H * v / v) can be H - 1.
    speeds = {f"i{n}": speed for n in range(num_islands)}

    assert set(dynamic_steps(speeds, sync_every=sync_every).values()) == {sync_every}


@given(
    st.integers(1, 1000),
    st.dictionaries(st.text(min_size=1), st.floats(1e-3, 1e3), min_size=1),
)
def test_no_island_holds_up_the_others(
    sync_every: int, speeds: dict[str, float]
) -> None:
    """A window takes an island no longer than the fastest, or one inner step."""
    # H_w <= H v_w / v_max, so H_w / v_w <= H / v_max; only max(1, .) may exceed it.
    own = dynamic_steps(speeds, sync_every=sync_every)
    fastest_s = sync_every / max(speeds.values())

    for island, steps in own.items():
        allowed = max(fastest_s, 1.0 / speeds[island])
        assert 1 <= steps <= sync_every
        assert steps / speeds[island] <= allowed * (1 + 1e-12)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_speed_is_an_error(wrong: float) -> None:
    """A speed that is no positive number is refused by the island's name."""
    with pytest.raises(UsageError, match=f"Island 'b' has speed {wrong}"):
        dynamic_steps({"a": 1.0, "b": wrong}, sync_every=10)


def test_nobody_needs_no_steps() -> None:
    """Without islands there is nothing to say."""
    assert dynamic_steps({}, sync_every=10) == {}


KINDS = ("none", "inverse", "inverse_root", "exponential")
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@given(age=st.integers(0, 2**32 - 1))
def test_a_factor_falls_with_age_and_never_to_zero(kind: str, age: int) -> None:
    """Every kind gives a fresh update the factor 1, an older one at most a newer's."""
    assert factor(kind, 0) == FULL_FACTOR
    assert 1 <= factor(kind, age + 1) <= factor(kind, age) <= FULL_FACTOR


@pytest.mark.parametrize(
    ("kind", "age", "expected"),
    [
        ("none", 2**32 - 1, 1048576),
        ("inverse", 2, 349525),  # 1048576 / 3 = 349525.3
        ("inverse", 2**20, 1),  # 1048576 / 1048577 is below 1
        ("inverse_root", 1, 741455),  # 1048576 / sqrt(2) = 741455.2
        ("inverse_root", 3, 524288),  # half
        ("exponential", 20, 1),
        ("exponential", 21, 1),  # 2**20 >> 21 is 0, and a weight is at least 1
        ("exponential", 2**32 - 1, 1),
    ],
)
def test_factors_worked_out_by_hand(kind: str, age: int, expected: int) -> None:
    """Factors are whole numbers of 2**-20, rounded down, at least one of them."""
    assert factor(kind, age) == expected


def test_a_negative_age_is_an_error() -> None:
    """No update counts in a round before the one it was sealed for."""
    with pytest.raises(UsageError, match="age=-1 must be at least 0"):
        factor("inverse", -1)


@kinds
@given(age=st.integers(0, 100), weight=st.integers(1, 2**64 - 1))
def test_an_aged_weight_can_be_listed(kind: str, age: int, weight: int) -> None:
    """A weight times its factor is exact, at least 1, and fits a roster."""
    aged = aged_weight(weight, age, kind=kind)

    assert 1 <= aged <= MAX_WEIGHT
    if kind == "none":
        assert aged == weight
    elif weight < 2**44:
        assert aged == weight * factor(kind, age)


@kinds
@given(
    ages=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    buffer=st.integers(1, 65536),
)
def test_a_share_is_the_part_of_the_buffer(
    kind: str, ages: list[int], buffer: int
) -> None:
    """The share is that of the exact factors, rounded to fp32 once, at most 1."""
    filled = Fraction(sum(factor(kind, age) for age in ages), FULL_FACTOR)
    share = buffer_share(ages, kind=kind, buffer=buffer)

    assert 0.0 < share <= 1.0
    assert share == fp32(float(min(Fraction(1), filled / buffer)))


@given(ages=st.lists(st.integers(0, 50), min_size=1, max_size=20))
def test_a_buffer_of_one_is_filled_by_any_fresh_round(ages: list[int]) -> None:
    """With staleness none and a buffer of 1 the share is 1, whoever counted."""
    assert buffer_share(ages, kind="none", buffer=1) == 1.0


@pytest.mark.parametrize(("ages", "buffer"), [([], 4), ([0], 0)])
def test_a_share_of_nothing_is_an_error(ages: list[int], buffer: int) -> None:
    """A void round has no share, and a buffer holds one update or more."""
    with pytest.raises(UsageError, match=f"{len(ages)} updates .* buffer={buffer}"):
        buffer_share(ages, kind="none", buffer=buffer)
