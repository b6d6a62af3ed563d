"""Clocks that drift and jump, never back, and alarms that ring by them."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.runtime import Clock
from atoll.simulate import Scheduler, SimClock, SimWorld


def test_a_drifting_clock_shows_its_rate() -> None:
    """At rate 1.5 a clock shows 15 seconds more after 10, and keeps them after that."""
    scheduler = Scheduler(0)
    clock: Clock = SimClock(scheduler, rate=1.5, origin_s=100.0)
    scheduler.run(10.0)

    assert clock.now_s() == 115.0


def test_a_change_of_rate_counts_from_its_moment() -> None:
    """Ten seconds at rate 1 and ten at rate 0.5 make 15."""
    scheduler = Scheduler(0)
    clock = SimClock(scheduler)
    scheduler.at(10.0, lambda: clock.set_rate(0.5))
    scheduler.run(20.0)

    assert clock.now_s() == 15.0
    assert clock.rate == 0.5


def test_a_jump_ahead_rings_what_it_passes() -> None:
    """An alarm for 30 s rings in the instant of a jump from 10 to 60."""
    scheduler, seen = Scheduler(0), []
    clock = SimClock(scheduler)
    clock.at(30.0, lambda: seen.append((scheduler.now_s, clock.now_s())))
    scheduler.at(10.0, lambda: clock.jump(50.0))
    scheduler.run()

    assert seen == [(10.0, 60.0)]


def test_a_jump_back_is_to_stand_still() -> None:
    """After a jump by -5 the clock shows the same for 5 s, and its alarms are late."""
    scheduler, seen = Scheduler(0), []
    clock = SimClock(scheduler)
    scheduler.at(10.0, lambda: clock.jump(-5.0))
    scheduler.at(14.0, lambda: seen.append(clock.now_s()))
    clock.at(12.0, lambda: seen.append(scheduler.now_s))
    scheduler.run(20.0)

    assert seen == [10.0, 17.0]
    assert clock.now_s() == 15.0


def test_a_sleep_by_the_clock_takes_its_time_there() -> None:
    """Three seconds of a clock at rate 1.5 are two true ones."""
    with SimWorld(0) as world:
        process = world.add("a", clock_rate=1.5)
        process.start(lambda: world.clocks["a"].sleep(3.0))
        world.scheduler.run()

        assert world.scheduler.now_s == 2.0


def test_an_alarm_of_a_frozen_process_rings_at_the_thaw() -> None:
    """A clock goes on while its process is frozen; the process learns of it later."""
    with SimWorld(0) as world:
        process, seen = world.add("a"), []

        def program() -> None:
            before_s = world.clocks["a"].now_s()
            world.clocks["a"].sleep(2.0)
            seen.append(world.clocks["a"].now_s() - before_s)

        process.start(program)
        world.scheduler.at(1.0, process.freeze)
        world.scheduler.at(8.0, process.thaw)
        world.scheduler.run()

    assert seen == [8.0]


def test_an_alarm_of_a_dead_process_never_rings() -> None:
    """The next life of a process is not woken by the alarms of the last."""
    with SimWorld(0) as world:
        process, seen = world.add("a"), []

        def program() -> None:
            world.clocks["a"].sleep(2.0)
            seen.append((process.incarnation_number, world.scheduler.now_s))

        process.start(program)
        world.scheduler.at(1.0, process.crash)
        world.scheduler.at(1.5, process.restart)
        world.scheduler.run()

    assert seen == [(2, 3.5)]


@given(
    changes=st.lists(
        st.tuples(
            st.floats(0.0, 20.0),
            st.one_of(
                st.tuples(st.just("jump"), st.floats(-9.0, 9.0)),
                st.tuples(st.just("rate"), st.floats(0.1, 10.0)),
            ),
        ),
        max_size=8,
    ),
    naps=st.lists(st.floats(0.0, 3.0), max_size=8),
)
def test_a_clock_never_goes_back_and_no_sleep_is_short(
    changes: list[tuple[float, tuple[str, float]]], naps: list[float]
) -> None:
    """Whatever happens to a clock, it grows, and who slept finds the time has come."""
    shown: list[float] = []
    with SimWorld(0) as world:
        clock, process = SimClock(world.scheduler), world.add("a")
        for at_s, (what, value) in changes:
            act = clock.jump if what == "jump" else clock.set_rate
            world.scheduler.at(at_s, partial(act, value))
        world.scheduler.after_event = lambda: shown.append(clock.now_s())

        def program() -> None:
            for nap_s in naps:
                until_s = clock.now_s() + nap_s
                clock.sleep(nap_s)
                assert clock.now_s() >= until_s

        process.start(program)
        world.scheduler.run()

    assert shown == sorted(shown)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_must_move_on(rate: float) -> None:
    """A rate is finite and above 0, and the message says what it means."""
    with pytest.raises(UsageError, match=rf"rate={rate!r} must be finite and above 0"):
        SimClock(Scheduler(0), rate=rate)


def test_an_alarm_needs_a_time() -> None:
    """NaN is no time, and would never ring."""
    with pytest.raises(UsageError, match="when_s=nan is no time"):
        SimClock(Scheduler(0)).at(math.nan, lambda: None)
