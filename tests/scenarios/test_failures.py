"""One failure at a time, in virtual time: what the failure model says is survived."""

from __future__ import annotations

import pytest

from atoll.protocol.membership import LEASE_S
from atoll.simulate import FaultPlan
from tests.scenarios.runs import CALM_S, NAMES, all_survived, survived

PLAN = FaultPlan()


def everybody(*, at_s: float, back_after_s: float) -> FaultPlan:
    """Let all islands die in one instant."""
    plan = FaultPlan()
    for name in NAMES:
        plan = plan.kill(name, at_s=at_s, back_after_s=back_after_s)
    return plan


def test_an_island_that_dies_for_good_is_waited_for_a_lease_and_no_longer() -> None:
    """The other three see the end, at most one lease later than without it."""
    result = survived(PLAN.kill("i2", at_s=20.0))

    assert sorted(result.digests) == ["i0", "i1", "i3"]
    assert result.seconds < CALM_S + LEASE_S + 1.0


def test_an_island_that_dies_and_returns_takes_part_again() -> None:
    """Its next incarnation joins at once, and sees the end with the others."""
    result = all_survived(PLAN.kill("i2", at_s=20.0, back_after_s=5.0))

    assert result.deaths["i2"] == 1


def test_an_island_that_stands_still_beyond_its_lease_comes_back() -> None:
    """The others go on; the same incarnation is heard again when it moves."""
    all_survived(PLAN.freeze("i1", at_s=10.0, for_s=2 * LEASE_S))


def test_a_slow_island_is_waited_for() -> None:
    """At a fifth of the others' speed it counts, and nobody leaves it behind."""
    all_survived(PLAN.slow("i3", factor=5.0, at_s=5.0))


def test_a_coordinator_that_dies_and_returns_costs_nobody_a_step() -> None:
    """Its journal has all that was committed, and islands send the rest again."""
    all_survived(PLAN.kill("coordinator", at_s=20.0, back_after_s=10.0))


def test_a_coordinator_that_dies_again_and_again_gets_there() -> None:
    """Every life goes on where the journal of the last one ends."""
    plan = PLAN
    for at_s in (5.0, 12.1, 18.2, 24.4, 30.5):
        plan = plan.kill("coordinator", at_s=at_s, back_after_s=1.0)

    all_survived(plan)


def test_a_coordinator_that_stands_still_is_waited_for() -> None:
    """Its islands ask until it answers, though all leases ran out meanwhile."""
    all_survived(PLAN.freeze("coordinator", at_s=20.0, for_s=2 * LEASE_S))


def test_all_islands_may_die_at_once() -> None:
    """The run waits for them, and goes on from what was committed."""
    result = all_survived(everybody(at_s=20.0, back_after_s=30.0))

    assert set(result.deaths.values()) == {1}


def test_everything_may_die_at_once() -> None:
    """A power cut of islands and coordinator costs what had not been committed."""
    plan = everybody(at_s=20.0, back_after_s=30.0)

    all_survived(plan.kill("coordinator", at_s=20.0, back_after_s=25.0))


@pytest.mark.parametrize("name", NAMES)
def test_a_founder_that_dies_gives_way(name: str) -> None:
    """Whoever founds, and dies before its weights are there, is replaced."""
    all_survived(PLAN.kill(name, at_s=0.04, back_after_s=20.0))


@pytest.mark.parametrize("at_s", [0.01, 0.05, 0.09])
def test_a_coordinator_that_dies_during_the_founding_is_founded_again(
    at_s: float,
) -> None:
    """Before anybody has joined, with the weights on their way, and just after."""
    all_survived(PLAN.kill("coordinator", at_s=at_s, back_after_s=2.0))


def test_below_the_quorum_the_run_waits_and_goes_on_by_itself() -> None:
    """With a quorum of three, two that are gone for a minute stop it for a minute."""
    plan = PLAN.kill("i0", at_s=20.0, back_after_s=60.0)
    result = all_survived(plan.kill("i1", at_s=20.0, back_after_s=60.0), quorum=3)

    assert result.seconds > CALM_S + 40.0


def test_islands_that_are_cut_off_come_back() -> None:
    """Half of the islands lose the coordinator for longer than a lease."""
    all_survived(PLAN.partition(["i0", "i1"], at_s=10.0, for_s=40.0))


def test_a_coordinator_that_is_cut_off_comes_back() -> None:
    """Nobody reaches it for longer than a lease, and nobody stops."""
    all_survived(PLAN.partition(["coordinator"], at_s=10.0, for_s=40.0))


def test_delays_cost_time_only() -> None:
    """Every message takes two seconds longer."""
    all_survived(PLAN.delay("*", by_s=2.0, at_s=5.0, for_s=40.0))


def test_messages_may_overtake_each_other() -> None:
    """Each takes up to three seconds longer than the one before."""
    all_survived(PLAN.reorder("*", by_s=3.0))


def test_messages_may_come_twice() -> None:
    """All of them do, and the run takes no longer."""
    result = all_survived(PLAN.duplicate("*", rate=1.0))

    assert result.seconds < CALM_S + 1.0


def test_messages_may_be_lost() -> None:
    """Three in ten are, in either direction, all the time."""
    all_survived(PLAN.loss("*", rate=0.3))


def test_answers_may_be_lost() -> None:
    """What was done and never heard of is asked for again, and done once."""
    all_survived(PLAN.loss("coordinator->i1", rate=0.5))


def test_a_thin_link_costs_time_only() -> None:
    """One island has 2000 bytes per second each way."""
    all_survived(PLAN.throttle("i1", bytes_per_s=2000.0))


@pytest.mark.parametrize("by_s", [3600.0, -60.0])
@pytest.mark.parametrize("who", ["coordinator", "i1"])
def test_a_clock_may_jump(who: str, by_s: float) -> None:
    """Ahead, all leases run out at once; back, it stands still for as long."""
    all_survived(PLAN.clock_jump(who, by_s=by_s, at_s=20.0))


def test_clocks_may_drift() -> None:
    """One clock is twice as fast as the truth, another half as fast."""
    drifting = PLAN.clock_drift("coordinator", rate=2.0, at_s=5.0)

    all_survived(drifting.clock_drift("i1", rate=0.5, at_s=5.0))


def test_a_full_disk_is_waited_for() -> None:
    """Nothing is committed meanwhile, and everything after."""
    all_survived(PLAN.disk_full("coordinator", at_s=10.0, for_s=20.0))


def test_a_disk_that_turns_read_only_is_waited_for() -> None:
    """Nothing is committed meanwhile, nobody stops, and everything goes on after."""
    all_survived(PLAN.disk_read_only("coordinator", at_s=10.0, for_s=20.0))


def test_a_full_disk_and_a_death_are_survived_together() -> None:
    """The coordinator returns to a disk that is still full, and waits for room."""
    full = PLAN.disk_full("coordinator", at_s=10.0, for_s=20.0)

    all_survived(full.kill("coordinator", at_s=15.0, back_after_s=5.0))


def test_messages_of_a_dead_life_change_nothing() -> None:
    """They arrive ten seconds late, when the next life of their island has joined."""
    late = PLAN.delay("i2->coordinator", by_s=10.0, at_s=15.0, for_s=5.1)

    all_survived(late.kill("i2", at_s=20.0, back_after_s=0.5))
