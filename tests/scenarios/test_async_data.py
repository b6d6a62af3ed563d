"""Asynchronous runs that own their data: every row is in the anchor exactly once."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from atoll.data import DataSpec
from atoll.island.saved_state import Tree, from_tree, to_tree
from atoll.testing import FaultPlan, VectorView, VirtualIsland, virtual_run
from tests.scenarios.async_runs import BUFFER, DRIFT, MODEL, settings

ROWS, BATCH = 700, 4
WATCHER = "i2"
"""An island that reads no data, and sees the end of the run."""

PLANS = {
    "calm": FaultPlan(),
    "an island stays dead": FaultPlan().kill("i0", at_s=41.3),
    "an island rejoins": FaultPlan().kill("i0", at_s=33.3, back_after_s=4.0),
    "the coordinator dies": (
        FaultPlan()
        .kill("coordinator", at_s=17.5, back_after_s=2.0)
        .kill("coordinator", at_s=50.1, back_after_s=1.0)
    ),
    "both": (
        FaultPlan()
        .kill("i0", at_s=33.3, back_after_s=0.5)
        .kill("coordinator", at_s=33.4, back_after_s=1.0)
    ),
}


@pytest.mark.filterwarnings("ignore::atoll.errors.AtollWarning")
@pytest.mark.parametrize("saves", [False, True], ids=["afresh", "saved"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_row_is_trained_once(plan: FaultPlan, saves: bool) -> None:
    """Row r moves weight r modulo their number, whichever island trains it."""
    checkpoints: dict[str, Tree] = {}

    def loop(island: VirtualIsland) -> list[float]:
        view, tree = VectorView(), checkpoints.get(island.name)
        host = island.join(MODEL, view, saved=from_tree(tree) if tree else None)
        source = None
        if island.name != WATCHER:
            source = host.open_data(DataSpec(rows=ROWS), may_sync=True)
        while not host.has_ended:
            island.work(1.0 if island.name != "i1" else 2.3)
            if source is not None:
                rows = source.take(BATCH)
                if not len(rows):
                    break
                source.give(len(rows))
                local = view.local[0]
                np.subtract.at(local, rows % len(local), np.float32(DRIFT))
                host.count_tokens(len(rows))
            host.stepped()
            if saves:
                with host.saving(is_exact=False) as saved:
                    checkpoints[island.name] = copy.deepcopy(to_tree(saved))
        host.leave()
        return [float(value) for value in host.slots[0].state.anchor]

    run = settings(
        tables={
            "run": {"end_rounds": None, "start_islands": 3},
            "sync": {"sync_every": 8, "overlap_steps": 3},
            "data": {"order": "run", "unit_rows": 16},
        }
    )
    result = virtual_run(loop, run, islands=3, faults=plan)
    assert result.failures == {}
    anchor = np.array(result.returned[WATCHER])
    counts = np.bincount(np.arange(ROWS) % len(anchor))

    # The mean of three updates is rounded; a missing row would be a whole one.
    assert np.abs(anchor * BUFFER / -DRIFT - counts).max() < 0.01
