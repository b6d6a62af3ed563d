"""Processes that crash, freeze and come back: the dead have no effect."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.simulate import (
    GreenletFuture,
    ProcessFailed,
    ReplyFunction,
    SimProcess,
    SimWorld,
    TraceEvent,
    timeline,
)


@pytest.fixture(name="world")
def fixture_world() -> Iterator[SimWorld]:
    with SimWorld(0) as world:
        yield world


def test_a_crash_leaves_nothing_running(world: SimWorld) -> None:
    """Greenlets, timers and spawned greenlets of a dead life never run again."""
    process, seen = world.add("a"), []

    def forever() -> None:
        while True:
            seen.append(world.scheduler.now_s)
            world.scheduler.sleep(1.0)

    def program() -> None:
        process.spawn(forever)
        process.after(5.0, lambda: seen.append(-1.0))
        forever()

    process.start(program)
    world.scheduler.at(1.5, process.crash)
    world.scheduler.run(10.0)

    assert seen == [0.0, 0.0, 1.0, 1.0]
    assert not process.is_alive


def last_acts(
    world: SimWorld, process: SimProcess, heard: list[object]
) -> dict[str, object]:
    """Return all that a process could do to the world, by name."""
    scheduler, promise = world.scheduler, GreenletFuture[int](world.scheduler)
    peer, disk = world.processes["peer"], world.disks["a"]
    return {
        "call": lambda: world.network.call(process, "peer", "from hell", timeout_s=1.0),
        "ask": lambda: world.network.ask(process, "peer", "from hell", size_bytes=1),
        "listen": lambda: world.network.listen(process, lambda *_: heard.append("me")),
        "append": lambda: disk.append("a", b"x"),
        "sync": lambda: disk.sync("synced"),
        "write": lambda: disk.write_new("b", [b"x"]),
        "remove": lambda: disk.remove("synced"),
        "timer": lambda: scheduler.at(3.0, lambda: heard.append("timer")),
        "alarm": lambda: world.clocks["a"].at(0.0, lambda: heard.append("alarm")),
        "sleep": lambda: scheduler.sleep(1.0),
        "clock sleep": lambda: world.clocks["a"].sleep(1.0),
        "work": lambda: process.work(1.0),
        "promise": lambda: promise.set_result(1),
        "result": promise.result,
        "spawn": lambda: process.spawn(lambda: heard.append("spawned")),
        "kill": peer.crash,
        "freeze": peer.freeze,
        "restart": process.restart,
    }


ACTS = (
    *("call", "ask", "listen", "append", "sync", "write", "remove", "timer", "alarm"),
    *("sleep", "clock sleep", "work", "promise", "result", "spawn", "kill", "freeze"),
    "restart",
)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_dead_process_does_last_has_no_effect(act: str, restarts: bool) -> None:
    """No `finally` block of a crashed process has an effect, even after a restart."""
    with SimWorld(0) as world:
        heard: list[object] = []
        process, peer = world.add("a"), world.add("peer")
        peer.start(lambda: world.network.listen(peer, lambda it, _: heard.append(it)))

        def program() -> None:
            if process.incarnation_number > 1:
                return
            world.disks["a"].append("synced", b"1")
            world.disks["a"].sync("synced")
            try:
                world.scheduler.sleep(9.0)
            finally:
                do = last_acts(world, process, heard)[act]
                assert callable(do)
                do()

        def crash() -> None:
            process.crash()
            if restarts:
                process.restart()

        process.start(program)
        world.scheduler.at(1.0, crash)
        world.scheduler.run(20.0)

        assert heard == []
        assert peer.is_alive
        assert peer.incarnation.runs
        assert process.is_alive == restarts
        assert process.incarnation_number == 1 + restarts
        assert world.disks["a"].names("") == ["synced"]


def test_every_act_is_tried() -> None:
    """The list above names all that `last_acts` can do."""
    with SimWorld(0) as world:
        world.add("peer")
        assert tuple(last_acts(world, world.add("a"), [])) == ACTS


def test_a_closed_world_leaves_nothing_in_memory() -> None:
    """Everything that processes held is gone after `close`, waiting greenlets too."""

    class Weights:
        pass

    def live() -> weakref.ref[Weights]:
        weights = Weights()
        with SimWorld(0) as world:

            def program() -> None:
                held = weights
                world.scheduler.sleep(9.0)
                del held

            world.add("a").start(program)
            world.scheduler.run(1.0)
        return weakref.ref(weights)

    reference = live()
    gc.collect()

    assert reference() is None


def test_a_foreign_thread_is_refused(world: SimWorld) -> None:
    """A program that starts real threads learns that they cannot use the ports."""
    process = world.add("a")

    def program() -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(world.disks["a"].append, "a", b"x").result()

    process.start(program)
    with pytest.raises(ProcessFailed, match=r"did not start. Spawn it in a process"):
        world.scheduler.run()


def test_a_process_that_crashes_itself_does_not_return() -> None:
    """Nothing after one's own crash is executed, be it in a greenlet or a callback."""
    seen = []
    with SimWorld(0) as world:
        first, second = world.add("a"), world.add("b")

        def crash(process: SimProcess) -> None:
            process.crash()
            seen.append("after")

        first.start(lambda: crash(first))
        second.start(lambda: second.after(1.0, lambda: crash(second)))
        world.scheduler.run()

        assert not first.is_alive
        assert not second.is_alive
    assert seen == []


