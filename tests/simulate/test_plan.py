"""Fault plans are data: built, judged, written and read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.simulate import FaultPlan, random_plan
from atoll.simulate.faults import KINDS, Kill, Partition
from atoll.simulate.plan import MAX_FAULTS, MAX_FILE_BYTES, parse_plan
from atoll.simulate.storms import random_store_plan

EVERYTHING = (
    FaultPlan()
    .kill("i2", at_round=3)
    .kill("i2", at_s=3, back_after_s=0)
    .freeze("i1", at_s=1, for_s=2)
    .slow("i1", factor=4, at_s=1.5)
    .delay("i1", by_s=90, at_round=4)
    .loss("i1->coordinator", rate=0.25, for_s=8)
    .duplicate("*", rate=1)
    .reorder("i1", by_s=2, rate=0.5)
    .corrupt("i0", at_round=5)
    .throttle("i0", bytes_per_s=1000)
    .partition(["i0", "i1"], ["coordinator"], at_s=7, for_s=1)
    .disk_full("coordinator", at_s=2, for_s=1)
    .disk_read_only("coordinator", at_s=2, for_s=1)
    .rollback("coordinator", at_s=2, for_s=1)
    .clock_jump("i1", by_s=-4, at_s=2)
    .clock_drift("i1", rate=1.01)
    .outage("store", rate=0.5, at_s=2, for_s=1)
    .list_lag("store", by_s=3, for_s=1)
    .roster_lag("store", by_s=3, for_s=1)
    .damage("store", how="flip", prefix="rounds/0/", at_s=2)
)


def test_a_plan_is_built_by_adding() -> None:
    """Every method returns a longer plan, and leaves the one it was called on alone."""
    empty = FaultPlan()
    plan = empty.kill("i2", at_s=3)

    assert empty.faults == ()
    assert plan.faults == (Kill(process="i2", at_s=3.0),)
    assert {fault.kind for fault in EVERYTHING.faults} == set(KINDS)


def test_equal_plans_are_equal() -> None:
    """A plan is a value: how its numbers were written does not matter."""
    first = FaultPlan().kill("a", at_s=3).partition(["a"], at_s=1)
    second = FaultPlan().kill("a", at_s=3.0).partition(("a",), at_s=1.0)

    assert first == second
    assert hash(first) == hash(second)
    assert Partition(groups=(("a",),), at_s=1.0) in first.faults


def test_a_condition_without_a_moment_holds_from_the_start() -> None:
    """What describes a link, a speed or a clock needs no moment."""
    plan = FaultPlan().loss("*", rate=0.5).slow("a", factor=2).clock_drift("a", rate=2)

    assert [fault.at_s for fault in plan.faults] == [0.0, 0.0, 0.0]


WRONG: dict[str, Callable[[], FaultPlan]] = {
    r"A kill has at_s=None and at_round=None. Give exactly one": (
        lambda: FaultPlan().kill("i1")
    ),
    r"at_s=1 and at_round=2. Give exactly one": (
        lambda: FaultPlan().kill("i1", at_s=1, at_round=2)
    ),
    r"kill.at_s=-1 must be a finite": lambda: FaultPlan().kill("a", at_s=-1),
    r"kill.at_s=nan must be": lambda: FaultPlan().kill("a", at_s=float("nan")),
    r"kill.at_s=True must be": lambda: FaultPlan().kill("a", at_s=True),
    r"kill.at_round=0 must be a whole number": (
        lambda: FaultPlan().kill("a", at_round=0)
    ),
    r"freeze.for_s=0 must be a finite number above 0": (
        lambda: FaultPlan().freeze("a", at_s=1, for_s=0)
    ),
    r"loss.rate=1.5 must be a finite number above 0.0 and at most 1": (
        lambda: FaultPlan().loss("a", rate=1.5)
    ),
    r"clock_drift.rate=0.0 must be .* from 0.1 to 10": (
        lambda: FaultPlan().clock_drift("a", rate=0.0)
    ),
    r"throttle.bytes_per_s=0 must be": (
        lambda: FaultPlan().throttle("a", bytes_per_s=0)
    ),
    r"slow.factor=-2 must be": lambda: FaultPlan().slow("a", factor=-2),
    r"kill.process='' must be the name of a process": (
        lambda: FaultPlan().kill("", at_s=1)
    ),
    r"kill.process='a->b' must be the name": lambda: FaultPlan().kill("a->b", at_s=1),
    r"loss.link='a->b->c' must be": lambda: FaultPlan().loss("a->b->c", rate=1),
    r"loss.link='' must be the name": lambda: FaultPlan().loss("a->", rate=1),
    r"partition.groups=.* no name twice": (
        lambda: FaultPlan().partition(["a"], ["a"], at_s=1)
    ),
    r"partition.groups=\(\) must be groups": lambda: FaultPlan().partition(at_s=1),
    r"partition.groups=\(\(\),\) must be": lambda: FaultPlan().partition([], at_s=1),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_impossible_fault_is_refused_by_value(message: str) -> None:
    """A wrong value is an error with the fault, the field, the value and a remedy."""
    with pytest.raises(UsageError, match=message):
        WRONG[message]()


def test_a_plan_can_be_read_by_a_person() -> None:
    """A file has one table per fault, with the subject first and no defaults."""
    plan = FaultPlan().kill("i2", at_s=3, back_after_s=5).delay("i1", by_s=90, at_s=1)

    assert plan.to_toml() == (
        '[[fault]]\nkind = "kill"\nprocess = "i2"\nat_s = 3.0\nback_after_s = 5.0\n\n'
        '[[fault]]\nkind = "delay"\nlink = "i1"\nat_s = 1.0\nby_s = 90.0\n'
    )


def test_every_kind_survives_a_file(tmp_path: Path) -> None:
    """What is written is read as the same plan, whatever is in it."""
    path = tmp_path / "storm.toml"
    for plan in (EVERYTHING, FaultPlan()):
        path.write_text(plan.to_toml())

        assert FaultPlan.from_toml(path) == plan


@given(
    st.integers(0, 2**64),
    st.lists(
        st.text(min_size=1, max_size=9).filter(
            lambda name: name.isprintable() and "->" not in name and name != "*"
        ),
        min_size=1,
        max_size=4,
        unique=True,
    ),
)
def test_storms_survive_a_file(seed: int, islands: list[str]) -> None:
    """Any storm over islands of any names is the same after writing and reading."""
    plan = random_plan(seed, islands, span_s=600.0, coordinator="the coordinator")

    assert FaultPlan(parse_plan(plan.to_toml().encode())) == plan


HOSTILE: dict[str, bytes] = {
    r"not valid TOML": b"[[fault",
    r"not valid TOML: .*invalid start byte": b"\xff",
    r"kind='kil' is not a kind of fault. Did you mean 'kill'": (
        b'[[fault]]\nkind = "kil"'
    ),
    r"fault 1: kind=None is not a kind": b"[[fault]]",
    r"a kill has no 'at'. Did you mean 'at_s'": (
        b'[[fault]]\nkind = "kill"\nprocess = "a"\nat = 1'
    ),
    r"fault 2: a loss needs 'rate'. Add it": (
        b'[[fault]]\nkind="kill"\nprocess="a"\nat_s=1\n[[fault]]\nkind="loss"\nlink="a"'
    ),
    r"fault 1: kill.at_s='soon' must be a finite number": (
        b'[[fault]]\nkind = "kill"\nprocess = "a"\nat_s = "soon"'
    ),
    r"has 'faults' beside them": b"[faults]",
    r"nothing else": b"fault = 3",
    r"1 is not a table": b"fault = [1]",
    r"at most 10000": b"[[fault]]\n" * (MAX_FAULTS + 1),
    r"larger than 1048576 bytes": b"#" * (MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("message", HOSTILE)
def test_a_wrong_file_is_refused_by_name(message: str, tmp_path: Path) -> None:
    """What is wrong with a file is said with path, fault and nearest key."""
    path = tmp_path / "storm.toml"
    path.write_bytes(HOSTILE[message])

    with pytest.raises(UsageError, match=message) as caught:
        FaultPlan.from_toml(path)
    assert "storm.toml" in str(caught.value)


def test_a_missing_file_is_said_to_be(tmp_path: Path) -> None:
    """A plan that cannot be read names its path."""
    with pytest.raises(UsageError, match=r"absent.toml' cannot be read: No such file"):
        FaultPlan.from_toml(tmp_path / "absent.toml")


@given(st.binary(max_size=200))
def test_no_bytes_end_in_anything_but_a_usage_error(data: bytes) -> None:
    """Whatever a file holds, it is a plan or refused."""
    try:
        parse_plan(data)
    except UsageError:
        return


@given(st.integers(0, 2**32), st.floats(1.0, 1e5), st.sampled_from([0.2, 1.0, 4.0]))
def test_a_storm_is_over_in_time(seed: int, span_s: float, intensity: float) -> None:
    """The same seed is the same storm, and all that lasts ends within its span."""
    islands = ["i0", "i1", "i2", "i3"]
    plan = random_plan(seed, islands, span_s=span_s, intensity=intensity)

    assert plan == random_plan(seed, islands, span_s=span_s, intensity=intensity)
    for fault in plan.faults:
        values = fault.values()
        lasts_s = values.get("for_s", values.get("back_after_s", 0.0))
        assert values["at_s"] + lasts_s <= span_s * (1 + 1e-9)
    # 1.5 faults per process and 5 processes: 7.5, drawn from half to one and a half.
    assert len(plan.faults) <= round(1.5 * 7.5 * intensity) + 1


def test_storms_differ_and_know_every_kind_but_those_that_need_help() -> None:
    """Among a thousand storms there is every fault that any world can take."""
    plans = [random_plan(seed, ["a", "b"], span_s=60.0) for seed in range(300)]
    kinds = {fault.kind for plan in plans for fault in plan.faults}

    assert len(set(plans)) == 300
    of_stores = {"outage", "list_lag", "roster_lag", "damage"}
    assert kinds == set(KINDS) - {"corrupt", "disk_read_only", "rollback"} - of_stores


def test_storms_over_a_bucket_know_its_troubles_and_no_disk() -> None:
    """Late lists, failures, and islands or clocks that are an hour off."""
    plans = [random_store_plan(seed, ["a", "b"], span_s=60.0) for seed in range(200)]
    faults = [fault for plan in plans for fault in plan.faults]
    kinds = {fault.kind for fault in faults}
    disks = {"disk_full", "disk_read_only", "rollback"}

    assert plans[5] == random_store_plan(5, ["a", "b"], span_s=60.0)
    assert kinds == set(KINDS) - disks - {"corrupt", "damage"}
    assert {"store"} == {
        name for each in faults if each.kind == "outage" for name in each.names
    }
    assert 3600.0 in {each.values().get("for_s") for each in faults}
    assert {3600.0, -3600.0} <= {each.values().get("by_s") for each in faults}


def test_a_storm_needs_somebody_and_some_time() -> None:
    """A storm over nobody, or over no time, is an error with the values."""
    with pytest.raises(UsageError, match=r"0 islands, span_s=9.0"):
        random_plan(0, [], span_s=9.0)
    with pytest.raises(UsageError, match=r"span_s=0.0"):
        random_plan(0, ["a"], span_s=0.0)
