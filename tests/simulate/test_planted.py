"""The invariants find bugs of the kind that other systems have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.simulate import FaultPlan, shrink
from atoll.simulate.trials import Trial, trial
from tests.simulate.planted import BUGS, Bug

STORMS = 200
"""Within so many storms each bug must be caught."""

CAUGHT_AS = {
    "a retried update applied twice": "true mean",
    "a commit answered before the flush": "durable first",
    "a lease not fenced by incarnation": "zombies change nothing",
    "a carried update that keeps its new residual": "work conserved",
    "a roster decided twice": "same outcome",
    "a refused update that is not listed": "counted once",
    "a share from rounds instead of updates": "true mean",
    "an outcome taken for a receipt": "work conserved",
    "a claim answered before it is durable": "rows held",
    "a row dealt while its update is staged": "rows held",
    "a counted row returned by a restart": "rows add up",
}


def violated(bug: Bug, tried: Trial) -> set[str]:
    """Return what does not hold with the bug; another storm has its own bug."""
    with bug():
        return {each.invariant for each in tried.run().violations}


@pytest.mark.parametrize("name", sorted(BUGS))
def test_a_planted_bug_is_caught_and_shrunk(name: str) -> None:
    """Within 200 storms, for what it is, with at most five faults and none without."""
    bug, expected = BUGS[name], CAUGHT_AS[name]
    caught = next(
        tried for tried in map(trial, range(STORMS)) if expected in violated(bug, tried)
    )

    def fails(plan: FaultPlan) -> bool:
        return expected in violated(bug, replace(caught, plan=plan))

    smallest = replace(caught, plan=shrink(caught.plan, fails, max_runs=40))
    assert len(smallest.plan.faults) <= 5
    assert smallest.run().violations == []


def test_a_planted_bug_ends_with_its_context() -> None:
    """A storm after the bugs is as it was before them."""
    before = trial(7).run()
    for bug in BUGS.values():
        violated(bug, replace(trial(7), plan=FaultPlan()))

    assert trial(7).run() == before
