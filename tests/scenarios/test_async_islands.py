"""Whole asynchronous runs keep the identities of their law, in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.island import Host
from atoll.protocol import ModelSpec
from atoll.testing import FaultPlan, VectorView
from tests.scenarios.async_runs import (
    BUFFER,
    DRIFT,
    EVERY,
    MODEL,
    WITH_BUFFERS,
    Observed,
    Stops,
    learn,
    settings,
    train,
)

ENDLESS: dict[str, dict[str, Any]] = {"run": {"end_rounds": None}}

ALL: dict[str, dict[str, Any]] = {
    "run": {"start_islands": 3, "quorum": 3, "end_rounds": 6},
    "outer": {"optimizer": "nesterov", "lr": 0.7},
}
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "at once": {"sync": {"overlap_steps": 0}},
    "fragments in flight": {"sync": {"num_fragments": 2, "overlap_steps": 3}},
    "error feedback": {"wire": {"up": "e3m0", "down": "int8"}},
    "sparse": {
        "wire": {"up": "topk-2bit", "down": "bf16"},
        "outer": {"optimizer": "sgd", "lr": 1.0},
    },
    "gather": {"wire": {"up": "e3m0", "down": "gather"}},
    "mix": {"sync": {"adopt": "mix", "keep_local": 0.25}},
    "tokens": {"outer": {**ALL["outer"], "weight": "tokens"}},
    "radial": {"outer": {**ALL["outer"], "merge": "radial"}},
    "windows": {"sync": {"dynamic_local_updates": True}},
}


@pytest.mark.parametrize("model", [MODEL, WITH_BUFFERS], ids=["plain", "buffers"])
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_equal_islands_train_as_in_a_synchronous_run(
    feature: dict[str, dict[str, Any]], model: ModelSpec
) -> None:
    """With a quorum of all and no buffer set, states and weights have the same bits."""
    (_, waiting), (_, free) = (
        train(
            settings(mode=mode, tables={**ALL, **feature, **tables}),
            *(1.0, 1.0, 1.0),
            step=learn,
            model=model,
        )
        for mode, tables in (("sync", {}), ("async", {"async": {"buffer": None}}))
    )

    assert len(waiting.digests) >= 6
    assert waiting.digests == free.digests
    assert waiting.weights == free.weights


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_islands_of_all_paces_hold_the_same_states(
    feature: dict[str, dict[str, Any]],
) -> None:
    """After each round, and whichever of them dies; all see the end."""
    run = {"start_islands": 3, "end_rounds": 20}
    plan = FaultPlan().kill("coordinator", at_s=61.0, back_after_s=3.0)
    result, seen = train(
        settings(tables={**ALL, **feature, "run": run, "async": {"buffer": None}}),
        *(1.0, 1.3, 4.1),
        step=learn,
        model=WITH_BUFFERS,
        faults=plan.kill("i1", at_s=90.0, back_after_s=5.0),
        save_every=1,
    )

    assert len(set(result.returned.values())) == 1
    assert len(result.returned) == 3
    for host in seen.hosts.values():
        counters = host.counters
        assert counters.carried == counters.dropped == counters.refused == 0
        assert counters.counted > 0


def test_a_slow_island_makes_fewer_inner_steps_in_a_window() -> None:
    """By the rosters that list it; the fastest one makes all of them."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"start_islands": 3},
        "sync": {"dynamic_local_updates": True},
    }
    _, seen = train(settings(tables=tables), 1.0, 2.0, 4.0)

    windows = [seen.hosts[f"i{number}"].stride.window for number in range(3)]
    assert windows == [EVERY, EVERY // 2, EVERY // 4]


def test_one_island_trains_as_in_a_synchronous_run() -> None:
    """The buffer is full with each of its updates, and no other island passes it."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"start_islands": 1, "end_rounds": 5},
        "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5},
    }
    _, waiting = train(settings(mode="sync", tables=tables), 1.0)
    for buffer in (None, 1):
        run = settings(tables={**tables, "async": {"buffer": buffer}})
        _, free = train(run, 1.0)
        assert free.digests == waiting.digests


PLANS = {
    "calm": FaultPlan(),
    "an island dies": FaultPlan().kill("i0", at_s=70.0, back_after_s=11.0),
    "the slow island dies": FaultPlan().kill("i1", at_s=150.0, back_after_s=40.0),
    "the coordinator dies": (
        FaultPlan()
        .kill("coordinator", at_s=33.0, back_after_s=2.0)
        .kill("coordinator", at_s=100.1, back_after_s=9.0)
    ),
    "both": (
        FaultPlan()
        .kill("i1", at_s=95.0, back_after_s=2.0)
        .kill("coordinator", at_s=95.5, back_after_s=1.0)
    ),
}


@pytest.mark.parametrize("save_every", [0, 5])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_constant_drift_moves_the_anchor_by_the_steps_that_counted(
    plan: FaultPlan, save_every: int
) -> None:
    """Exactly, for any order and age of the updates, and whichever process dies."""
    _, seen = train(settings(), 1.0, 5.7, faults=plan, save_every=save_every)

    for host in seen.hosts.values():
        moved = -DRIFT / BUFFER * host.position.tokens
        assert set(host.slots[0].state.anchor) == {moved}
    assert max(seen.ages) > 3


def test_a_slow_island_is_conserved_at_any_age() -> None:
    """An island that is 20 times slower contributes all of its work, once."""
    run = settings(tables={"run": {"end_rounds": 60}})
    _, seen = train(run, 1.0, 20.0)

    assert max(seen.ages) >= 14
    slow = seen.hosts["i1"]
    assert slow.counters.counted >= 2
    assert slow.counters.dropped == slow.counters.carried == slow.counters.refused == 0
    moved = -DRIFT / BUFFER * slow.position.tokens
    assert set(slow.slots[0].state.anchor) == {moved}


LAST_STEP = 200
"""The last inner step in which i1 trains: all of it has counted when i1 ends."""


def of_its_own(host: Host, view: VectorView, number: int) -> None:
    """Move every second weight: the even ones are of i0, the odd ones of i1."""
    if number == 0 or host.counters.inner_steps < LAST_STEP:
        for local in view.local:
            local[number::2] -= np.float32(DRIFT)


def counted_steps(seen: Observed) -> tuple[set[float], set[float]]:
    """Return by how many inner steps of each island the anchor of i1 has moved."""
    anchor = seen.hosts["i1"].slots[0].state.anchor
    even, odd = (set((anchor[n::2] * BUFFER / -DRIFT).tolist()) for n in range(2))
    return even, odd


LEAVES = {
    "before its first seal": 5,
    "at a seal": 16,
    "with a flight and a rest": 19,
    "at the take": 20,
    "with two seals behind": 37,
}


@pytest.mark.parametrize("grace_s", [0.0, 40.0])
@pytest.mark.parametrize("steps", LEAVES.values(), ids=LEAVES)
def test_all_work_of_an_island_that_leaves_counts(steps: int, grace_s: float) -> None:
    """Its update in flight departs, and the rest of its work with the next label."""
    run = settings(tables={**ENDLESS, "async": {"grace_s": grace_s}})
    _, seen = train(
        run,
        *(1.0, 0.7),
        step=of_its_own,
        stops={"i0": Stops(steps), "i1": Stops(300)},
    )

    assert counted_steps(seen) == ({steps}, {LAST_STEP})


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
@pytest.mark.parametrize("steps", [5, 16, 18])
def test_sync_now_returns_with_the_receipt_of_all_work(
    steps: int, grace_s: float
) -> None:
    """Before a send point, at one, and with an update in flight, which comes first."""
    settled: list[tuple[int, bool]] = []

    def sync(host: Host) -> None:
        host.sync_now()
        settled.append((host.settled_steps, host.slots[0].sealed is None))

    _, seen = train(
        settings(tables={**ENDLESS, "async": {"grace_s": grace_s}}),
        *(1.0, 0.7),
        step=of_its_own,
        stops={"i0": Stops(steps, sync), "i1": Stops(300)},
    )

    assert settled == [(steps, True)]
    assert counted_steps(seen) == ({steps}, {LAST_STEP})


def test_a_staged_update_that_the_coordinator_loses_is_offered_again() -> None:
    """It was sealed for round 1, and stands in round 2 when the coordinator dies."""
    run = settings(tables={**ENDLESS, "async": {"grace_s": 3.0}})
    _, seen = train(
        run,
        *(1.0, 0.7),
        step=of_its_own,
        stops={"i0": Stops(50), "i1": Stops(300)},
        faults=FaultPlan().kill("coordinator", at_s=17.5, back_after_s=1.0),
    )

    assert counted_steps(seen) == ({50}, {LAST_STEP})


REJOINS = {
    "before its first seal": (9.3, FaultPlan()),
    "with an update that stands": (17.4, FaultPlan()),
    "with an update that has passed": (18.9, FaultPlan()),
    "and its staged update with the coordinator": (
        17.4,
        FaultPlan().kill("coordinator", at_s=17.5, back_after_s=1.0),
    ),
}


@pytest.mark.parametrize("is_exact", [False, True], ids=["work", "exact"])
@pytest.mark.parametrize("back_after_s", [0.5, 30.0])
@pytest.mark.parametrize("grace_s", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("death", REJOINS.values(), ids=REJOINS)
def test_all_work_of_an_island_that_rejoins_counts_once(
    death: tuple[float, FaultPlan], grace_s: float, back_after_s: float, is_exact: bool
) -> None:
    """The part of a checkpoint that no roster lists is put on the present anchor.

    A checkpoint that would allow an exact resume is taken as work, with a reason.
    """
    at_s, plan = death
    run = settings(tables={**ENDLESS, "async": {"grace_s": grace_s}})
    _, seen = train(
        run,
        *(1.0, 0.7),
        step=of_its_own,
        stops={"i0": Stops(50), "i1": Stops(300)},
        save_every=1,
        is_exact=is_exact,
        faults=plan.kill("i0", at_s=at_s, back_after_s=back_after_s),
    )

    (resumed,) = seen.resumed
    assert resumed.resumed
    assert not resumed.resumed.is_exact
    assert ("asynchronous run" in resumed.resumed.reason) == is_exact
    assert seen.hosts["i0"].counters.inner_steps == 50
    assert counted_steps(seen) == ({50}, {LAST_STEP})
