"""Why the listener closes a connection that has done nothing wrong by itself."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable

from atoll.http.channel import Channel


class Shed(enum.Enum):
    """Which bound was reached. The values are words of audits, and stable."""

    NO_TOKEN = "too_many"
    """Too many connections without a verified token: the oldest is closed."""

    IDLE = "idle"
    """No room for another connection: the one that is silent longest is closed."""

    FULL = "full"
    """No room for another connection, and none that may be closed for it."""

    SLOW_READER = "slow_reader"
    """It does not read its answer."""

    SLOW_TRANSFER = "slow_transfer"
    """It moves a bulk body too slowly while others wait for a lane."""


OnShed = Callable[[str, Shed], None]
"""Called with the IP address of a connection that is shed; must not block."""


class ShedCounter:
    """Counts shed connections and reports them. Used by the lot's thread only."""

    def __init__(self, on_shed: OnShed) -> None:
        self._on_shed = on_shed
        self._counts: Counter[Shed] = Counter()

    def note(self, channel: Channel, why: Shed) -> None:
        self.note_address(channel.address[0], why)

    def note_address(self, address: str, why: Shed) -> None:
        self._counts[why] += 1
        self._on_shed(address, why)

    def counts(self) -> dict[str, int]:
        """Return how many were shed so far, by reason. From any thread."""
        return {why.value: self._counts[why] for why in Shed}
