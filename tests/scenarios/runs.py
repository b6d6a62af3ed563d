"""A small run in virtual time, and what it means to survive."""

from __future__ import annotations

from atoll import RunSettings
from atoll.simulate import FaultPlan
from atoll.simulate.run import Simulated, simulate

ISLANDS, ROUNDS = 4, 8
NAMES = [f"i{number}" for number in range(ISLANDS)]
CALM_S = 49.0
"""What the run takes when nothing fails: 8 rounds of 12 steps of half a second."""


def settings(**run: object) -> RunSettings:
    """Return the settings of the run, which may be told a quorum."""
    return RunSettings.from_dict(
        {
            "run": {"start_islands": ISLANDS, "end_rounds": ROUNDS, **run},
            "sync": {"sync_every": 12, "num_fragments": 2, "overlap_steps": 1},
            "wire": {"up": "e3m0", "down": "int8"},
            "limits": {"deadline_max_s": 60.0},
        }
    )


def survived(plan: FaultPlan, *, seed: int = 0, **run: object) -> Simulated:
    """Run under a plan: all rounds are committed, and nobody's anchor differs."""
    result = simulate(settings(**run), islands=ISLANDS, faults=plan, seed=seed)
    assert result.failures == {}
    assert result.violations == []
    assert result.rounds == (ROUNDS, ROUNDS)
    assert len(set(result.digests.values())) == 1
    return result


def all_survived(plan: FaultPlan, *, seed: int = 0, **run: object) -> Simulated:
    """Run under a plan to an end that every island sees."""
    result = survived(plan, seed=seed, **run)
    assert sorted(result.digests) == NAMES
    return result
