"""Denials are told sparingly, and none is forgotten."""

from __future__ import annotations

from atoll.security import (
    RateLimiter,
)
from atoll.security.audit import MAX_REPORTS, WITHIN_S


def test_ten_a_minute_are_told_and_the_rest_is_counted() -> None:
    """A thousand in a second cost ten; the first after a minute has their number."""
    sparing = RateLimiter()
    said = [sparing.untold("scan", now_s=n / 1000) for n in range(1000)]

    assert said == [0] * MAX_REPORTS + [None] * (1000 - MAX_REPORTS)
    assert sparing.untold("scan", now_s=WITHIN_S) == 1000 - MAX_REPORTS
    assert sparing.untold("scan", now_s=WITHIN_S + 1.0) == 0


def test_a_slow_trickle_is_told_whole() -> None:
    """Six seconds apart is ten a minute: each is told."""
    sparing = RateLimiter()

    assert {sparing.untold("token", now_s=6.0 * n) for n in range(100)} == {0}


def test_one_kind_does_not_hide_another() -> None:
    """While a scan is only counted, a wrong token is told."""
    sparing = RateLimiter(max_reports=2)
    for _ in range(5):
        sparing.untold("scan", now_s=0.0)

    assert sparing.untold("token", now_s=0.0) == 0
    assert sparing.untold("scan", now_s=0.0) is None
