"""Learned deadlines and dynamic local updates."""

from __future__ import annotations

import itertools
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
    factor,
    local_steps,
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


def test_arrivals_of_a_longer_window_are_later_and_stay_finite() -> None:
    """Four times the inner steps take four times as long, at most some thirty years."""
    arrivals = Arrivals((1.0, 2.0)).slower(4.0)
    assert arrivals.seconds == (4.0, 8.0)

    assert arrivals.slower(1e300).slower(1e300).seconds == (1e9, 1e9)


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


H = st.integers(1, 1000)
PACES = st.floats(1e-6, 1e6)


@given(H, PACES, st.floats(1.0, 8 / 7))
def test_nearly_equal_islands_all_keep_sync_every(
    sync_every: int, fastest_s: float, ratio: float
) -> None:
    """An island that is slower by less than an eighth makes every inner step."""
    # q = H * fastest / step >= 7/8 H up to a ratio of 8/7; the fastest has q = H.
    step_s = max(fastest_s, min(fastest_s * ratio, fastest_s * 1.1428))
    steps = local_steps(
        sync_every, step_s=step_s, fastest_s=fastest_s, sync_every=sync_every
    )

    assert steps == sync_every


@given(st.data(), H, PACES, PACES)
def test_a_new_window_fits_into_the_time_of_the_fastest(
    data: st.DataObject, sync_every: int, fastest_s: float, other_s: float
) -> None:
    """An island whose window changes makes as many inner steps as fit into a window."""
    step_s, fastest_s = max(fastest_s, other_s), min(fastest_s, other_s)
    present = data.draw(st.integers(1, sync_every))
    steps = local_steps(
        present, step_s=step_s, fastest_s=fastest_s, sync_every=sync_every
    )
    window_s = sync_every * Fraction(fastest_s)

    assert 1 <= steps <= sync_every
    if steps != present:
        assert window_s < (steps + 1) * Fraction(step_s)
        assert steps == 1 or steps * Fraction(step_s) <= window_s


@given(st.data(), H, PACES, st.floats(1.0, 100.0))
def test_noise_changes_a_window_once(
    data: st.DataObject, sync_every: int, fastest_s: float, ratio: float
) -> None:
    """Measurements that differ by 5 % among them change a window at most once."""
    # A window set by q has h <= q < h + 1, and stays from 7/8 h up to 9/8 (h + 1). All
    # q' are within 1.05 of q, and 1 / 1.05 > 7/8 and 1.05 < 9/8.
    noise = st.lists(st.floats(1.0, 1.05), min_size=1, max_size=20)
    windows = [data.draw(st.integers(1, sync_every))]
    for noisy in data.draw(noise):
        windows.append(
            local_steps(
                windows[-1],
                step_s=fastest_s * ratio * noisy,
                fastest_s=fastest_s,
                sync_every=sync_every,
            )
        )

    changes = sum(a != b for a, b in itertools.pairwise(windows))
    assert changes <= 1


@given(st.data(), H)
def test_an_unknown_pace_keeps_the_window(data: st.DataObject, sync_every: int) -> None:
    """Before its own pace or any other is known, an island makes what it made."""
    present = data.draw(st.integers(1, sync_every))

    assert present == local_steps(
        present, step_s=None, fastest_s=1.0, sync_every=sync_every
    )
    assert present == local_steps(
        present, step_s=1.0, fastest_s=None, sync_every=sync_every
    )


def test_a_window_follows_the_pace_both_ways() -> None:
    """A window of 40 inner steps stays from 35 up to 46.125, of 100 in all."""
    # 7/8 * 40 = 35; 9/8 * 41 = 46.125; q = 100 / step_s, with the fastest at 1 s.
    by_quotient = {34.9: 34, 35.0: 40, 40.0: 40, 46.1: 40, 46.125: 46, 99.0: 99}
    windows = {
        q: local_steps(40, step_s=100.0, fastest_s=q, sync_every=100)
        for q in by_quotient
    }

    assert windows == by_quotient


def test_an_island_that_claims_the_slowest_pace_makes_one_inner_step() -> None:
    """Claims beyond all measure stay exact, and within 1 and sync_every."""
    tiny, huge = 5e-324, 1.7e308

    assert local_steps(9, step_s=huge, fastest_s=tiny, sync_every=9) == 1
    assert local_steps(1, step_s=tiny, fastest_s=huge, sync_every=9) == 9


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_pace_is_an_error(wrong: float) -> None:
    """A pace that is no positive number of seconds is refused with its value."""
    with pytest.raises(UsageError, match=f"step_s={wrong} must be finite and above 0"):
        local_steps(5, step_s=wrong, fastest_s=1.0, sync_every=10)
    with pytest.raises(UsageError, match=f"fastest_s={wrong} must be finite and"):
        local_steps(5, step_s=1.0, fastest_s=wrong, sync_every=10)


@pytest.mark.parametrize("wrong", [0, 11])
def test_an_impossible_window_is_an_error(wrong: int) -> None:
    """A present window outside of 1 to sync_every is refused with both values."""
    with pytest.raises(UsageError, match=f"present={wrong} must be from 1 to sync_ev"):
        local_steps(wrong, step_s=1.0, fastest_s=1.0, sync_every=10)


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
