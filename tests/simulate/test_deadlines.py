"""Learned deadlines in virtual time, alone and beside fixed timeouts.

The runs are those of bench/deadlines.py: four islands, windows of about a minute.
docs/deadlines.md claims what is asserted here.
"""

from __future__ import annotations

import pytest

from atoll.algorithm.pace import MIN_ARRIVALS
from atoll.protocol.membership import LEASE_S
from atoll.simulate import FaultPlan
from atoll.wire import Roster, Verdict
from bench._deadline_plans import MIXED, SCENARIOS
from bench._deadline_runs import NUM_ISLANDS, WINDOW_S, Ran, run

LONGEST_WINDOW_S = 1.15 * WINDOW_S
"""Thirty steps, each up to a fifth longer or shorter, add up to no more."""

UPPER_S = 600.0
STALL_S = 300.0
MINUTE = 60.0
A_NAP_S = 1.0
"""How much later than the deadline a coordinator may look."""


def stall(minute: float) -> FaultPlan:
    """Return a plan in which one inner step of i3 takes five minutes."""
    return FaultPlan().slow("i3", factor=150.0, at_s=minute * MINUTE, for_s=20.0)


def lengths_s(ran: Ran) -> list[float]:
    """Return how long each committed round was open."""
    return [b - a for a, b in zip(ran.opened_s, ran.opened_s[1:], strict=False)]


def verdicts(roster: Roster) -> dict[str, Verdict]:
    return {entry.island: entry.verdict for entry in roster.entries}


def late_rounds(ran: Ran, island: str) -> list[int]:
    """Return the places, in the list of rounds, of those that missed an island."""
    return [
        at
        for at, roster in enumerate(ran.rosters)
        if verdicts(roster).get(island) is Verdict.LATE
    ]


def test_before_anything_is_known_everybody_is_waited_for() -> None:
    """An island that stalls in its second round is waited for: nobody knows its pace.

    The bound is 600 s, and the stall is 300 s.
    """
    ran = run(stall(1.5), hours=0.25)

    assert ran.learned_s[0] == {f"i{n}": UPPER_S for n in range(NUM_ISLANDS)}
    assert ran.num_late == 0
    assert STALL_S < lengths_s(ran)[1] < STALL_S + LONGEST_WINDOW_S


def test_a_deadline_is_learned_from_the_fifth_arrival_on() -> None:
    """The upper bound holds for five rounds; in the sixth it is about a window."""
    ran = run(FaultPlan(), hours=0.15)

    for learned_s in ran.learned_s[:MIN_ARRIVALS]:
        assert set(learned_s.values()) == {UPPER_S}
    for deadline in ran.learned_s[MIN_ARRIVALS].values():
        # A window and three spreads, of a twentieth of it or somewhat more each.
        assert WINDOW_S < deadline < 1.5 * WINDOW_S


def test_once_its_pace_is_known_an_island_that_stalls_is_late() -> None:
    """The round closes when median and patience say so; the work counts later."""
    ran = run(stall(7.5), hours=0.25)
    (at, *_) = late_rounds(ran, "i3")

    assert at >= MIN_ARRIVALS
    deadline = ran.learned_s[at]["i3"]
    assert lengths_s(ran)[at] == pytest.approx(deadline, abs=A_NAP_S)
    assert ran.lost == 0.0


def test_a_slow_and_steady_island_counts_in_every_round() -> None:
    """Six times slower than the others, it is never late, before and after."""
    ran = run(FaultPlan().slow("i3", factor=6.0))

    assert len(ran.rosters) > MIN_ARRIVALS
    for roster in ran.rosters:
        assert set(verdicts(roster).values()) == {Verdict.COUNTED}
        assert len(roster.entries) == NUM_ISLANDS
    assert ran.lost == 0.0


def test_a_dead_island_costs_at_most_its_lease() -> None:
    """Nobody waits for its deadline, known or not."""
    for minute in (1.5, 9.5):
        ran = run(FaultPlan().kill("i3", at_s=minute * MINUTE), hours=0.25)

        assert max(lengths_s(ran)) < LONGEST_WINDOW_S + LEASE_S
        assert ran.num_late == 0


