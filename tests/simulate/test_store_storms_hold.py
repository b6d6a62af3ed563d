"""Sixty storms over a bucket, of five islands and fifteen rounds, with fixed seeds.

`make storms-store` runs ten thousand with new seeds.
"""

from __future__ import annotations

import pytest

from atoll.simulate.trials import store_storm

STORMS, BATCH = 60, 6


@pytest.mark.parametrize("first", range(0, STORMS, BATCH))
def test_every_invariant_holds_in_a_storm_over_a_bucket(first: int) -> None:
    """Whatever fails, by seed: `explain(seed, store_trial)` is the test of one."""
    violated = {
        seed: str(result.violations[0])
        for seed in range(first, first + BATCH)
        if (result := store_storm(seed)).violations
    }

    assert violated == {}
