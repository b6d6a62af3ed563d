"""One direction between two processes, and what the weather does to it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from atoll.errors import UsageError

ARROW = "->"


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What happens to messages of some links, beyond their latency.

    Rates are chances per message. Several weathers on one link add up: delays are
    summed, chances are independent, the narrowest throttle holds.
    """

    link: str = "*"
    """`a->b` is one direction, `a` is all that `a` sends or gets, `*` is everything."""

    delay_s: float = 0.0
    delay_rate: float = 1.0
    spread_s: float = 0.0
    """Up to so much more delay, drawn anew each time, so that messages overtake."""

    spread_rate: float = 1.0
    loss: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    bytes_per_s: float = math.inf

    def touches(self, source: str, destination: str) -> bool:
        """Return whether messages from `source` to `destination` feel this."""
        if self.link == "*":
            return True
        here, arrow, there = self.link.partition(ARROW)
        if arrow:
            return (here, there) == (source, destination)
        return here in (source, destination)


@dataclass(frozen=True, kw_only=True)
class Latency:
    """What a link is like in good weather."""

    base_s: float = 0.02
    jitter_s: float = 0.01
    """Up to so much more, drawn per message."""

    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0 <= self.base_s < math.inf and 0 <= self.jitter_s < math.inf):
            raise UsageError(
                f"base_s={self.base_s!r} and jitter_s={self.jitter_s!r} must be finite "
                "and at least 0. Choose seconds such as 0.02."
            )
        if not self.bytes_per_s > 0:
            raise UsageError(
                f"bytes_per_s={self.bytes_per_s!r} must be above 0. "
                "Use a partition to cut a link."
            )


class Link:
    """One direction between two processes. Random numbers are its own stream."""

    def __init__(
        self, source: str, destination: str, rng: random.Random, latency: Latency
    ) -> None:
        self.source, self.destination, self.rng = source, destination, rng
        self._latency = latency
        self._free_at_s = 0.0
        """When the last byte sent so far has left, on a throttled link."""

        self.weathers: tuple[Weather, ...] = ()
        self.bytes_per_s = latency.bytes_per_s

    def __str__(self) -> str:
        return f"{self.source}{ARROW}{self.destination}"

    def expose(self, weathers: Iterable[Weather]) -> None:
        """Take what touches this link of all the weathers there are now."""
        self.weathers = tuple(
            each for each in weathers if each.touches(self.source, self.destination)
        )
        throttles = [each.bytes_per_s for each in self.weathers]
        self.bytes_per_s = min([self._latency.bytes_per_s, *throttles])

    def loses(self) -> bool:
        return any([self._draw(each.loss) for each in self.weathers])

    def duplicates(self) -> bool:
        return any([self._draw(each.duplicate) for each in self.weathers])

    def corrupts(self) -> bool:
        return any([self._draw(each.corrupt) for each in self.weathers])

    def arrival_s(self, now_s: float, size_bytes: int) -> float:
        """Return when a message sent now arrives; a throttled link sends in turn."""
        sent_s = now_s
        if self.bytes_per_s < math.inf:
            sent_s = max(now_s, self._free_at_s) + size_bytes / self.bytes_per_s
            self._free_at_s = sent_s
        flight_s = self._latency.base_s + self._latency.jitter_s * self.rng.random()
        for each in self.weathers:
            if each.delay_s and self._draw(each.delay_rate):
                flight_s += each.delay_s
            if each.spread_s and self._draw(each.spread_rate):
                flight_s += each.spread_s * self.rng.random()
        return sent_s + flight_s

    def _draw(self, rate: float) -> bool:
        return rate > 0.0 and (rate >= 1.0 or self.rng.random() < rate)
