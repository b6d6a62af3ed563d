"""Shrinking: what is left fails, is small, and is ready to paste."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.simulate import FaultPlan, as_python, as_test, random_plan, shrink
from atoll.simulate.faults import Fault, Kill
from tests.simulate.toy import ISLANDS, SPAN_S, Toy

Fails = Callable[[FaultPlan], bool]


def kills_late(fault: Fault) -> bool:
    return isinstance(fault, Kill) and (fault.at_s or 0.0) >= 2.0


def test_only_the_faults_that_matter_are_left() -> None:
    """Of a storm that fails by one kill and one freeze, these two are left, plainer."""
    plan = random_plan(4, ["i0", "i1", "i2"], span_s=60.0, intensity=3.0)
    plan = plan.kill("i1", at_s=37.3, back_after_s=2.71).freeze("i0", at_s=3.3)

    def fails(tried: FaultPlan) -> bool:
        frozen = [fault.kind for fault in tried.faults].count("freeze")
        return any(map(kills_late, tried.faults)) and frozen > 0

    left = shrink(plan, fails)

    assert fails(left)
    assert sorted(fault.kind for fault in left.faults) == ["freeze", "kill"]
    numbers = [v for f in left.faults for v in f.values().values() if v != f.names[0]]
    assert max(map(float, numbers)) <= 9.0  # one digit each: no plainer one fails


@settings(max_examples=50)
@given(
    seed=st.integers(0, 1000),
    needed=st.lists(st.integers(0, 30), max_size=4, unique=True),
)
def test_what_is_left_fails_and_every_fault_of_it_is_needed(
    seed: int, needed: list[int]
) -> None:
    """Shrinking ends at a failing plan from which no fault can be taken."""
    plan = random_plan(seed, ["i0", "i1"], span_s=60.0, intensity=3.0)
    kinds = {plan.faults[at % len(plan.faults)].kind for at in needed}

    def fails(tried: FaultPlan) -> bool:
        return kinds <= {fault.kind for fault in tried.faults}

    left = shrink(plan, fails, max_runs=5000)

    assert fails(left)
    assert len(left.faults) == len(kinds)
    assert left == shrink(plan, fails, max_runs=5000)


def test_shrinking_runs_at_most_as_often_as_it_may() -> None:
    """The number of runs is bounded, no plan runs twice, and the result still fails."""
    plan = random_plan(0, ["i0", "i1", "i2"], span_s=60.0, intensity=9.0)
    tried: list[FaultPlan] = []

    def fails(each: FaultPlan) -> bool:
        tried.append(each)
        return any(map(kills_late, each.faults))

    left = shrink(plan, fails, max_runs=7)

    assert len(tried) == len(set(tried)) == 7
    assert any(map(kills_late, left.faults))
    assert len(left.faults) < len(plan.faults)


def test_groups_shrink_too() -> None:
    """Of a partition only who must be away is named."""
    plan = FaultPlan().partition(["i0", "i1", "i2"], ["i3", "i4"], at_s=3.21, for_s=2)

    left = shrink(plan, lambda it: any("i1" in f.names for f in it.faults))

    assert left == FaultPlan().partition(["i1"], at_s=0, for_s=1)


def test_what_does_not_fail_cannot_shrink() -> None:
    """A plan that holds is an error, not an empty plan."""
    with pytest.raises(UsageError, match="plan of 1 faults does not fail"):
        shrink(FaultPlan().kill("a", at_s=1), lambda _: False)


def test_a_bug_that_needs_a_crash_shrinks_to_a_crash() -> None:
    """A coordinator that confirms before it syncs is caught, at last by one kill."""

    def loses(plan: FaultPlan, seed: int) -> bool:
        toy = Toy(seed, plan, syncs=False)
        toy.run()
        return bool(toy.lost())

    storms = ((random_plan(s, ISLANDS, span_s=SPAN_S), s) for s in range(200))
    storm, seed = next(each for each in storms if loses(*each))

    left = shrink(storm, lambda plan: loses(plan, seed), max_runs=60)

    assert len(storm.faults) > 1
    assert [fault.kind for fault in left.faults] == ["kill"]
    assert left.faults[0].names == ("coordinator",)


PLANS = {
    "empty": FaultPlan(),
    "one": FaultPlan().kill("i2", at_s=3),
    "several": random_plan(1, ["i0", "i1"], span_s=60.0),
    "wide": FaultPlan()
    .partition([f"island-{n}" for n in range(9)], ["coordinator"], at_s=1.25, for_s=60)
    .kill('quo"ted', at_round=3),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_test_is_ready_to_paste(name: str) -> None:
    """The source builds an equal plan, and the house's formatter leaves it alone."""
    plan = PLANS[name]
    source = as_test(plan, seed=7, arguments={"islands": 5, "rounds": 20})
    seen: dict[str, object] = {}
    namespace: dict[str, object] = {"FaultPlan": FaultPlan}

    exec(f"plan = {as_python(plan)}", namespace)
    exec(source.partition("\n\n\n")[2], namespace | {"simulate": seen.update}, seen)

    assert namespace["plan"] == plan
    assert "simulate(islands=5, rounds=20, faults=plan, seed=7)" in source
    assert "assert result.violations == []" in source
    if shutil.which("ruff"):
        command = ["ruff", "format", "--isolated", "--diff", "-"]
        done = subprocess.run(command, input=source, text=True, capture_output=True)
        assert (done.returncode, done.stdout) == (0, "")


def test_a_pasted_test_reads_like_one_of_ours() -> None:
    """A claim as its name, a sentence, a plan, a run, an assertion."""
    plan = FaultPlan().kill("i2", at_s=3, back_after_s=1).loss("i1", rate=0.5)

    assert as_test(plan, seed=7, arguments={"islands": 4}) == (
        "from atoll.simulate import FaultPlan, simulate\n"
        "\n"
        "\n"
        "def test_storm_of_seed_7() -> None:\n"
        '    """Every invariant holds under the 2 faults of seed 7."""\n'
        "    plan = (\n"
        "        FaultPlan()\n"
        '        .kill("i2", at_s=3.0, back_after_s=1.0)\n'
        '        .loss("i1", at_s=0.0, rate=0.5)\n'
        "    )\n"
        "\n"
        "    result = simulate(islands=4, faults=plan, seed=7)\n"
        "\n"
        "    assert result.violations == []\n"
    )
