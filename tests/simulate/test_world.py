"""A plan at work on a world: each fault does what it says, and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from atoll.errors import DiskFull, UsageError
from atoll.simulate import FaultPlan, Latency, ReplyFunction, SimWorld, apply


def pulses(plan: FaultPlan, *, until_s: float = 10.0) -> list[tuple[float, int]]:
    """Return when a process finished a second of work each, and in which life."""
    seen: list[tuple[float, int]] = []
    with SimWorld(0) as world:
        process = world.add("a")

        def program() -> None:
            while True:
                process.work(1.0)
                seen.append((world.scheduler.now_s, process.incarnation_number))

        process.start(program)
        apply(plan, world)
        world.scheduler.run(until_s)
    return seen


def test_a_kill_ends_a_process_and_brings_it_back() -> None:
    """Killed at 2.5 and back after 3, it works from 5.5 on in its second life."""
    seen = pulses(FaultPlan().kill("a", at_s=2.5, back_after_s=3), until_s=7.0)

    assert seen == [(1.0, 1), (2.0, 1), (6.5, 2)]


def test_a_kill_without_return_is_for_good() -> None:
    """Who is killed for good never works again."""
    assert pulses(FaultPlan().kill("a", at_s=1.5)) == [(1.0, 1)]


def test_a_kill_of_the_dead_changes_nothing() -> None:
    """The first of two overlapping kills says when the process comes back."""
    plan = FaultPlan().kill("a", at_s=1.5, back_after_s=3).kill("a", at_s=2)
    other = plan.kill("a", at_s=2.5, back_after_s=0.5)

    assert pulses(plan, until_s=6.0) == [(1.0, 1), (5.5, 2)]
    assert pulses(other, until_s=6.0) == [(1.0, 1), (5.5, 2)]


def test_a_freeze_holds_what_falls_due() -> None:
    """Frozen from 1.5 to 4, what was due at 2 happens at 4."""
    seen = pulses(FaultPlan().freeze("a", at_s=1.5, for_s=2.5), until_s=5.5)

    assert [at_s for at_s, _ in seen] == [1.0, 4.0, 5.0]


def test_freezes_that_overlap_hold_until_the_last_ends() -> None:
    """Frozen from 1.5 to 3.5 and from 3 to 6, it goes on at 6."""
    plan = FaultPlan().freeze("a", at_s=1.5, for_s=2).freeze("a", at_s=3, for_s=3)

    assert [at_s for at_s, _ in pulses(plan, until_s=6.5)] == [1.0, 6.0]


def test_a_freeze_ends_with_the_life_it_froze() -> None:
    """A process killed while frozen comes back unfrozen, and stays so."""
    plan = (
        FaultPlan()
        .freeze("a", at_s=0.5, for_s=8)
        .kill("a", at_s=1, back_after_s=1)
        .freeze("a", at_s=1.5, for_s=3)  # it is dead: there is nothing to freeze
    )

    assert [at_s for at_s, _ in pulses(plan, until_s=4.5)] == [3.0, 4.0]


def test_slowdowns_multiply_while_they_last() -> None:
    """Work begun at factor 2 takes 2, at factors 2 and 3 it takes 6."""
    plan = FaultPlan().slow("a", factor=2, for_s=5).slow("a", factor=3, at_s=1, for_s=2)

    # 0-2 at 2, 2-8 at 2 * 3, then 1 each.
    assert [at_s for at_s, _ in pulses(plan)] == [2.0, 8.0, 9.0, 10.0]


def heard(plan: FaultPlan, *, every_s: float = 1.0) -> list[tuple[float, object]]:
    """Return what `b` heard of 0, 1, 2, ... that `a` sends, one a second, at 0.25 s."""
    seen: list[tuple[float, object]] = []
    latency = Latency(base_s=0.25, jitter_s=0.0)
    with SimWorld(0, latency=latency, corrupter=lambda it, _: "spoilt") as world:
        a, b = world.add("a"), world.add("b")

        def listen(request: object, reply: ReplyFunction) -> None:
            seen.append((world.scheduler.now_s, request))

        def send() -> None:
            for number in range(5):
                world.network.ask(a, "b", number, size_bytes=100)
                world.scheduler.sleep(every_s)

        apply(plan, world)
        b.start(lambda: world.network.listen(b, listen))
        a.start(send)
        world.scheduler.run()
    return seen


CALM = [(0.25, 0), (1.25, 1), (2.25, 2), (3.25, 3), (4.25, 4)]
WINDOW: dict[str, Any] = {"at_s": 0.5, "for_s": 2.0}
"""Holds for the messages 1 and 2."""


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (FaultPlan(), CALM),
        (FaultPlan().loss("a", rate=1, **WINDOW), [CALM[0], *CALM[3:]]),
        (FaultPlan().loss("b->a", rate=1, **WINDOW), CALM),
        (FaultPlan().loss("*", rate=1), []),
        (FaultPlan().partition(["a"], **WINDOW), [CALM[0], *CALM[3:]]),
        (FaultPlan().partition(["a", "b"], **WINDOW), CALM),
        (
            FaultPlan().delay("a->b", by_s=0.5, **WINDOW),
            [CALM[0], (1.75, 1), (2.75, 2), *CALM[3:]],
        ),
        (
            FaultPlan().duplicate("a->b", rate=1, **WINDOW),
            [CALM[0], *2 * [CALM[1]], *2 * [CALM[2]], *CALM[3:]],
        ),
        (
            FaultPlan().corrupt("a->b", **WINDOW),
            [CALM[0], (1.25, "spoilt"), (2.25, "spoilt"), *CALM[3:]],
        ),
        (
            # 100 bytes at 50 a second: 1 leaves at 3, 2 at 5; 3 is not throttled.
            FaultPlan().throttle("a->b", bytes_per_s=50, **WINDOW),
            [CALM[0], (3.25, 1), (3.25, 3), (4.25, 4), (5.25, 2)],
        ),
    ],
)
def test_faults_of_links_last_their_window(
    plan: FaultPlan, expected: list[tuple[float, object]]
) -> None:
    """What is sent in the window feels the fault, what is sent outside does not."""
    assert heard(plan) == expected


def test_reordering_reorders() -> None:
    """Messages a tenth of a second apart overtake when each may take 5 s longer."""
    seen = [
        number for _, number in heard(FaultPlan().reorder("a", by_s=5), every_s=0.1)
    ]

    assert sorted(map(str, seen)) == list("01234")
    assert seen != [0, 1, 2, 3, 4]


def test_disk_faults_last_their_window() -> None:
    """A disk is full from 1 to 3 by two faults that overlap, and read-only at 5."""
    plan = (
        FaultPlan()
        .disk_full("a", at_s=1, for_s=1.5)
        .disk_full("a", at_s=2, for_s=1)
        .disk_read_only("a", at_s=4.75, for_s=0.5)
    )
    seen: list[str] = []
    with SimWorld(0) as world:
        process = world.add("a")

        def program() -> None:
            for second in range(7):
                try:
                    world.disks["a"].append(f"s{second}", b"x")
                    seen.append("")
                except (DiskFull, UsageError) as exc:
                    seen.append(type(exc).__name__)
                world.scheduler.sleep(1.0)

        process.start(program)
        apply(plan, world)
        world.scheduler.run()

    # Of one instant, the process's own timers were made before the ends of faults.
    assert seen[:3] == ["", "DiskFull", "DiskFull"]
    assert seen[4:] == ["", "DiskDenied", ""]


def test_clock_faults_change_the_clock_of_their_process_only() -> None:
    """A jump of 100 at 1 s and a rate of 2 from 2 s on show 105 at 4 s."""
    plan = (
        FaultPlan().clock_jump("a", by_s=100, at_s=1).clock_drift("a", rate=2, at_s=2)
    )
    with SimWorld(0) as world:
        world.add("a")
        world.add("b")
        start_s = {name: clock.now_s() for name, clock in world.clocks.items()}
        apply(plan, world)
        world.scheduler.run(4.0)
        passed_s = {
            name: clock.now_s() - start_s[name] for name, clock in world.clocks.items()
        }

    # 2 s at rate 1, 100 by the jump, 2 s at rate 2.
    assert passed_s == pytest.approx({"a": 106.0, "b": 4.0})


def test_faults_of_a_round_happen_once_when_it_is_reached() -> None:
    """The caller says which round was reached; its faults follow in that instant."""
    plan = FaultPlan().kill("a", at_round=3, back_after_s=1).freeze("a", at_round=9)
    with SimWorld(0) as world:
        process = world.add("a")
        process.start(lambda: None)
        armed = apply(plan, world)

        def reach(round: int) -> Callable[[], None]:
            return lambda: armed.reached(round)

        for at_s, round in ((1.0, 2), (2.0, 3), (5.0, 3)):
            world.scheduler.at(at_s, reach(round))
        world.scheduler.run(2.5)
        assert not process.is_alive
        world.scheduler.run(9.0)

        assert process.incarnation_number == 2
        assert process.incarnation.runs


def test_a_process_may_report_the_round_that_kills_it() -> None:
    """Faults wait for the event that reached their round, so that all of them come."""
    with SimWorld(0) as world:
        process, other, seen = world.add("a"), world.add("b"), []
        armed = apply(FaultPlan().kill("a", at_round=1).kill("b", at_round=1), world)

        def program() -> None:
            armed.reached(1)
            seen.append("went on")
            world.scheduler.sleep(1.0)
            seen.append("survived")

        other.start(lambda: None)
        process.start(program)
        world.scheduler.run()

        assert seen == ["went on"]
        assert not process.is_alive
        assert not other.is_alive


def test_a_plan_says_since_when_it_is_calm() -> None:
    """Calm is when the last fault has ended: never before, and at once without any."""
    plan = FaultPlan().kill("a", at_s=1, back_after_s=4).freeze("a", at_s=2, for_s=1)
    with SimWorld(0) as world:
        world.add("a").start(lambda: None)
        armed = apply(plan.loss("*", rate=1, for_s=3), world)
        world.scheduler.run(4.9)
        assert armed.calm_since_s is None
        world.scheduler.run(9.0)
        assert armed.calm_since_s == 5.0

        assert apply(FaultPlan(), world).calm_since_s == 0.0
        endless = apply(FaultPlan().loss("*", rate=0.1), world)
        world.scheduler.run(99.0)
        assert endless.calm_since_s is None


def test_a_plan_for_somebody_else_is_refused() -> None:
    """A process that the world does not have is named, with the nearest one."""
    with SimWorld(0) as world:
        world.add("i1")
        for plan in (
            FaultPlan().kill("i7", at_s=1),
            FaultPlan().loss("i1->i7", rate=1),
            FaultPlan().partition(["i1"], ["i7"], at_s=1),
        ):
            with pytest.raises(UsageError, match=r"names 'i7', .* Did you mean 'i1'"):
                apply(plan, world)


def test_a_name_is_given_once() -> None:
    """Two processes of one name would be one to the network."""
    with SimWorld(0) as world:
        world.add("a")
        with pytest.raises(UsageError, match="'a' exists already"):
            world.add("a")
