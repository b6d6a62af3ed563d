"""Rows of simulated runs in a bucket: each is trained once, and none is lost."""

from __future__ import annotations

from typing import Any

import pytest

from atoll import RunSettings
from atoll.simulate import FaultPlan
from atoll.simulate.run import Simulated, simulate
from atoll.simulate.trials import store_trial
from tests.simulate.test_rows import CONDITIONS, MODES

STORMS = [seed for seed in range(40) if store_trial(seed).conditions.rows]
ROWS = 2 * CONDITIONS.rows


def passed(sync: dict[str, Any], plan: FaultPlan) -> Simulated:
    """Return a run of two passes in a bucket, which its data ends."""
    settings = {
        "run": {"start_islands": 4},
        "sync": {"sync_every": 5, "num_fragments": 2, **sync},
        "data": {"order": "run", "unit_rows": 16, "passes": 2},
    }
    return simulate(
        RunSettings.from_dict(settings),
        faults=plan,
        conditions=CONDITIONS,
        seed=7,
        store=True,
    )


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
@pytest.mark.parametrize("sync", MODES.values(), ids=MODES)
def test_a_calm_run_trains_every_row(sync: dict[str, Any]) -> None:
    """Four islands of different speeds decide by the log of claims."""
    result = passed(sync, FaultPlan())

    assert result.violations == []
    assert result.rows is not None
    assert result.rows.trained == ROWS


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
def test_deaths_cost_a_pass_nothing() -> None:
    """An island dies again and again, and comes back to the rows of its name."""
    plan = FaultPlan()
    for at_s in range(10, 120, 15):
        plan = plan.kill("i2", at_s=at_s + 0.3, back_after_s=1.0)
    result = passed({"num_fragments": 1}, plan)

    assert result.violations == []
    assert sum(result.deaths.values()) >= 3
    assert result.rows is not None
    assert result.rows.trained == ROWS


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
@pytest.mark.parametrize("seed", STORMS)
def test_every_invariant_holds_in_a_storm_with_rows(seed: int) -> None:
    """Also those of rows, in all modes."""
    assert store_trial(seed).run().violations == []
