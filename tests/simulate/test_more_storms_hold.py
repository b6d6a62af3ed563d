"""Two hundred storms with other fixed seeds; `make test-slow` runs them."""

from __future__ import annotations

import pytest

from atoll.simulate.trials import storm
from tests.simulate.test_storms_hold import BATCH, STORMS


@pytest.mark.parametrize("first", range(STORMS, 2 * STORMS, BATCH))
def test_every_invariant_holds_in_another_storm(first: int) -> None:
    """No seed of the batch violates an invariant."""
    seeds = range(first, first + BATCH)
    violations = {seed: storm(seed).violations for seed in seeds}

    assert {seed: str(v[0]) for seed, v in violations.items() if v} == {}
