"""Virtual time: order, waiting, errors that surface, and randomness by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.simulate import GreenletFuture, ProcessFailed, Scheduler, SimProcess
from atoll.simulate.scheduler import STALLED_EVENTS


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), max_size=30))
def test_events_run_in_time_order_and_ties_in_the_order_made(
    moments: list[float],
) -> None:
    """The order of events is that of (moment, when it was asked for), always."""
    scheduler = Scheduler(0)
    seen: list[tuple[float, int]] = []
    for index, moment in enumerate(moments):
        scheduler.at(moment, partial(seen.append, (moment, index)))

    scheduler.run()

    assert seen == sorted(zip(moments, range(len(moments)), strict=True))
    assert scheduler.events == len(moments)


def test_a_moment_that_has_passed_is_now() -> None:
    """Time never goes back, whatever is asked for."""
    scheduler = Scheduler(0)
    seen: list[float] = []
    scheduler.at(5.0, lambda: scheduler.at(1.0, lambda: seen.append(scheduler.now_s)))

    scheduler.run()

    assert seen == [5.0]


def test_a_run_ends_where_it_was_told_to() -> None:
    """A run stops at its bound, leaves the time there, and keeps what is later."""
    scheduler = Scheduler(0)
    seen: list[str] = []
    scheduler.at(1.0, lambda: seen.append("within"))
    scheduler.at(3.0, lambda: seen.append("beyond"))

    scheduler.run(2.0)
    assert (seen, scheduler.now_s) == (["within"], 2.0)

    scheduler.run()
    assert (seen, scheduler.now_s) == (["within", "beyond"], 3.0)


def test_stop_ends_the_run_after_the_event_that_says_so() -> None:
    """Nothing happens after `stop`, and a later run goes on from there."""
    scheduler = Scheduler(0)
    seen: list[int] = []
    scheduler.at(1.0, scheduler.stop)
    scheduler.at(1.0, lambda: seen.append(1))

    scheduler.run(9.0)
    assert (seen, scheduler.now_s) == ([], 1.0)

    scheduler.run(9.0)
    assert (seen, scheduler.now_s) == ([1], 9.0)


def test_a_cancelled_timer_does_nothing_and_takes_no_time() -> None:
    """A cancelled timer neither runs, nor counts, nor moves the clock; even many."""
    scheduler = Scheduler(0)
    timers = [scheduler.at(50.0 + n, lambda: pytest.fail("ran")) for n in range(5000)]

    def cancel() -> None:
        for timer in timers:
            scheduler.cancel(timer)

    scheduler.at(1.0, cancel)

    scheduler.run()

    assert (scheduler.now_s, scheduler.events) == (1.0, 1)


def test_sleeping_takes_exactly_its_time() -> None:
    """Two greenlets that sleep 3 and 2 seconds wake at multiples of these."""
    seen: list[tuple[float, str]] = []
    with Scheduler(0) as scheduler:

        def sleep(name: str, seconds: float) -> None:
            for _ in range(2):
                scheduler.sleep(seconds)
                seen.append((scheduler.now_s, name))

        SimProcess("a", scheduler).start(lambda: sleep("a", 3.0))
        SimProcess("b", scheduler).start(lambda: sleep("b", 2.0))
        scheduler.run()

    assert seen == [(2.0, "b"), (3.0, "a"), (4.0, "b"), (6.0, "a")]


def waits(
    act: Callable[[GreenletFuture[int]], object], *, timeout_s: float | None = None
) -> tuple[object, float]:
    """Return what a greenlet got from a promise, and when."""
    got: list[tuple[object, float]] = []
    with Scheduler(0) as scheduler:
        promise = GreenletFuture[int](scheduler)

        def wait() -> None:
            try:
                got.append((promise.result(timeout_s), scheduler.now_s))
            except Exception as exc:
                got.append((exc, scheduler.now_s))

        SimProcess("a", scheduler).start(wait)
        scheduler.at(5.0, lambda: act(promise))
        scheduler.run(20.0)
    return got[0] if got else (None, math.inf)


def test_a_promise_gives_its_value_when_it_is_kept() -> None:
    """Who waits goes on in the instant in which the value is set."""
    assert waits(lambda promise: promise.set_result(7)) == (7, 5.0)


def test_a_promise_raises_its_error() -> None:
    """An error that was set is raised where the value is awaited."""
    error = ValueError("no")

    assert waits(lambda promise: promise.set_exception(error)) == (error, 5.0)


def test_a_promise_gives_up_after_its_timeout() -> None:
    """A wait of 4 seconds for what comes after 5 ends after 4, and only once."""
    error, at_s = waits(lambda promise: promise.set_result(7), timeout_s=4.0)

    assert isinstance(error, TimeoutError)
    assert "4.0 s" in str(error)
    assert at_s == 4.0


def test_a_value_in_time_cancels_the_timeout() -> None:
    """A timeout that was not needed leaves no trace."""
    assert waits(lambda promise: promise.set_result(7), timeout_s=6.0) == (7, 5.0)


def test_a_promise_is_kept_once() -> None:
    """Setting a second value is an error, and the first one stands."""
    promise = GreenletFuture[int](Scheduler(0))
    promise.set_result(1)

    with pytest.raises(UsageError, match="has a result already"):
        promise.set_result(2)
    assert promise.done()
    assert promise.exception() is None
    assert promise.result() == 1


def test_an_error_in_a_greenlet_names_process_and_time() -> None:
    """What a program does not catch ends the run, with all that is known about it."""
    with Scheduler(0) as scheduler:

        def fail() -> None:
            scheduler.sleep(2.5)
            raise ValueError("broken")

        SimProcess("i3", scheduler).start(fail)

        with pytest.raises(
            ProcessFailed, match=r"'i3' \(incarnation 1\) .* 2.500000 s: ValueError: br"
        ) as caught:
            scheduler.run()

    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_the_world_is_raised_as_it_is() -> None:
    """An invariant that fails is not wrapped into anything."""
    scheduler = Scheduler(0)
    scheduler.at(1.0, lambda: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        scheduler.run()


def test_the_run_can_go_on_after_an_error() -> None:
    """Other processes are as they were when one has failed."""
    seen: list[float] = []
    with Scheduler(0) as scheduler:

        def fine() -> None:
            scheduler.sleep(2.0)
            seen.append(scheduler.now_s)

        SimProcess("bad", scheduler).start(lambda: 1 // 0)
        SimProcess("good", scheduler).start(fine)
        with pytest.raises(ProcessFailed, match="bad"):
            scheduler.run()
        scheduler.run()

    assert seen == [2.0]


def test_what_is_over_is_not_resumed() -> None:
    """A late call of `resume` runs nothing, least of all what came to its place."""
    seen: list[str] = []
    with Scheduler(0) as scheduler:
        process = SimProcess("i1", scheduler)
        kept: list[Callable[[], None]] = []

        def first() -> None:
            kept.append(scheduler.waiting_strand().resume)

        def second() -> None:
            seen.append("begun")
            scheduler.sleep(3.0)
            seen.append("slept")

        process.start(first)
        scheduler.at(1.0, lambda: process.spawn(second))
        scheduler.at(2.0, lambda: kept[0]())
        scheduler.run(2.5)
        assert seen == ["begun"]
        scheduler.run()

    assert (seen, scheduler.now_s) == (["begun", "slept"], 4.0)


def test_what_follows_a_failure_is_none_the_worse_for_it() -> None:
    """Strands that come after one that raised, died or ended live as if alone."""
    seen: list[float] = []
    with Scheduler(0) as scheduler:
        process = SimProcess("i1", scheduler)

        def sleeper() -> None:
            scheduler.sleep(1.0)
            seen.append(scheduler.now_s)

        process.start(lambda: None)
        process.spawn(lambda: 1 // 0)
        with pytest.raises(ProcessFailed, match="ZeroDivisionError"):
            scheduler.run()
        process.spawn(sleeper)
        scheduler.at(0.5, process.crash)
        scheduler.at(0.6, lambda: process.start(sleeper))
        scheduler.at(0.7, lambda: process.spawn(sleeper))
        scheduler.run()

    assert seen == [1.6, 1.7]


def test_after_every_event_the_invariants_are_asked() -> None:
    """`after_event` runs once per event, as the world, and may end the run."""
    counts: list[int] = []
    with Scheduler(0) as scheduler:
        scheduler.after_event = lambda: counts.append(scheduler.events)
        SimProcess("a", scheduler).start(lambda: scheduler.sleep(1.0))
        scheduler.run()

        assert counts == [1, 2]
        scheduler.after_event = lambda: pytest.fail("violated")
        scheduler.at(3.0, lambda: None)
        with pytest.raises(pytest.fail.Exception, match="violated"):
            scheduler.run()


def test_time_that_stands_still_is_an_error() -> None:
    """A loop that waits for no time at all is found, not waited for."""
    scheduler = Scheduler(0)

    def again() -> None:
        scheduler.at(scheduler.now_s, again)

    scheduler.at(4.0, again)
    with pytest.raises(ProcessFailed, match=r"Time stands still at 4.0.* the world"):
        scheduler.run()
    assert scheduler.events == STALLED_EVENTS + 1


def test_streams_of_random_numbers_are_independent() -> None:
    """How often one stream is used changes nothing in another; the seed does."""
    first, second, other = Scheduler(1), Scheduler(1), Scheduler(2)
    first.random("a").random()
    drawn = [each.random("b").random() for each in (first, second, other)]

    assert drawn[0] == drawn[1] != drawn[2]
    assert first.random("a").random() != second.random("a").random()


@pytest.mark.parametrize("when_s", [math.nan, math.inf])
def test_a_moment_must_be_one(when_s: float) -> None:
    """Neither infinity nor NaN is an instant."""
    with pytest.raises(UsageError, match="not an instant of virtual time"):
        Scheduler(0).at(when_s, lambda: None)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_one_cannot_sleep_backwards(seconds: float) -> None:
    """A sleep is finite and not negative."""
    with pytest.raises(UsageError, match="is not possible"):
        Scheduler(0).sleep(seconds)


def test_only_a_greenlet_can_wait() -> None:
    """Waiting in an event of the world is an error that says what to do."""
    with pytest.raises(UsageError, match=r"not in a greenlet. Spawn it"):
        Scheduler(0).sleep(1.0)


def test_a_run_inside_a_run_is_refused() -> None:
    """One loop at a time decides what happens next."""
    scheduler = Scheduler(0)
    scheduler.at(0.0, scheduler.run)

    with pytest.raises(UsageError, match="inside a run"):
        scheduler.run()
