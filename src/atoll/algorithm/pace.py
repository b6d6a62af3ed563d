"""How long an island may take, and how an update's age lowers its weight.

An island is late beyond the median of its last arrivals plus `patience` spreads. So a
slow, steady island is waited for and one that stopped is not, without a timeout to
tune. In an asynchronous run no island is late: an update has an age instead, and its
factor is a whole number, so that weights are exact. All functions here are pure: the
caller passes times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from atoll.algorithm.arithmetic import fp32
from atoll.errors import UsageError

MIN_ARRIVALS = 5
"""Arrivals before a deadline is learned at all."""

LAST = 21
"""Arrivals that are remembered: a change of pace is learned within half of them."""

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


def dynamic_steps(speeds: Mapping[str, float], *, sync_every: int) -> dict[str, int]:
    """Return each island's inner steps per window, so that all take equally long.

    H_w = max(1, floor(H v_w / max v)), v in inner steps per second (DyLU, arXiv
    2401.09135). The quotient is exact, so the fastest island always gets `sync_every`.

    >>> dynamic_steps({"a": 2.0, "b": 0.5}, sync_every=10)
    {'a': 10, 'b': 2}
    """
    for island, speed in speeds.items():
        if not 0.0 < speed < math.inf:
            raise UsageError(
                f"Island {island!r} has speed {speed}, which is not a positive number "
                "of inner steps per second. Leave it out until its pace is known."
            )
    fastest = Fraction(max(speeds.values(), default=1.0))
    return {
        island: max(1, math.floor(sync_every * Fraction(speed) / fastest))
        for island, speed in speeds.items()
    }


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
