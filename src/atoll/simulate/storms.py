"""Random fault plans: drawn from a seed, shrunk when they fail, printed as tests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.errors import UsageError
from atoll.simulate.faults import Fault, Partition
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
    """Return a random plan: a storm.

    All its faults end by `span_s`, except deaths and clocks that drift. The same seed
    gives the same plan. At `intensity` 1 every process has one or two
    faults. One island in ten that is killed does not restart.
    """
    if not islands or not (span_s > 0 and intensity > 0):
        raise UsageError(
            f"A storm over {len(islands)} islands, span_s={span_s!r} and intensity="
            f"{intensity!r} is not possible. Give an island, and numbers above 0."
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
    """Return a random plan for a run in a bucket, as `random_plan` does for others.

    Some islands are frozen for an hour, and some clocks are wrong by an hour.
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
        """Return `plan` with one more fault."""
        kinds, weights = zip(*self._chances, strict=True)
        kind: Strike = self._rng.choices(kinds, weights)[0]
        return kind(self, plan)

    def kill(self, plan: FaultPlan) -> FaultPlan:
        process, (at_s, for_s) = self._process(), self._window()
        stays_dead = process != self._coordinator and self._rng.random() < 0.1
        back_after_s = None if stays_dead else for_s
        return plan.kill(process, at_s=at_s, back_after_s=back_after_s)

    def freeze(self, plan: FaultPlan) -> FaultPlan:
        process, (at_s, for_s) = self._process(), self._window()
        return plan.freeze(process, at_s=at_s, for_s=for_s)

    def slow(self, plan: FaultPlan) -> FaultPlan:
        process, (at_s, for_s) = self._rng.choice(self._islands), self._window()
        factor = _short(self._rng.uniform(1.5, 8.0))
        return plan.slow(process, factor=factor, at_s=at_s, for_s=for_s)

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
        return plan.clock_jump(self._process(), by_s=by_s, at_s=self._window()[0])

    def clock_drift(self, plan: FaultPlan) -> FaultPlan:
        rate = _short(self._rng.uniform(0.9, 1.1))
        return plan.clock_drift(self._process(), rate=rate, at_s=self._window()[0])

    def freeze_for_an_hour(self, plan: FaultPlan) -> FaultPlan:
        process, at_s = self._rng.choice(self._islands), self._window()[0]
        return plan.freeze(process, at_s=at_s, for_s=HOUR_S)

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
        process, by_s = (
            self._rng.choice(self._islands),
            self._rng.choice((1, -1)) * HOUR_S,
        )
        return plan.clock_jump(process, by_s=by_s, at_s=self._window()[0])

    def _process(self) -> str:
        return self._rng.choice([*self._islands, self._coordinator])

    def _link(self) -> str:
        island, host = self._rng.choice(self._islands), self._coordinator
        return self._rng.choice(
            (island, f"{island}{ARROW}{host}", f"{host}{ARROW}{island}", "*")
        )

    def _window(self) -> tuple[float, float]:
        """Return begin and duration of a fault, within the span."""
        at_s = _short(self._rng.uniform(0.0, 0.9 * self._span_s))
        longest_s = self._span_s - at_s
        # Many short ones and a few long ones: squares of uniform numbers.
        for_s = longest_s * max(0.01, self._rng.random() ** 2)
        return at_s, min(_short(for_s), longest_s)

    def _fraction(self, max_fraction: float) -> float:
        return _short(self._span_s * self._rng.uniform(0.01, 1.0) * max_fraction)

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
"""Weights of the kinds. `corrupt` is missing: it needs a corrupter of the network."""

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
"""Weights of the kinds in a bucket. Late lists are frequent: they make views differ."""


def _about(rng: random.Random, expected: float) -> int:
    """Return a whole number: uniform from half to one and a half of `expected`."""
    return max(1, round(rng.uniform(0.5, 1.5) * expected))


def _short(value: float) -> float:
    """Return `value` rounded to three digits, so that plans are easy to read."""
    return float(f"{value:.3g}")


MAX_RUNS = 400
_LINE = 88

Fails = Callable[[FaultPlan], bool]


def shrink(plan: FaultPlan, fails: Fails, *, max_runs: int = MAX_RUNS) -> FaultPlan:
    """Return a smaller plan that still fails: fewer faults first, then plainer numbers.

    Calls `fails` at most `max_runs` times and never twice for equal plans. Equal plans
    and equal results of `fails` give equal plans.

    Raises:
        UsageError: the plan does not fail to begin with.
    """
    budget = _Budget(fails, max_runs)
    if not budget.fails(plan):
        raise UsageError(
            f"The plan of {len(plan.faults)} faults does not fail, so it cannot "
            "be shrunk. Give the seed and the settings it failed with."
        )
    smaller = plan
    while True:
        before = smaller
        smaller = _with_fewer_faults(smaller, budget)
        smaller = _with_plainer_values(smaller, budget)
        if smaller == before:
            return smaller


class _Budget:
    """Runs plans to see whether they fail; out of runs, no plan fails."""

    def __init__(self, fails: Fails, max_runs: int) -> None:
        self._fails, self._remaining_runs = fails, max_runs
        self._results: dict[FaultPlan, bool] = {}

    def fails(self, plan: FaultPlan) -> bool:
        if plan not in self._results:
            if self._remaining_runs <= 0:
                return False
            self._remaining_runs -= 1
            self._results[plan] = self._fails(plan)
        return self._results[plan]