def test_an_island_that_becomes_slow_is_late_once_and_then_awaited() -> None:
    """It misses one round by its old pace; the next one waits, and counts its work."""
    ran = run(FaultPlan().slow("i3", factor=2.0, at_s=10 * MINUTE), hours=0.4)
    late = late_rounds(ran, "i3")

    assert late
    for at in late:
        deadline = ran.learned_s[at]["i3"]
        assert lengths_s(ran)[at] == pytest.approx(deadline, abs=A_NAP_S)
        if at + 1 < len(ran.rosters):
            assert verdicts(ran.rosters[at + 1])["i3"] is Verdict.COUNTED
    assert ran.lost == 0.0


def test_a_new_pace_is_learned() -> None:
    """Late every other round, until most of the arrivals it has are of the new pace."""
    ran = run(FaultPlan().slow("i3", factor=1.5, at_s=20 * MINUTE))
    late = late_rounds(ran, "i3")

    # 21 arrivals are remembered: with the eleventh of the new pace it is the median.
    assert len(late) == 11
    assert late[-1] < len(ran.rosters) - 5
    assert ran.learned_s[-1]["i3"] > 1.5 * WINDOW_S


def test_deadlines_stay_within_their_bounds() -> None:
    """Whatever an island does, no deadline exceeds the upper bound or the lower."""
    plan = stall(8.0).slow("i2", factor=3.0, at_s=15 * MINUTE, for_s=5 * MINUTE)
    ran = run(plan, deadline_max_s=150.0, hours=0.5)

    for learned_s in ran.learned_s:
        assert all(1.0 <= deadline <= 150.0 for deadline in learned_s.values())


def test_a_timeout_below_a_window_waits_for_nobody() -> None:
    """Counted from the opening, 30 s are over before anyone can have published."""
    ran = run(MIXED, timeout_s=30.0, since="opening", hours=0.5)

    assert all(len(roster.counted) == 1 for roster in ran.rosters)
    assert ran.lost > 0.3


def test_long_windows_need_a_longer_bound() -> None:
    """With 20 minutes a window, the bound of an hour lets all islands count."""
    ran = run(MIXED, deadline_max_s=3600.0, window_s=1200.0, hours=3.0)

    assert ran.rosters
    assert ran.num_late == 0


CLAIMS: dict[str, dict[str, tuple[float, ...]]] = {
    "speeds 1, 1, 1.3, 2": {"lost": (30.0,)},
    "drifting speeds": {"lost": (30.0,), "windows_per_hour": (30.0,)},
    "one becomes 1.5 x slower": {
        "rounds_per_hour": (30.0, 120.0, 600.0),
        "windows_per_hour": (30.0, 120.0, 600.0),
    },
    "one dies now and then": {"lost": (30.0,), "windows_per_hour": (30.0,)},
    "one freezes for 40 s": {"windows_per_hour": (120.0, 600.0)},
    "one stalls for 5 min": {"lost": (30.0,), "windows_per_hour": (600.0,)},
    "one hangs forever": {"windows_per_hour": (600.0,)},
}
"""In which scenario learned deadlines are better, by what, than which timeouts."""


@pytest.mark.parametrize("scenario", CLAIMS)
def test_learned_deadlines_are_better_where_the_document_says_so(scenario: str) -> None:
    """They lose less, or more work counts, than with these fixed timeouts."""
    learned = run(SCENARIOS[scenario])
    timeouts = sorted({each for those in CLAIMS[scenario].values() for each in those})
    fixed = {each: run(SCENARIOS[scenario], timeout_s=each) for each in timeouts}

    for measure, those in CLAIMS[scenario].items():
        sign = -1 if measure == "lost" else 1
        for timeout_s in those:
            ours, theirs = getattr(learned, measure), getattr(fixed[timeout_s], measure)
            assert sign * ours > sign * theirs, (measure, timeout_s)


def test_the_same_plan_gives_the_same_figures() -> None:
    """What the document shows can be made again, to the last second."""
    plan = SCENARIOS["one dies now and then"]
    first, second = run(plan, hours=0.3), run(plan, hours=0.3)

    assert first == second