def test_a_process_can_crash_another_from_its_greenlet(world: SimWorld) -> None:
    """The one that crashes goes on at once; the crashed one is unwound after it."""
    seen: list[str] = []
    victim, culprit = world.add("v"), world.add("c")

    @contextmanager
    def unwinding() -> Iterator[None]:
        try:
            yield
        finally:
            seen.append("unwound")

    def wait() -> None:
        with unwinding():
            world.scheduler.sleep(9.0)

    def kill() -> None:
        world.scheduler.sleep(1.0)
        victim.crash()
        seen.append("went on")

    victim.start(wait)
    culprit.start(kill)
    world.scheduler.run()

    assert seen == ["went on", "unwound"]


def test_a_program_that_will_not_die_is_found() -> None:
    """Catching one's own death for ever is an error, not a hang."""
    with SimWorld(0) as world:
        process = world.add("zombie")
        gate = [True]

        def program() -> None:
            while gate[0]:
                try:
                    world.scheduler.sleep(1.0)
                except BaseException:
                    continue

        process.start(program)
        world.scheduler.at(2.5, process.crash)

        with pytest.raises(ProcessFailed, match=r"'zombie'.* does not die at 2.5"):
            world.scheduler.run(9.0)
        gate[0] = False  # so that its collection ends it


def test_errors_of_the_dying_are_nobodys(world: SimWorld) -> None:
    """A `finally` block that fails in a dead process does not end the run."""
    process = world.add("a")

    def program() -> None:
        try:
            world.scheduler.sleep(9.0)
        finally:
            raise ValueError("last words")

    process.start(program)
    world.scheduler.at(1.0, process.crash)
    world.scheduler.run(2.0)

    assert world.scheduler.now_s == 2.0


@given(
    delays=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.5, 6.0]), max_size=12),
    span=st.sampled_from([(0.75, 2.5), (1.0, 4.0), (2.0, 5.0)]),
)
def test_timers_that_fell_due_while_frozen_fire_at_the_thaw_in_order(
    delays: list[float], span: tuple[float, float]
) -> None:
    """A timer fires at its moment, or at the thaw if it was frozen then, in order."""
    frozen_s, thawed_s = span
    seen: list[tuple[float, int]] = []
    with SimWorld(0) as world:
        process = world.add("a")

        def fire(index: int) -> None:
            seen.append((world.scheduler.now_s, index))

        def program() -> None:
            for index, delay_s in enumerate(delays):
                process.after(delay_s, partial(fire, index))

        world.scheduler.at(frozen_s, process.freeze)
        world.scheduler.at(thawed_s, process.thaw)
        process.start(program)
        world.scheduler.run()

    # Freeze and thaw were asked for first, so they lead the timers of their instant.
    fires_s = [thawed_s if frozen_s <= d < thawed_s else d for d in delays]
    in_order = sorted(zip(fires_s, delays, range(len(delays)), strict=True))
    assert seen == [(fire_s, index) for fire_s, _, index in in_order]


