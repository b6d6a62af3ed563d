"""The invariants find runs in a bucket that break its rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from atoll.simulate import FaultPlan, shrink
from atoll.simulate.trials import Trial, store_trial
from tests.simulate.planted import Bug
from tests.simulate.planted_store import STORE_BUGS

STORMS = 200
"""Within so many storms each bug must be caught."""

CAUGHT_AS = {
    "a closer that does not look again": "nothing left out",
    "an earlier life's update that nobody names": "zombies change nothing",
    "a leftover that nobody brings": "nothing left out",
    "liveness by a writer's clock": "everyone counts",
    "a collection that takes rosters": "rounds in order",
    "a roster put over another": "rounds in order",
    "a refused update that is not listed": "counted once",
    "a return that trains counted rows": "rows once",
    "a claim put over another": "rows held",
    "a share from rounds instead of updates": "true mean",
    "an outcome taken for a receipt": "work conserved",
}


SYNCHRONOUS = {"a leftover that nobody brings"}
"""Bugs of synchronous rounds alone: an asynchronous update stands, and needs nobody."""


def trials_of(name: str) -> Iterator[Trial]:
    """Yield the trials in which a bug can show."""
    for seed in range(STORMS):
        tried = store_trial(seed)
        is_async = tried.settings["sync"].get("mode") == "async"
        if not (is_async and name in SYNCHRONOUS):
            yield tried


def violated(bug: Bug, tried: Trial) -> set[str]:
    """Return what does not hold with the bug; another storm has its own bug."""
    with bug():
        return {each.invariant for each in tried.run().violations}


@pytest.mark.parametrize("name", sorted(STORE_BUGS))
def test_a_rule_that_is_broken_is_caught_and_shrunk(name: str) -> None:
    """Within 200 storms, for what it is, with fewer faults, and not without the bug."""
    bug, expected = STORE_BUGS[name], CAUGHT_AS[name]
    caught = next(
        tried for tried in trials_of(name) if expected in violated(bug, tried)
    )

    def fails(plan: FaultPlan) -> bool:
        return expected in violated(bug, replace(caught, plan=plan))

    smallest = replace(caught, plan=shrink(caught.plan, fails, max_runs=25))
    assert len(smallest.plan.faults) < len(caught.plan.faults)
    assert smallest.run().violations == []


def test_every_bug_is_caught_for_something() -> None:
    """No bug is planted without a word of what finds it."""
    assert STORE_BUGS.keys() == CAUGHT_AS.keys()
