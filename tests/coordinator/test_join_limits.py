"""How often one address may ask to join."""

from __future__ import annotations

import pytest

from atoll.coordinator.routes import BURST, MAX_ADDRESSES, JoinLimits
from atoll.errors import Unreachable


def test_an_address_is_told_to_wait_and_others_are_not() -> None:
    """After its burst it may ask once per second."""
    limits = JoinLimits()
    for _ in range(BURST):
        limits.require("192.0.2.1", now_s=0.0)

    with pytest.raises(Unreachable, match=r"192\.0\.2\.1 has asked .* Ask again"):
        limits.require("192.0.2.1", now_s=0.0)
    limits.require("192.0.2.2", now_s=0.0)
    limits.require("192.0.2.1", now_s=1.0)


def test_the_table_of_addresses_is_bounded() -> None:
    """Whoever has many addresses makes the coordinator forget the oldest."""
    limits = JoinLimits()
    for number in range(MAX_ADDRESSES + 100):
        limits.require(str(number), now_s=0.0)

    assert len(limits) == MAX_ADDRESSES
