"""Random plans: a storm over a run, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from atoll.errors import UsageError
from atoll.simulate.network import ARROW
from atoll.simulate.plan import FaultPlan

COORDINATOR, STORE = "coordinator", "store"

HOUR_S = 3600.0

_PER_PROCESS = 1.5
"""Faults per process in a storm of intensity 1."""


def random_plan(
    seed: int | random.Random,
    islands: Sequence[str],
    *,
    span_s: float,
    intensity: float = 1.0,
    coordinator: str = COORDINATOR,
) -> FaultPlan:
    """Return a storm that is over by `span_s`, but for deaths and clocks that drift.

    The same seed gives the same plan. At `intensity` 1 every process meets one or two
    faults. One island in ten that is killed does not come back.
    """
    if not islands or not (span_s > 0 and intensity > 0):
        raise UsageError(
            f"A storm over {len(islands)} islands, span_s={span_s!r} and intensity="
            f"{intensity!r} is none. Give an island, and numbers above 0."
        )
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    storm = _Storm(rng, list(islands), span_s, coordinator, _CHANCES)
    expected = intensity * _PER_PROCESS * (len(islands) + 1)
    plan = FaultPlan()
    for _ in range(_about(rng, expected)):
        plan = storm.strike(plan)
    return plan


def random_store_plan(
    seed: int | random.Random,
    islands: Sequence[str],
    *,
    span_s: float,
    intensity: float = 1.0,
) -> FaultPlan:
    """Return a storm over a run in a bucket, as `random_plan` does over others.

    Some islands stand still for an hour, and some clocks are off by one.
    """
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    storm = _Storm(rng, list(islands), span_s, STORE, _STORE_CHANCES)
    plan = FaultPlan()
    for _ in range(_about(rng, intensity * _PER_PROCESS * (len(islands) + 1))):
        plan = storm.strike(plan)
    return plan


class _Storm:
    """Draws one fault after another."""

    def __init__(
        self,
        rng: random.Random,
        islands: list[str],
        span_s: float,
        coordinator: str,
        chances: Chances,
    ) -> None:
        self._rng, self._islands, self._span_s = rng, islands, span_s
        self._coordinator, self._chances = coordinator, chances

    def strike(self, plan: FaultPlan) -> FaultPlan:
        """Return `plan` with one fault more."""
        kinds, weights = zip(*self._chances, strict=True)
        kind: Strike = self._rng.choices(kinds, weights)[0]
        return kind(self, plan)

    def kill(self, plan: FaultPlan) -> FaultPlan:
        who, (at_s, for_s) = self._who(), self._window()
        stays_dead = who != self._coordinator and self._rng.random() < 0.1
        back_after_s = None if stays_dead else for_s
        return plan.kill(who, at_s=at_s, back_after_s=back_after_s)

    def freeze(self, plan: FaultPlan) -> FaultPlan:
        who, (at_s, for_s) = self._who(), self._window()
        return plan.freeze(who, at_s=at_s, for_s=for_s)

    def slow(self, plan: FaultPlan) -> FaultPlan:
        who, (at_s, for_s) = self._rng.choice(self._islands), self._window()
        factor = _short(self._rng.uniform(1.5, 8.0))
        return plan.slow(who, factor=factor, at_s=at_s, for_s=for_s)

    def delay(self, plan: FaultPlan) -> FaultPlan:
        link, (at_s, for_s) = self._link(), self._window()
        by_s, rate = self._fraction(0.1), self._rate()
        return plan.delay(link, by_s=by_s, rate=rate, at_s=at_s, for_s=for_s)

    def reorder(self, plan: FaultPlan) -> FaultPlan:
        link, (at_s, for_s) = self._link(), self._window()
        by_s, rate = self._fraction(0.05), self._rate()
        return plan.reorder(link, by_s=by_s, rate=rate, at_s=at_s, for_s=for_s)

    def loss(self, plan: FaultPlan) -> FaultPlan:
        link, (at_s, for_s) = self._link(), self._window()
        return plan.loss(link, rate=self._rate(), at_s=at_s, for_s=for_s)

    def duplicate(self, plan: FaultPlan) -> FaultPlan:
        link, (at_s, for_s) = self._link(), self._window()
        return plan.duplicate(link, rate=self._rate(), at_s=at_s, for_s=for_s)

    def throttle(self, plan: FaultPlan) -> FaultPlan:
        link, (at_s, for_s) = self._link(), self._window()
        bytes_per_s = _short(10.0 ** self._rng.uniform(3.0, 6.0))
        return plan.throttle(link, bytes_per_s=bytes_per_s, at_s=at_s, for_s=for_s)

    def partition(self, plan: FaultPlan) -> FaultPlan:
        """Cut some islands off, with or without the coordinator on their side."""
        at_s, for_s = self._window()
        everyone = [*self._islands, self._coordinator]
        away = self._rng.sample(everyone, self._rng.randint(1, len(self._islands)))
        return plan.partition(sorted(away), at_s=at_s, for_s=for_s)

    def disk_full(self, plan: FaultPlan) -> FaultPlan:
        at_s, for_s = self._window()
        return plan.disk_full(self._coordinator, at_s=at_s, for_s=for_s)

    def clock_jump(self, plan: FaultPlan) -> FaultPlan:
        by_s = self._fraction(0.2) * self._rng.choice((1, -1))
        return plan.clock_jump(self._who(), by_s=by_s, at_s=self._window()[0])

    def clock_drift(self, plan: FaultPlan) -> FaultPlan:
        rate = _short(self._rng.uniform(0.9, 1.1))
        return plan.clock_drift(self._who(), rate=rate, at_s=self._window()[0])

    def freeze_for_an_hour(self, plan: FaultPlan) -> FaultPlan:
        who, at_s = self._rng.choice(self._islands), self._window()[0]
        return plan.freeze(who, at_s=at_s, for_s=HOUR_S)

    def outage(self, plan: FaultPlan) -> FaultPlan:
        at_s, for_s = self._window()
        rate = self._rate()
        return plan.outage(self._coordinator, rate=rate, at_s=at_s, for_s=for_s)

    def list_lag(self, plan: FaultPlan) -> FaultPlan:
        at_s, for_s = self._window()
        by_s = _short(self._rng.uniform(0.5, 5.0))
        return plan.list_lag(self._coordinator, by_s=by_s, at_s=at_s, for_s=for_s)

    def roster_lag(self, plan: FaultPlan) -> FaultPlan:
        at_s, for_s = self._window()
        by_s = _short(self._rng.uniform(2.0, 20.0))
        return plan.roster_lag(self._coordinator, by_s=by_s, at_s=at_s, for_s=for_s)

    def clock_off_by_an_hour(self, plan: FaultPlan) -> FaultPlan:
        who, by_s = self._rng.choice(self._islands), self._rng.choice((1, -1)) * HOUR_S
        return plan.clock_jump(who, by_s=by_s, at_s=self._window()[0])

    def _who(self) -> str:
        return self._rng.choice([*self._islands, self._coordinator])

    def _link(self) -> str:
        island, there = self._rng.choice(self._islands), self._coordinator
        return self._rng.choice(
            (island, f"{island}{ARROW}{there}", f"{there}{ARROW}{island}", "*")
        )

    def _window(self) -> tuple[float, float]:
        """Return when something begins and how long it lasts, within the span."""
        at_s = _short(self._rng.uniform(0.0, 0.9 * self._span_s))
        longest_s = self._span_s - at_s
        # Many short ones and a few long ones: squares of even numbers.
        for_s = longest_s * max(0.01, self._rng.random() ** 2)
        return at_s, min(_short(for_s), longest_s)

    def _fraction(self, most: float) -> float:
        return _short(self._span_s * self._rng.uniform(0.01, 1.0) * most)

    def _rate(self) -> float:
        return self._rng.choice((0.05, 0.2, 0.5, 0.9, 1.0))


Strike = Callable[[_Storm, FaultPlan], FaultPlan]

Chances = Sequence[tuple[Strike, float]]

_CHANCES: Chances = (
    (_Storm.kill, 5.0),
    (_Storm.freeze, 2.0),
    (_Storm.slow, 1.0),
    (_Storm.delay, 1.0),
    (_Storm.reorder, 1.5),
    (_Storm.loss, 2.0),
    (_Storm.duplicate, 2.0),
    (_Storm.throttle, 0.5),
    (_Storm.partition, 2.0),
    (_Storm.disk_full, 0.5),
    (_Storm.clock_jump, 1.0),
    (_Storm.clock_drift, 0.5),
)
"""How often each kind is drawn beside the others; whoever corrupts says how."""

_STORE_CHANCES: Chances = (
    (_Storm.kill, 5.0),
    (_Storm.freeze, 2.0),
    (_Storm.freeze_for_an_hour, 0.7),
    (_Storm.slow, 1.0),
    (_Storm.delay, 1.0),
    (_Storm.reorder, 1.5),
    (_Storm.loss, 1.5),
    (_Storm.duplicate, 1.0),
    (_Storm.throttle, 0.5),
    (_Storm.partition, 2.0),
    (_Storm.outage, 2.0),
    (_Storm.list_lag, 3.0),
    (_Storm.roster_lag, 1.0),
    (_Storm.clock_jump, 1.0),
    (_Storm.clock_off_by_an_hour, 0.7),
    (_Storm.clock_drift, 0.5),
)
"""A list that lags makes views differ: that is what a bucket's rounds must bear."""


def _about(rng: random.Random, expected: float) -> int:
    """Return a whole number around `expected`: evenly from half to one and a half."""
    return max(1, round(rng.uniform(0.5, 1.5) * expected))


def _short(value: float) -> float:
    """Return `value` to three digits, so that a plan can be read aloud."""
    return float(f"{value:.3g}")
