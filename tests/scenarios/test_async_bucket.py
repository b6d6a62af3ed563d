"""Islands of different speeds with asynchronous rounds in a bucket, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from atoll import RunSettings
from atoll.simulate import FaultPlan
from atoll.simulate.run import Conditions, Simulated, simulate

ROUNDS = 24
STEP_S = 2.0
PACES = {"i0": 1.0, "i1": 3.5}
"""How many times longer an inner step takes on each island."""


def settings(*, mode: str = "async", **sync: Any) -> RunSettings:
    """Return the settings of a run whose work is weighted by tokens."""
    tables: dict[str, Any] = {
        "run": {"start_islands": 2, "end_rounds": ROUNDS},
        "sync": {"mode": mode, "sync_every": 10, "overlap_steps": 3, **sync},
        "outer": {"weight": "tokens"},
    }
    if mode == "async":
        tables["async"] = {"grace_s": 1.0, "staleness": "inverse_root"}
    return RunSettings.from_dict(tables)


def survived(
    run: RunSettings, plan: FaultPlan | None = None, *, seed: int = 0
) -> Simulated:
    """Run two islands to the end; every invariant holds, and they have one anchor."""
    result = simulate(
        run,
        islands=2,
        faults=plan,
        seed=seed,
        store=True,
        conditions=Conditions(step_s=STEP_S, paces=PACES),
    )
    assert result.failures == {}
    assert result.violations == []
    assert len(set(result.digests.values())) == 1
    return result


def test_a_fast_island_does_not_wait_for_a_slow_one() -> None:
    """It trains nearly all the time, where it waits most of the time otherwise."""
    asynchronous = survived(settings())
    synchronous = survived(settings(mode="sync"))

    assert asynchronous.rounds == (ROUNDS,)
    assert sorted(asynchronous.digests) == ["i0", "i1"]
    assert asynchronous.utilisation["i0"] > 0.9
    assert synchronous.utilisation["i0"] < 0.5


def test_islands_that_are_killed_and_return_lose_what_they_had_not_published() -> None:
    """What they had published counts once, and they join when it has."""
    plan = (
        FaultPlan()
        .kill("i0", at_round=4, back_after_s=20.0)
        .kill("i1", at_round=9, back_after_s=30.0)
        .kill("i0", at_round=15, back_after_s=3.0)
    )
    result = survived(settings(), plan)

    assert result.rounds == (ROUNDS,)
    assert result.deaths == {"i0": 2, "i1": 1}


def test_both_islands_may_die_at_once() -> None:
    """The one that returns closes the round with its own earlier update."""
    plan = (
        FaultPlan()
        .kill("i0", at_round=6, back_after_s=45.0)
        .kill("i1", at_round=6, back_after_s=60.0)
    )

    assert survived(settings(), plan).rounds == (ROUNDS,)


def test_fragments_end_with_rounds_of_their_own() -> None:
    """The last round of each one is open when the run is to end, and waits for all."""
    result = survived(settings(num_fragments=2))

    assert min(result.rounds) >= ROUNDS
    assert sorted(result.digests) == ["i0", "i1"]


def test_lists_that_lag_behind_and_a_store_that_fails_cost_time_only() -> None:
    """No update is lost, and none is listed twice."""
    plan = (
        FaultPlan()
        .list_lag("store", by_s=4.0, at_round=3, for_s=120.0)
        .outage("store", at_round=10, for_s=20.0)
        .kill("i1", at_round=12, back_after_s=10.0)
    )

    assert survived(settings(), plan).rounds == (ROUNDS,)


def test_an_island_that_stands_still_while_it_closes_a_round_changes_nothing() -> None:
    """It wakes when others have closed the round, and its update counts later."""
    plan = FaultPlan().freeze("i0", at_round=5, for_s=90.0)

    assert survived(settings(), plan).rounds == (ROUNDS,)


FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "fragments in flight": {"sync": {"num_fragments": 2, "overlap_steps": 3}},
    "error feedback": {"wire": {"up": "e3m0", "down": "int8"}},
    "gather": {"wire": {"up": "e3m0", "down": "gather"}},
    "tokens": {"outer": {"weight": "tokens"}},
    "windows": {"sync": {"dynamic_local_updates": True}},
}


def digests(
    feature: dict[str, dict[str, Any]], *, mode: str, islands: int, **sync: Any
) -> list[bytes]:
    """Return the last anchors and velocities of islands of one pace, hashed."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"start_islands": islands, "quorum": islands, "end_rounds": 5},
        **feature,
        "sync": {"sync_every": 6, "mode": mode, **feature.get("sync", {}), **sync},
    }
    result = simulate(RunSettings.from_dict(tables), islands=islands, store=True)
    assert result.violations == []
    assert len(result.digests) == islands
    return result.coordinator_digests


@pytest.mark.parametrize("islands", [1, 3])
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_equal_islands_train_as_in_a_synchronous_run(
    feature: dict[str, dict[str, Any]], islands: int
) -> None:
    """With a quorum of all and no buffer set, states have the same bits."""
    waiting, free = (
        digests(feature, mode=mode, islands=islands) for mode in ("sync", "async")
    )

    assert waiting == free


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_islands_of_one_pace_train_as_without_windows(mode: str) -> None:
    """The setting changes no bit where no island is slower than another."""
    without, with_windows = (
        digests({}, mode=mode, islands=3, dynamic_local_updates=is_dynamic)
        for is_dynamic in (False, True)
    )

    assert without == with_windows
