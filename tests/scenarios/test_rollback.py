"""The coordinator's disk is put back to an earlier copy: only islands know the rest."""

from __future__ import annotations

import numpy as np
import pytest

from atoll import RunSettings
from atoll.errors import AtollWarning, Refused
from atoll.simulate.islands import PlannedDeparture
from atoll.testing import (
    FaultPlan,
    VectorView,
    VirtualIsland,
    VirtualRun,
    simulate,
    vector_model,
    virtual_run,
)
from tests.scenarios.runs import ISLANDS, NAMES, ROUNDS, settings

MODEL = vector_model({"h.0.w": (70,), "h.1.w": (50,), "head": (7,)})


def loop(island: VirtualIsland) -> str:
    """Train on noise, and return the digest that this island ends with."""
    weights = VectorView()
    host = island.join(MODEL, weights)
    noise = np.random.default_rng(
        NAMES.index(island.name) + ISLANDS * island.incarnation
    )
    while not host.has_ended:
        island.work(0.5)
        for local in weights.local:
            local -= noise.standard_normal(len(local), np.float32)
        host.stepped()
    host.leave()
    return host.digest


def ends_on_one_anchor(plan: FaultPlan) -> VirtualRun:
    """Run under a plan to an end that every island sees."""
    result = virtual_run(loop, settings(), islands=ISLANDS, faults=plan, limit_s=600.0)
    assert result.failures == {}
    assert result.rounds == (ROUNDS, ROUNDS)
    assert sorted(result.returned) == NAMES
    assert len(set(result.returned.values())) == 1
    return result


@pytest.mark.parametrize("for_s", [1.0, 6.0, 13.0, 30.0])
def test_rounds_that_the_journal_lost_come_back_from_an_island(for_s: float) -> None:
    """After 10 s, one round and many: nobody goes back, and the run goes on."""
    ends_on_one_anchor(FaultPlan().rollback("coordinator", at_s=10.0, for_s=for_s))


@pytest.mark.parametrize("at_s", [5.0, 12.3, 20.0])
def test_every_invariant_holds_though_the_journal_was_put_back(at_s: float) -> None:
    """One anchor, each update counted once, no work lost; only the journal has gaps."""
    plan = FaultPlan().rollback("coordinator", at_s=at_s, for_s=8.0)
    result = simulate(settings(), islands=ISLANDS, faults=plan, seed=3)

    assert result.violations == []
    assert result.rounds == (ROUNDS, ROUNDS)


def test_islands_that_the_journal_lost_go_on_as_they_are() -> None:
    """The copy is from before three of them had joined, and from before round 1."""
    plan = FaultPlan().rollback("coordinator", at_s=0.26, for_s=20.0)

    ends_on_one_anchor(plan)


def test_a_journal_may_be_put_back_while_an_island_is_away() -> None:
    """The others know more than the journal, and more than the island that returns."""
    away = FaultPlan().kill("i2", at_s=12.0, back_after_s=20.0)

    ends_on_one_anchor(away.rollback("coordinator", at_s=10.0, for_s=15.0))


@pytest.mark.parametrize("for_s", [1.2, 4.0])
def test_what_an_earlier_life_sent_and_the_journal_lost_is_sent_anew(
    for_s: float,
) -> None:
    """The next life would wait for a round that waits for it: it is asked to speak."""
    plan = FaultPlan().freeze("i3", at_s=8.0, for_s=14.0)
    plan = plan.kill("i2", at_s=13.0, back_after_s=0.5)
    plan = plan.rollback("coordinator", at_s=12.9, for_s=for_s)
    one = one_fragment(start_islands=ISLANDS, quorum=ISLANDS)
    result = simulate(one, islands=ISLANDS, faults=plan, seed=3)

    assert (result.violations, result.failures) == ([], {})
    assert result.rounds == (ROUNDS,)


@pytest.mark.parametrize("back_at_s", [22.5, 26.3, 30.0])
def test_a_round_whose_outcome_nobody_has_is_taken_as_refused(back_at_s: float) -> None:
    """Who brings the state has just taken it whole, and knows no outcome before it."""
    plan = FaultPlan().freeze("i0", at_s=6.2, for_s=43.0)
    plan = plan.rollback("coordinator", at_s=8.3, for_s=25.0)
    plan = plan.kill("i1", at_s=back_at_s, back_after_s=0.3)
    with pytest.warns(AtollWarning, match="outcome is lost"):
        result = simulate(one_fragment(start_islands=2), islands=2, faults=plan, seed=3)

    assert (result.violations, result.failures) == ([], {})
    assert result.rounds == (ROUNDS,)


@pytest.mark.parametrize(("steps", "for_s"), [(19, 5.8), (11, 1.8)])
def test_who_leaves_brings_first_what_the_run_has_lost(
    steps: int, for_s: float
) -> None:
    """The only island of a run goes: no round that it has taken goes with it."""
    plan = FaultPlan().rollback("coordinator", at_s=3.0, for_s=for_s)
    leaving = {"i0": PlannedDeparture(after_steps=steps)}
    alone = one_fragment(start_islands=1).with_values(
        {"sync.sync_every": 8, "sync.overlap_steps": 7}
    )
    result = simulate(alone, islands=1, faults=plan, departures=leaving)

    assert (result.violations, result.failures) == ([], {})
    assert result.rounds == ((steps + 7) // 8,)
    assert result.tokens["departed"] == 0


def one_fragment(**run: object) -> RunSettings:
    """Return the settings of a run whose islands have one thing to wait for."""
    return settings(**run).with_values({"sync.num_fragments": 1})


def test_a_journal_that_lost_the_founding_is_lost() -> None:
    """The run has neither model nor weights: islands stop, and say so."""
    plan = FaultPlan().rollback("coordinator", at_s=0.05, for_s=20.0)
    result = virtual_run(loop, settings(), islands=ISLANDS, faults=plan, limit_s=600.0)

    assert result.rounds == ()
    assert {type(exc) for exc in result.failures.values()} == {Refused}
