"""Claims about the runtime port: the machine's threads, and the greenlets of a process.

Each claim gets a runtime and the call that closes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest

from atoll.errors import Unreachable
from atoll.runtime import MAX_CONCURRENT, Future, Runtime, SystemRuntime, Worker
from atoll.simulate.hosts import SimRuntime
from atoll.simulate.world import SimWorld

Run = Callable[[Callable[[Runtime, Callable[[], None]], None]], None]
"""Runs a claim, which gets a runtime and the call that closes it."""


def with_threads(claim: Callable[[Runtime, Callable[[], None]], None]) -> None:
    runtime = SystemRuntime()
    try:
        claim(runtime, runtime.close)
    finally:
        runtime.close()


def with_greenlets(claim: Callable[[Runtime, Callable[[], None]], None]) -> None:
    world = SimWorld(0)
    process = world.add("a")
    ended: list[bool] = []

    def live() -> None:
        runtime = SimRuntime(world, process)
        claim(runtime, runtime.close)
        ended.append(True)
        world.scheduler.stop()

    with world.scheduler:
        process.start(live)
        world.scheduler.run(60.0)
    assert ended == [True]


@pytest.fixture(params=[with_threads, with_greenlets])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]  # pytest's parameters have no type


def test_time_passes_while_one_sleeps(run: Run) -> None:
    """A sleep takes at least its seconds on the runtime's own clock."""

    def claim(runtime: Runtime, close: Callable[[], None]) -> None:
        before_s = runtime.now_s()
        runtime.sleep(0.02)
        assert runtime.now_s() >= before_s + 0.02

    run(claim)


def test_nobody_sleeps_in_a_closed_runtime(run: Run) -> None:
    """Closing makes a waiting call give up, and each later one."""

    def claim(runtime: Runtime, close: Callable[[], None]) -> None:
        def close_soon() -> None:
            runtime.sleep(0.01)
            close()

        runtime.spawn(close_soon, name="close")
        with pytest.raises(Unreachable):
            runtime.sleep(0.5)
        with pytest.raises(Unreachable):
            runtime.sleep(0.0)
        close()  # again

    run(claim)


def test_a_spawned_call_runs_while_its_maker_waits(run: Run) -> None:
    """A future carries its value, or its error, from one to the other."""

    def claim(runtime: Runtime, close: Callable[[], None]) -> None:
        value, error = runtime.future(), runtime.future()
        runtime.spawn(partial(value.set_result, 7), name="value")
        runtime.spawn(partial(error.set_exception, Unreachable("no")), name="error")
        assert value.result() == 7
        assert value.done()
        assert value.exception() is None
        with pytest.raises(Unreachable, match="no"):
            error.result()
        assert isinstance(error.exception(), Unreachable)

    run(claim)


def test_periodic_calls_end_with_the_runtime(run: Run) -> None:
    """The first comes after one period, and none after the close."""

    def claim(runtime: Runtime, close: Callable[[], None]) -> None:
        begun_s = runtime.now_s()
        calls_s: list[float] = []
        third = runtime.future()

        def act() -> None:
            calls_s.append(runtime.now_s() - begun_s)
            if len(calls_s) == 3:
                close()
                third.set_result(None)

        runtime.every(0.01, act)
        third.result()
        assert len(calls_s) == 3
        assert calls_s[0] >= 0.01
        assert calls_s[2] >= 0.03

    run(claim)


def test_gathered_calls_run_at_the_same_time(run: Run) -> None:
    """Each waits for the other; results keep the order of the calls."""

    def claim(runtime: Runtime, close: Callable[[], None]) -> None:
        here, there = runtime.future(), runtime.future()

        def meet(own: str, mine: object, other: object) -> str:
            mine.set_result(None)  # type: ignore[attr-defined]  # a future
            other.result()  # type: ignore[attr-defined]  # a future
            return own

        acts = [partial(meet, "a", here, there), partial(meet, "b", there, here)]
        assert runtime.gather(acts) == ["a", "b"]
        assert runtime.gather([lambda: "alone"]) == ["alone"]

    run(claim)


def test_the_first_error_is_raised_when_all_have_ended(run: Run) -> None:
    """A gathered call that fails does not leave others running."""

    def claim(runtime: Runtime, close: Callable[[], None]) -> None:
        ended: list[str] = []

        def fail(name: str, after_s: float) -> None:
            runtime.sleep(after_s)
            ended.append(name)
            raise Unreachable(name)

        with pytest.raises(Unreachable, match="late"):
            runtime.gather([partial(fail, "late", 0.03), partial(fail, "soon", 0.0)])
        assert ended == ["soon", "late"]

    run(claim)


class Noted(list[Callable[[], None]]):
    """Calls, and a future that is set once all of them have been iterated over."""

    def __init__(self, calls: Iterable[Callable[[], None]], end: Future[None]) -> None:
        super().__init__(calls)
        self._end = end

    def __iter__(self) -> Iterator[Callable[[], None]]:
        yield from super().__iter__()
        self._end.set_result(None)


def test_gathered_calls_that_have_not_begun_end_with_the_runtime() -> None:
    """Who gathers is told that the host gives up, and does not wait for them."""
    runtime = SystemRuntime()
    submitted, closed = runtime.future(), runtime.future()

    def close() -> None:
        submitted.result()
        runtime.close()
        closed.set_result(None)

    busy = [close, *[closed.result] * (MAX_CONCURRENT - 1)]
    with pytest.raises(Unreachable, match="given up"):
        runtime.gather(Noted([*busy, closed.result], submitted))


def test_a_worker_runs_its_calls_in_order(run: Run) -> None:
    """One after the other, after a rest too, and all of them before it stops."""

    def claim(runtime: Runtime, close: Callable[[], None]) -> None:
        done: list[int] = []
        worker = Worker(runtime, "worker")
        rested = runtime.future()

        def work(number: int) -> None:
            runtime.sleep(0.001)
            done.append(number)

        worker.submit(work, 1)
        worker.submit(rested.set_result, None)
        rested.result()
        runtime.sleep(0.01)  # the worker has nothing to do meanwhile
        for number in (2, 3, 4):
            worker.submit(work, number)
        worker.submit(lambda: worker.submit(work, 5))
        worker.shutdown()
        assert done == [1, 2, 3, 4, 5]

    run(claim)


def test_a_deadline_ends_a_sleep_before_it_begins() -> None:
    """What cannot end in time is not waited for; then calls in progress are ended."""
    runtime = SystemRuntime()
    ended = runtime.future()
    runtime.close_after(0.05, then=partial(ended.set_result, None))
    runtime.sleep(0.0)
    with pytest.raises(Unreachable, match="in the remaining time"):
        runtime.sleep(3600.0)
    assert ended.result() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_an_error_ended_can_be_shut_down() -> None:
    """Leaving does not wait for a thread that is gone."""
    runtime = SystemRuntime()
    worker = Worker(runtime, "a")

    def fail() -> None:
        raise MemoryError

    (thread,) = [one for one in threading.enumerate() if one.name == "a"]
    worker.submit(fail)
    worker.shutdown()
    thread.join()  # its report is of this test
    runtime.close()
