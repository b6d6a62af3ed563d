"""Two hundred storms of five islands and twenty rounds, with fixed seeds.

`make test-slow` runs two hundred more, and `make storms` ten thousand with new seeds.
"""

from __future__ import annotations

import pytest

from atoll.simulate.trials import storm

STORMS = 200
BATCH = 20


@pytest.mark.parametrize("first", range(0, STORMS, BATCH))
def test_every_invariant_holds_in_a_storm(first: int) -> None:
    """Whatever fails, by seed: `trials.explain(seed)` is the test of one that does.

    Each seed draws its own settings, departures and faults.
    """
    violated = {
        seed: str(result.violations[0])
        for seed in range(first, first + BATCH)
        if (result := storm(seed)).violations
    }

    assert violated == {}
