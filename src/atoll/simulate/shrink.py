"""Reduces a plan that fails to a small one, and prints it as a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from atoll.errors import UsageError
from atoll.simulate.faults import Fault, Partition
from atoll.simulate.plan import FaultPlan

MAX_RUNS = 400
_LINE = 88

Fails = Callable[[FaultPlan], bool]


def shrink(plan: FaultPlan, fails: Fails, *, max_runs: int = MAX_RUNS) -> FaultPlan:
    """Return a smaller plan that still fails: fewer faults first, then plainer numbers.

    Calls `fails` at most `max_runs` times and never twice for equal plans. The same
    plan and the same answers give the same result.

    Raises:
        UsageError: the plan does not fail to begin with.
    """
    budget = _Budget(fails, max_runs)
    if not budget.fails(plan):
        raise UsageError(
            f"The plan of {len(plan.faults)} faults does not fail, so there is nothing "
            "to shrink. Give the seed and the settings it failed with."
        )
    smaller = plan
    while True:
        before = smaller
        smaller = _with_fewer_faults(smaller, budget)
        smaller = _with_plainer_values(smaller, budget)
        if smaller == before:
            return smaller


class _Budget:
    """Asks whether a plan fails, while runs are left; afterwards nothing does."""

    def __init__(self, fails: Fails, max_runs: int) -> None:
        self._fails, self._left = fails, max_runs
        self._known: dict[FaultPlan, bool] = {}

    def fails(self, plan: FaultPlan) -> bool:
        if plan not in self._known:
            if self._left <= 0:
                return False
            self._left -= 1
            self._known[plan] = self._fails(plan)
        return self._known[plan]


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
    at = 0
    while at < len(plan.faults):
        for fault in _plainer(plan.faults[at]):
            tried = FaultPlan((*plan.faults[:at], fault, *plan.faults[at + 1 :]))
            if budget.fails(tried):
                plan = tried
                break
        else:
            at += 1
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
    seen = dict.fromkeys(kind(each) for each in tries)
    return (each for each in seen if _weight(each) < _weight(value))


def _weight(value: float) -> tuple[bool, int, float]:
    """Return what goes down when a number gets plainer: whole, then short, then small.

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
    for at, group in enumerate(fault.groups):
        others = fault.groups[:at], fault.groups[at + 1 :]
        if len(fault.groups) > 1:
            yield replace(fault, groups=(*others[0], *others[1]))
        if len(group) > 1:
            for name in group:
                left = tuple(each for each in group if each != name)
                yield replace(fault, groups=(*others[0], left, *others[1]))


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
    words = {**arguments, "faults": "plan", "seed": seed}
    keywords = ", ".join(f"{key}={value}" for key, value in words.items())
    count = f"{len(plan.faults)} fault" + "s" * (len(plan.faults) != 1)
    return (
        "from atoll.simulate import FaultPlan, simulate\n\n\n"
        f"def test_storm_of_seed_{seed}() -> None:\n"
        f'    """Everything that must hold does under the {count} of seed {seed}."""\n'
        f"    plan = {as_python(plan, indent=4)}\n\n"
        f"    result = simulate({keywords})\n\n"
        f"    assert {claim}\n"
    )


def _call(fault: Fault, indent: int) -> str:
    values = fault.values()
    if isinstance(fault, Partition):
        words = [_text(list(group)) for group in values.pop("groups")]
    else:
        words = [_text(values.pop(next(iter(values))))]
    words += [f"{key}={_text(value)}" for key, value in values.items()]
    line = f".{fault.kind}({', '.join(words)})"
    if indent + len(line) <= _LINE:
        return line
    space = " " * indent
    return f".{fault.kind}(\n{space}    {', '.join(words)}\n{space})"


def _text(value: object) -> str:
    """Return a value as the house's formatter would write it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, str) and '"' not in value and "\\" not in value:
        return f'"{value}"'
    return repr(value)
