"""Whole asynchronous runs keep the identities of their law, in virtual time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.island import Host
from atoll.testing import FaultPlan, VectorView
from tests.scenarios.async_runs import (
    BUFFER,
    DRIFT,
    Observed,
    Stops,
    settings,
    train,
)

ENDLESS: dict[str, dict[str, Any]] = {"run": {"end_rounds": None}}

SYNCS: dict[str, dict[str, Any]] = {
    "at once": {"overlap_steps": 0},
    "in flight": {"overlap_steps": 4},
    "fragments": {"num_fragments": 2, "overlap_steps": 3},
}


@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
def test_equal_islands_train_as_in_a_synchronous_run(sync: dict[str, Any]) -> None:
    """With a quorum of all and no buffer set, every state has the same bits."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"start_islands": 3, "quorum": 3, "end_rounds": 6},
        "sync": sync,
        "outer": {"optimizer": "nesterov", "lr": 0.7},
    }
    _, waiting = train(settings(mode="sync", tables=tables), 1.0, 1.0, 1.0)
    run = settings(tables={**tables, "async": {"buffer": None}})
    _, free = train(run, 1.0, 1.0, 1.0)

    assert len(waiting.digests) >= 6
    assert waiting.digests.items() <= free.digests.items()


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
    assert slow.tally.counted >= 2
    assert slow.tally.dropped == slow.tally.carried == slow.tally.refused == 0
    moved = -DRIFT / BUFFER * slow.position.tokens
    assert set(slow.slots[0].state.anchor) == {moved}


LAST_STEP = 200
"""The last inner step in which i1 trains: all of it has counted when i1 ends."""


def of_its_own(host: Host, view: VectorView, number: int) -> None:
    """Move every second weight: the even ones are of i0, the odd ones of i1."""
    if number == 0 or host.tally.inner_steps < LAST_STEP:
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


REJOINS = {
    "before its first seal": (9.3, FaultPlan()),
    "with an update that stands": (17.4, FaultPlan()),
    "with an update that has passed": (18.9, FaultPlan()),
    "and its staged update with the coordinator": (
        17.4,
        FaultPlan().kill("coordinator", at_s=17.5, back_after_s=1.0),
    ),
}


@pytest.mark.parametrize("back_after_s", [0.5, 30.0])
@pytest.mark.parametrize("grace_s", [0.0, 3.0, 60.0])
@pytest.mark.parametrize("death", REJOINS.values(), ids=REJOINS)
def test_all_work_of_an_island_that_rejoins_counts_once(
    death: tuple[float, FaultPlan], grace_s: float, back_after_s: float
) -> None:
    """The part of a checkpoint that no roster lists is put on the present anchor."""
    at_s, plan = death
    run = settings(tables={**ENDLESS, "async": {"grace_s": grace_s}})
    _, seen = train(
        run,
        *(1.0, 0.7),
        step=of_its_own,
        stops={"i0": Stops(50), "i1": Stops(300)},
        save_every=1,
        faults=plan.kill("i0", at_s=at_s, back_after_s=back_after_s),
    )

    assert len(seen.resumed) == 1
    assert seen.hosts["i0"].tally.inner_steps == 50
    assert counted_steps(seen) == ({50}, {LAST_STEP})