def _with_fewer_faults(plan: FaultPlan, budget: _Budget) -> FaultPlan:
    """Drop runs of faults, halving their length, until none can be dropped."""
    length = max(1, len(plan.faults) // 2)
    while plan.faults:
        smaller = _without_runs(plan, length, budget)
        if smaller == plan and length == 1:
            return plan
        plan, length = smaller, max(1, length // 2)
    return plan


def _without_runs(plan: FaultPlan, length: int, budget: _Budget) -> FaultPlan:
    first = 0
    while first < len(plan.faults):
        rest = plan.faults[:first] + plan.faults[first + length :]
        if budget.fails(FaultPlan(rest)):
            plan = FaultPlan(rest)
        else:
            first += length
    return plan


def _with_plainer_values(plan: FaultPlan, budget: _Budget) -> FaultPlan:
    index = 0
    while index < len(plan.faults):
        for fault in _plainer(plan.faults[index]):
            tried = FaultPlan((*plan.faults[:index], fault, *plan.faults[index + 1 :]))
            if budget.fails(tried):
                plan = tried
                break
        else:
            index += 1
    return plan


def _plainer(fault: Fault) -> Iterator[Fault]:
    """Yield faults that differ in one value, which is plainer; the plainest first."""
    if isinstance(fault, Partition):
        yield from _smaller_groups(fault)
    for name, value in fault.values().items():
        if isinstance(value, int | float):
            for plainer in _plainer_numbers(value):
                changed = _changed(fault, name, plainer)
                if changed is not None:
                    yield changed


def _plainer_numbers(value: float) -> Iterator[float]:
    kind = type(value)
    tries = [0.0, 1.0, 10.0 ** math.floor(math.log10(abs(value)))] if value else []
    tries += [float(f"{value:.{digits}g}") for digits in (1, 2)]
    tries += [float(f"{value / 2:.1g}")]
    seen = dict.fromkeys(kind(number) for number in tries)
    return (number for number in seen if _weight(number) < _weight(value))


def _weight(value: float) -> tuple[bool, int, float]:
    """Return a key that is smaller for plainer numbers: whole, then short, then small.

    >>> sorted([0.5, 12.0, 1.0, 0.25], key=_weight)
    [1.0, 12.0, 0.5, 0.25]
    """
    return not float(value).is_integer(), len(repr(value)), abs(value)


def _changed(fault: Fault, name: str, value: float) -> Fault | None:
    change: dict[str, Any] = {name: value}
    try:
        return replace(fault, **change)
    except UsageError:  # a plain number that this field cannot have
        return None


def _smaller_groups(fault: Partition) -> Iterator[Fault]:
    for index, group in enumerate(fault.groups):
        others = fault.groups[:index], fault.groups[index + 1 :]
        if len(fault.groups) > 1:
            yield replace(fault, groups=(*others[0], *others[1]))
        if len(group) > 1:
            for name in group:
                remaining = tuple(member for member in group if member != name)
                yield replace(fault, groups=(*others[0], remaining, *others[1]))


def as_python(plan: FaultPlan, *, indent: int = 0) -> str:
    """Return an expression that builds `plan`, its later lines indented."""
    if not plan.faults:
        return "FaultPlan()"
    space = " " * indent
    calls = "".join(f"{space}    {_call(fault, indent + 4)}\n" for fault in plan.faults)
    return f"(\n{space}    FaultPlan()\n{calls}{space})"


def as_test(
    plan: FaultPlan,
    *,
    seed: int,
    arguments: Mapping[str, object],
    claim: str = "result.violations == []",
) -> str:
    """Return a test, ready to paste, that runs `plan` and asserts `claim`.

    `arguments` are further keywords of `simulate`, such as islands and rounds.
    """
    values = {**arguments, "faults": "plan", "seed": seed}
    keywords = ", ".join(f"{key}={value}" for key, value in values.items())
    count = f"{len(plan.faults)} fault" + "s" * (len(plan.faults) != 1)
    return (
        "from atoll.simulate import FaultPlan, simulate\n\n\n"
        f"def test_storm_of_seed_{seed}() -> None:\n"
        f'    """Every invariant holds under the {count} of seed {seed}."""\n'
        f"    plan = {as_python(plan, indent=4)}\n\n"
        f"    result = simulate({keywords})\n\n"
        f"    assert {claim}\n"
    )


def _call(fault: Fault, indent: int) -> str:
    values = fault.values()
    if isinstance(fault, Partition):
        arguments = [_text(list(group)) for group in values.pop("groups")]
    else:
        arguments = [_text(values.pop(next(iter(values))))]
    arguments += [f"{key}={_text(value)}" for key, value in values.items()]
    line = f".{fault.kind}({', '.join(arguments)})"
    if indent + len(line) <= _LINE:
        return line
    space = " " * indent
    return f".{fault.kind}(\n{space}    {', '.join(arguments)}\n{space})"


def _text(value: object) -> str:
    """Return a value as ruff would format it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, str) and '"' not in value and "\\" not in value:
        return f'"{value}"'
    return repr(value)
