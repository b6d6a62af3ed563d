"""Rows of simulated runs: every one is trained when nothing fails, and named if not."""

from __future__ import annotations

from typing import Any

import pytest

from atoll import RunSettings
from atoll.simulate import FaultPlan
from atoll.simulate.run import Conditions, Simulated, simulate

CONDITIONS = Conditions(
    rows=900,
    batch=8,
    paces={"i0": 1.0, "i1": 1.3, "i2": 2.6, "i3": 5.7},
)
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "dynamic": {"dynamic_local_updates": True},
    "asynchronous": {"mode": "async", "overlap_steps": 2},
    "both": {"mode": "async", "overlap_steps": 2, "dynamic_local_updates": True},
}


def passed(sync: dict[str, Any], plan: FaultPlan, **conditions: Any) -> Simulated:
    """Return a run of two passes, which its data ends."""
    settings = {
        "run": {"start_islands": 4},
        "sync": {"sync_every": 5, "num_fragments": 2, **sync},
        "limits": {"deadline_max_s": 40.0},
        "data": {"order": "run", "unit_rows": 16, "passes": 2},
    }
    named = {**vars(CONDITIONS), **conditions}
    return simulate(
        RunSettings.from_dict(settings),
        faults=plan,
        conditions=Conditions(**named),
        seed=7,
    )


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
@pytest.mark.parametrize("sync", MODES.values(), ids=MODES)
def test_a_calm_run_trains_every_row(sync: dict[str, Any]) -> None:
    """Four islands of different speeds, whatever the rounds wait for."""
    result = passed(sync, FaultPlan())

    assert result.violations == []
    assert result.rows is not None
    assert result.rows.trained == 2 * 900


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
@pytest.mark.parametrize("sync", MODES.values(), ids=MODES)
def test_the_rows_of_an_evicted_island_are_trained_by_the_others(
    sync: dict[str, Any],
) -> None:
    """It died and stays dead; only rows that some fragments have are partly trained."""
    plan = FaultPlan().kill("i1", at_s=20.2)
    result = passed(sync, plan, evicted_after_s=5.0)

    assert result.violations == []
    assert result.rows is not None
    assert result.rows.in_hand == result.rows.free == result.rows.refused == 0
    assert result.rows.trained + result.rows.partly == 2 * 900


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
def test_deaths_cost_a_pass_nothing() -> None:
    """An island and the coordinator die again and again, and come back.

    With one fragment no row is counted by a part of the fragments only.
    """
    plan = FaultPlan()
    for at_s in range(10, 120, 15):
        plan = plan.kill("i2", at_s=at_s + 0.3, back_after_s=1.0)
        plan = plan.kill("coordinator", at_s=at_s + 7.7, back_after_s=0.5)
    result = passed({"num_fragments": 1}, plan)

    assert result.violations == []
    assert sum(result.deaths.values()) >= 3
    assert result.rows is not None
    assert result.rows.trained == 2 * 900
