"""A burst at once, then a steady rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.protocol.coordinator_state import TokenBucket


def uses(budget: TokenBucket, moments: list[float]) -> int:
    """Return how many uses were allowed at these moments."""
    allowed = 0
    for moment_s in moments:
        after = budget.spent(moment_s)
        if after is not None:
            budget, allowed = after, allowed + 1
    return allowed


def test_a_burst_is_used_up_and_refilled() -> None:
    """Three at once, and one more after half a second at two per second."""
    budget = TokenBucket.full(3, per_s=2.0)

    assert uses(budget, [0.0] * 5) == 3
    assert uses(budget, [0.0] * 5 + [0.5, 0.5]) == 4


@given(st.lists(st.floats(0.0, 1000.0), max_size=200))
def test_no_order_of_uses_exceeds_the_rate(moments: list[float]) -> None:
    """At most the burst and what was refilled, also by a clock that goes back."""
    passed_s = max(moments, default=0.0)

    assert uses(TokenBucket.full(5, per_s=1.0), moments) <= 5 + passed_s


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    """One use is left at 10 s, and so it is at 5 s."""
    after = TokenBucket.full(2, per_s=1.0).spent(10.0)

    assert after is not None
    assert after.remaining_at(5.0) == 1.0


def test_time_that_passes_again_refills_nothing() -> None:
    """The last use is at 5 s after one at 10 s; at 10 s nothing is left."""
    assert uses(TokenBucket.full(2, per_s=1.0), [10.0, 5.0, 10.0]) == 2
    assert uses(TokenBucket.full(2, per_s=1.0), [10.0, 5.0, 10.0, 11.0]) == 3
