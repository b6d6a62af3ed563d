"""What an island measures of its link: rates of large bodies, and the round trip."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.island.progress import MIN_BYTES, TRANSFERS, LinkMeter
from atoll.store import CountedStore, MemoryStore


@dataclass
class ManualClock:
    """A clock that a test moves."""

    time_s: float = 0.0

    def now_s(self) -> float:
        return self.time_s


class TickingClock(ManualClock):
    """A clock on which each look takes a second."""

    def now_s(self) -> float:
        self.time_s += 1.0
        return self.time_s


def test_a_rate_is_the_median_of_the_last_large_transfers() -> None:
    """Of 16 transfers 8 took 1 s and 8 took 2 s; others do not count."""
    clock = ManualClock(1000.0)
    meter = LinkMeter(clock)
    meter.sent(10 * MIN_BYTES, 0.0)
    for index in range(TRANSFERS):
        meter.sent(MIN_BYTES, clock.time_s - 1.0 - index % 2)
    meter.sent(MIN_BYTES - 1, 0.0)

    # Rates of MIN_BYTES and MIN_BYTES / 2 per second: the median is in between.
    assert meter.metrics() == {"atoll/up_bytes_per_s": 0.75 * MIN_BYTES}


def test_what_was_not_measured_is_not_there() -> None:
    """No transfer, no rate; a transfer that took no time has none either."""
    meter = LinkMeter(ManualClock())
    meter.received(MIN_BYTES, 0.0)

    assert meter.metrics() == {}


def test_requests_to_a_store_are_measured() -> None:
    """A small put measures the round trip, and large objects both rates."""
    meter = LinkMeter(TickingClock())
    store = CountedStore(MemoryStore(), meter=meter)
    store.put("small", [b"x"])
    store.put_new("large", [bytes(MIN_BYTES)])
    assert len(store.get("large")) == MIN_BYTES

    # Each look at the clock takes a second: a large put is looked at once.
    assert meter.metrics() == {
        "atoll/rtt_s": 2.0,
        "atoll/up_bytes_per_s": MIN_BYTES,
        "atoll/down_bytes_per_s": MIN_BYTES,
    }
