"""The end of a run by its tokens: bounded, and the same for every island."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.simulate import FaultPlan
from tests.scenarios.async_runs import EVERY, settings, train

PACES_S = (0.05, 0.07, 0.3)
GOAL = 500


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("quorum", [1, 3])
@pytest.mark.parametrize("dies_s", [None, 15.0, 54.0])
def test_tokens_exceed_the_budget_by_less_than_two_windows(
    mode: str, quorum: int, dies_s: float | None
) -> None:
    """Of all islands, an inner step being a token; killing the coordinator too."""
    tables: dict[str, dict[str, Any]] = {
        "run": {
            "start_islands": 3,
            "quorum": quorum,
            "end_rounds": None,
            "end_tokens": GOAL,
        },
        "sync": {"num_fragments": 2},
    }
    faults = FaultPlan()
    if dies_s is not None:
        faults = faults.kill("coordinator", at_s=dies_s, back_after_s=2.0)
    _, seen = train(settings(mode=mode, tables=tables), *PACES_S, faults=faults)

    counted = {host.clock.tokens for host in seen.hosts.values()}
    ends = {host.digest for host in seen.hosts.values()}
    assert len(ends) == 1
    assert GOAL <= max(counted) < GOAL + 2 * EVERY * len(PACES_S)
