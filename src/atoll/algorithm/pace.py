"""How long an island may take, what a slower one does, and how age lowers a weight.

An island is late beyond the median of its last arrivals plus `patience` spreads. So a
slow, steady island is waited for and one that stopped is not, without a timeout to
tune. With dynamic local updates a slower island makes fewer inner steps per window, so
that none is waited for. In an asynchronous run no island is late: an update has an age
instead, and its factor is a whole number, so that weights are exact. All functions here
are pure: the caller passes times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from atoll.algorithm.arithmetic import fp32
from atoll.errors import UsageError

MIN_ARRIVALS = 5
"""Arrivals before a deadline is learned at all."""

LAST = 21
"""Arrivals that are remembered: a change of pace is learned within half of them."""

LONGEST_S = 1e9
"""Beyond any deadline: arrivals that are scaled again and again stay finite."""

NORMAL_SPREAD = 1.4826
"""Standard deviations per median deviation, if arrivals are normally distributed."""

LEAST_SPREAD = 0.05
"""The spread is at least this part of the median: arrivals that were all alike must
not make the next one late by a hair."""


@dataclass(frozen=True)
class Arrivals:
    """How long after its round opened each of an island's last updates came."""

    seconds: tuple[float, ...] = ()
    """Oldest first."""

    @cached_property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @cached_property
    def spread_s(self) -> float:
        """How far from the median arrivals are, scaled to a standard deviation."""
        median_s = self.median_s
        distance = statistics.median(
            [abs(arrival_s - median_s) for arrival_s in self.seconds]
        )
        return max(NORMAL_SPREAD * distance, LEAST_SPREAD * median_s)

    def then(self, arrival_s: float) -> Arrivals:
        """Return the arrivals with one more, without the oldest beyond `LAST`."""
        if not 0.0 <= arrival_s < math.inf:
            raise UsageError(f"arrival_s={arrival_s} must be finite and not negative.")
        return Arrivals((*self.seconds, arrival_s)[-LAST:])

    def slower(self, factor: float) -> Arrivals:
        """Return the arrivals of an island that takes `factor` times as long."""
        seconds = [min(factor * arrival_s, LONGEST_S) for arrival_s in self.seconds]
        return Arrivals(tuple(seconds))


def deadline_s(
    arrivals: Arrivals, *, patience: float, lower_s: float, upper_s: float
) -> float:
    """Return how long after its round opens an island is late.

    median + patience * spread, within the bounds; `upper_s` before
    `MIN_ARRIVALS` arrivals. The spread is the median distance from the median, scaled
    to a standard deviation: one extraordinary arrival moves neither.

    >>> steady = Arrivals((9.0, 10.0, 10.0, 11.0, 500.0))
    >>> round(deadline_s(steady, patience=3.0, lower_s=1.0, upper_s=600.0), 3)
    14.448
    """
    if len(arrivals.seconds) < MIN_ARRIVALS:
        return upper_s
    late_s = arrivals.median_s + patience * arrivals.spread_s
    return min(max(late_s, lower_s), upper_s)


NEAR = Fraction(1, 8)
"""A pace that differs by less does not change a window: noise must not move it."""


def local_steps(
    present: int, *, step_s: float | None, fastest_s: float | None, sync_every: int
) -> int:
    """Return an island's inner steps per window, so that all windows take equally long.

    With H = sync_every, the island makes q = H * fastest_s / step_s inner steps while
    the fastest one makes H. Its window is floor(q), from 1 to H. The present h stays
    while 7/8 h <= q < 9/8 (h + 1), and while a pace is not known. Quotients are exact.

    Dynamic local updates are those of arXiv 2401.09135, which sets h by the pace of
    each round. Here it stays at first: noise would change it in most rounds.

    >>> local_steps(10, step_s=0.5, fastest_s=0.2, sync_every=10)
    4
    >>> local_steps(4, step_s=0.55, fastest_s=0.2, sync_every=10)  # 3.6 of 10
    4
    """
    if not 1 <= present <= sync_every:
        raise UsageError(
            f"present={present} must be from 1 to sync_every={sync_every} inner steps."
        )
    if step_s is None or fastest_s is None:
        return present
    for name, seconds in (("step_s", step_s), ("fastest_s", fastest_s)):
        if not 0.0 < seconds < math.inf:
            raise UsageError(f"{name}={seconds} must be finite and above 0.")
    exact = sync_every * Fraction(fastest_s) / Fraction(step_s)
    if (1 - NEAR) * present <= exact < (1 + NEAR) * (present + 1):
        return present
    return max(1, min(sync_every, math.floor(exact)))


FULL_FACTOR = 2**20
"""The factor of an update that its age does not lower."""

MAX_WEIGHT = 2**64 - 1
"""The largest weight that a roster can hold."""

_FACTORS: dict[str, Callable[[int], int]] = {
    "none": lambda age: FULL_FACTOR,
    "inverse": lambda age: FULL_FACTOR // (1 + age),
    "inverse_root": lambda age: math.isqrt(FULL_FACTOR * FULL_FACTOR // (1 + age)),
    "exponential": lambda age: FULL_FACTOR >> min(age, 63),
}


def factor(kind: str, age: int) -> int:
    """Return the factor of an update of this age, in units of 1 / FULL_FACTOR.

    `kind` is a value of `async.staleness`: none 1, inverse 1 / (1 + age), inverse_root
    its square root, exponential 2**-age. A factor is at least one unit.

    >>> [factor("inverse", age) / FULL_FACTOR for age in (0, 1, 3)]
    [1.0, 0.5, 0.25]
    """
    if age < 0:
        raise UsageError(f"age={age} must be at least 0 rounds.")
    return max(1, _FACTORS[kind](age))


def aged_weight(weight: int, age: int, *, kind: str) -> int:
    """Return the weight of an update in a round `age` rounds after its label.

    It is `weight` itself with the kind none, and weight * factor(age) with the others.
    """
    if kind == "none":
        return weight
    return min(weight * factor(kind, age), MAX_WEIGHT)


def buffer_share(ages: Sequence[int], *, kind: str, buffer: int) -> float:
    """Return the part of a buffer that a round's counted updates fill, at most 1.

    min(1, sum_i factor(age_i) / buffer), one fp64 quotient rounded to fp32.

    >>> buffer_share([0, 1], kind="inverse", buffer=4)  # (1 + 1/2) / 4
    0.375
    """
    if buffer < 1 or not ages:
        raise UsageError(
            f"{len(ages)} updates have no share of buffer={buffer}. Both must be at "
            "least 1."
        )
    filled = sum(factor(kind, age) for age in ages)
    return fp32(min(1.0, filled / (buffer * FULL_FACTOR)))
