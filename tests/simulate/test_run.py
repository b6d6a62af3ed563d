"""Real islands and a real coordinator in virtual time, calm and under storms."""

from __future__ import annotations

import pytest

from atoll import RunSettings
from atoll.simulate import FaultPlan, random_plan
from atoll.simulate.run import PlannedDeparture, Simulated, simulate

ISLANDS = 4
NAMES = [f"i{number}" for number in range(ISLANDS)]
ROUNDS = 8
SETTINGS = RunSettings.from_dict(
    {
        "run": {"start_islands": ISLANDS, "end_rounds": ROUNDS},
        "sync": {"sync_every": 12, "num_fragments": 2, "overlap_steps": 1},
        "wire": {"up": "e3m0", "down": "int8"},
        "limits": {"deadline_max_s": 60.0},
    }
)


def run(faults: FaultPlan | None = None, seed: int = 0) -> Simulated:
    return simulate(SETTINGS, islands=ISLANDS, faults=faults, seed=seed)


def survived(result: Simulated) -> None:
    """All committed rounds are there, and who saw the end holds one anchor."""
    assert result.failures == {}
    assert result.violations == []
    assert result.rounds == (ROUNDS, ROUNDS)
    assert len(set(result.digests.values())) == 1


def test_a_calm_run_ends_with_one_anchor() -> None:
    """Every island sees the end, after as many steps as the schedule has."""
    result = run()

    survived(result)
    assert sorted(result.digests) == NAMES
    # 8 rounds of 12 steps of half a second, and what the messages took.
    assert 48.0 <= result.seconds < 60.0


def test_the_same_seed_gives_the_same_run() -> None:
    """Event for event, under a storm."""
    plan = random_plan(3, NAMES, span_s=60.0)

    assert run(plan, seed=3) == run(plan, seed=3)


def test_a_coordinator_that_dies_and_returns_costs_nobody_a_step() -> None:
    """Its journal has all that was committed; islands send the rest again."""
    plan = FaultPlan().kill("coordinator", at_s=20.0, back_after_s=10.0)
    result = run(plan)

    survived(result)
    assert sorted(result.digests) == NAMES


def test_an_island_that_dies_and_returns_takes_part_again() -> None:
    """Its next life joins at once, and all end on one anchor."""
    result = run(FaultPlan().kill("i2", at_s=20.0, back_after_s=5.0))

    survived(result)
    assert result.deaths["i2"] == 1
    assert sorted(result.digests) == NAMES


def test_an_island_that_is_stopped_beyond_its_lease_comes_back() -> None:
    """The others go on without it; what it had sealed counts or is carried."""
    result = run(FaultPlan().freeze("i1", at_s=10.0, for_s=25.0))

    survived(result)
    assert sorted(result.digests) == NAMES


def test_an_island_that_leaves_gives_its_work_away_and_may_return() -> None:
    """All of it counts; its next life takes part to the end."""
    leaving = {"i3": PlannedDeparture(after_steps=17, back_after_s=5.0)}
    result = simulate(SETTINGS, islands=ISLANDS, departures=leaving)

    survived(result)
    assert sorted(result.digests) == NAMES
    assert result.tokens["departed"] == 0


def test_tokens_are_committed_or_in_hand_or_lost_with_a_named_death() -> None:
    """Of an island that dies, what no round had counted goes with it."""
    result = run(FaultPlan().kill("i2", at_s=20.0, back_after_s=5.0))

    assert result.tokens["committed"] > result.tokens["in hand"] > 0
    # In its fourth window of 12 half seconds, at 18 s, it had sent both fragments.
    assert result.tokens["i2 (incarnation 1) died at 20.000 s"] > 0
    assert result.tokens["refused"] == result.tokens["dropped"] == 0


def test_faults_of_a_round_happen_when_the_run_reaches_it() -> None:
    """An island that dies at round 3 has lived through two."""
    result = run(FaultPlan().kill("i2", at_round=3, back_after_s=1.0))

    survived(result)
    assert result.deaths["i2"] == 1
    died = next(name for name in result.tokens if name.startswith("i2 "))
    # Two rounds of 12 steps of half a second have passed, and no third one.
    assert 12.0 <= float(died.split()[-2]) < 18.0


@pytest.mark.parametrize("seed", range(60))
def test_survivors_of_a_storm_hold_one_anchor(seed: int) -> None:
    """Whatever fails, all rounds are committed and nobody's anchor differs."""
    survived(run(random_plan(seed, NAMES, span_s=60.0), seed=seed))