def test_a_frozen_process_gets_its_messages_at_the_thaw(world: SimWorld) -> None:
    """What arrives at a frozen process is kept, and in order, until it goes on."""
    process, sender, seen = world.add("a"), world.add("b"), []

    def listen(request: object, reply: ReplyFunction) -> None:
        seen.append((world.scheduler.now_s, request))

    def send() -> None:
        for index in range(3):
            world.network.ask(sender, "a", index, size_bytes=0)
            world.scheduler.sleep(1.0)

    process.start(lambda: world.network.listen(process, listen))
    sender.start(send)
    world.scheduler.at(0.5, process.freeze)
    world.scheduler.at(7.0, process.thaw)
    world.scheduler.run()

    assert [request for _, request in seen] == [0, 1, 2]
    assert [at_s for at_s, _ in seen[1:]] == [7.0, 7.0]


def test_a_process_killed_while_frozen_never_gets_its_timers(world: SimWorld) -> None:
    """A freeze keeps timers for this life only; its late thaw leaves the next alone."""
    process, seen = world.add("a"), []
    process.start(
        lambda: process.after(2.0, lambda: seen.append(process.incarnation_number))
    )
    frozen: list[Callable[[], None]] = []

    def freeze() -> None:
        life = process.freeze()
        frozen.append(lambda: process.thaw(life))

    world.scheduler.at(1.0, freeze)
    world.scheduler.at(3.0, process.crash)
    world.scheduler.at(4.0, process.restart)
    world.scheduler.at(5.0, lambda: frozen[0]())
    world.scheduler.run()

    assert seen == [2]


def test_freezes_add_up(world: SimWorld) -> None:
    """A process frozen twice goes on after two thaws."""
    process, seen = world.add("a"), []
    process.start(
        lambda: process.after(2.0, lambda: seen.append(world.scheduler.now_s))
    )
    for at_s, act in (
        (1.0, process.freeze),
        (1.5, process.freeze),
        (3.0, process.thaw),
        (4.0, process.thaw),
    ):
        world.scheduler.at(at_s, act)
    world.scheduler.run()

    assert seen == [4.0]
    with pytest.raises(UsageError, match="is not frozen"):
        process.thaw()


def test_slow_work_takes_longer(world: SimWorld) -> None:
    """Slowdowns multiply: 2 seconds at factors 3 and 2 take 12."""
    process = world.add("a")
    process.slowdowns += [3.0, 2.0]
    process.start(lambda: process.work(2.0))
    world.scheduler.run()

    assert world.scheduler.now_s == 12.0


def test_only_the_dead_can_be_restarted(world: SimWorld) -> None:
    """A restart needs a death before it and a program, and says which is missing."""
    process = world.add("a")
    with pytest.raises(UsageError, match="has no program yet"):
        process.restart()
    with pytest.raises(UsageError, match=r"dead at 0.0.* Start it first"):
        process.spawn(lambda: None)

    process.start(lambda: None)
    with pytest.raises(UsageError, match=r"is alive. Crash it first"):
        process.restart()


def test_a_crash_of_the_dead_changes_nothing(world: SimWorld) -> None:
    """Two crashes are one."""
    process = world.add("a")
    process.start(lambda: None)
    process.crash()
    process.crash()
    process.restart()
    world.scheduler.run()

    assert process.incarnation_number == 2


def test_a_timeline_can_be_read(world: SimWorld) -> None:
    """Without a trace nothing is kept; with one, every line has time, who and what."""
    happenings: list[TraceEvent] = []
    process = world.add("i2")
    world.scheduler.trace = happenings.append
    process.start(lambda: None)
    world.scheduler.at(1.5, process.crash)
    world.scheduler.run()

    assert list(timeline(happenings)) == [
        "     0.000000 s  i2            start      incarnation 1",
        "     1.500000 s  i2            crash      incarnation 1",
        "     1.500000 s  i2            power cut  0 files, 0 survive",
    ]
