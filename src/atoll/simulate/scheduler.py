"""Virtual time: events in order, and greenlets that wait for them.

Rule 1: one event runs at a time, and nothing here reads the machine's clock.
Rule 2: events of one instant run in the order in which they were scheduled.
Rule 3: an event belongs to one incarnation of a process or to the world. Events of a
    dead incarnation are dropped; events of a frozen one wait for its thaw.
Rule 4: every port calls `check` first. Greenlets of a dead incarnation are unwound
    immediately, so their `finally` blocks run, and stop at the first port they call.
Rule 5: randomness comes from named streams of one seed.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from greenlet import (  # type: ignore[import-untyped]  # it ships no types
    getcurrent,
    greenlet,
)

from atoll.errors import UsageError


class ProcessDead(BaseException):
    """The running code belongs to a dead process: it stops here, without effect.

    Not an `Exception`, so that a program's `except Exception` does not catch it.
    """


class ProcessFailed(Exception):
    """A process raised an error that its program did not catch."""


class Timer:
    """A scheduled call, unless it is cancelled or its incarnation ends first."""

    __slots__ = ("act", "incarnation")

    def __init__(
        self, act: Callable[[], object], incarnation: ProcessIncarnation | None
    ) -> None:
        self.act: Callable[[], object] | None = act
        self.incarnation = incarnation


class ProcessIncarnation:
    """One incarnation of a process; its timers, messages and greenlets end with it."""

    __slots__ = ("deferred", "freezes", "is_alive", "number", "process", "runs")

    def __init__(self, process: str, number: int) -> None:
        self.process, self.number = process, number
        self.is_alive = True
        self.runs = True
        """Alive and not frozen: one flag, since every event reads it."""

        self.freezes = 0
        self.deferred: list[Timer] = []
        """Timers that fell due while it was frozen, in that order."""

    def end(self) -> None:
        """Drop every event of this incarnation."""
        self.is_alive = self.runs = False
        self.deferred.clear()

    def __str__(self) -> str:
        return f"process {self.process!r} (incarnation {self.number})"


STALLED_EVENTS = 200_000
"""More events than this in one instant are a loop that waits 0 seconds."""

_STALE_TIMERS = 1_000
_REFUSALS = 100
"""A program that catches `ProcessDead` more often than this never stops."""


class Strand:
    """One thread of execution of an incarnation: a call that runs in a greenlet."""

    __slots__ = ("_scheduler", "act", "greenlet", "incarnation", "is_over")

    def __init__(
        self,
        scheduler: Scheduler,
        incarnation: ProcessIncarnation,
        act: Callable[[], object],
    ) -> None:
        self._scheduler, self.incarnation, self.act = scheduler, incarnation, act
        self.greenlet: greenlet | None = None
        """The greenlet that runs it; None before it begins and when it is over."""

        self.is_over = False

    def resume(self) -> None:
        """Continue in its greenlet, as the event that ends a wait."""
        if self.is_over:
            return
        scheduler = self._scheduler
        scheduler.strand = self
        if self.greenlet is None:
            self.greenlet = scheduler.spare_greenlet()
        self.greenlet.switch()


class Scheduler:
    """Runs events and greenlets in virtual time, the same for the same seed.

    Close it, or use it as a context manager: a greenlet that waits is not garbage
    collected with its references, so that an open scheduler stays in memory.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.events = 0
        """Number of events that have run, without dropped and cancelled ones."""

        self.trace: Callable[[TraceEvent], None] | None = None
        """Called with every `TraceEvent`, for example the `append` of a list."""

        self.after_event: Callable[[], None] | None = None
        """Called by the world after every event; an error that it raises ends `run`."""

        self._queue: list[tuple[float, int, Timer]] = []
        self._sequence = self._stale = self._refusals = 0
        self._first = -(2**62)
        self._streams: dict[str, random.Random] = {}
        self._hub = getcurrent()
        self.strand: Strand | None = None
        """The strand that runs now; None outside of the scheduler's greenlets."""

        self._incarnation: ProcessIncarnation | None = None
        self._strands: dict[ProcessIncarnation, dict[Strand, None]] = {}
        self._idle: list[greenlet] = []
        """Greenlets for reuse: creating one costs as much as resuming ten."""

        self._dead: list[ProcessIncarnation] = []
        self._is_running = self._stops = False

    @property
    def incarnation(self) -> ProcessIncarnation | None:
        """The incarnation that runs now; None is the world."""
        return self._incarnation

    def random(self, name: str) -> random.Random:
        """Return the stream of random numbers of this name."""
        stream = self._streams.get(name)
        if stream is None:
            digest = hashlib.blake2b(f"{self.seed}/{name}".encode()).digest()
            stream = random.Random(int.from_bytes(digest, "little"))
            self._streams[name] = stream
        return stream

    def at(
        self,
        when_s: float,
        act: Callable[[], object],
        *,
        incarnation: ProcessIncarnation | None = None,
    ) -> Timer:
        """Call `act` at `when_s`, or now if that has passed.

        It runs as `incarnation`, or as the world.
        """
        self.check()
        if not when_s < math.inf:
            raise UsageError(
                f"when_s={when_s!r} is not an instant of virtual time. "
                "Give finite seconds."
            )
        return self.push(when_s, act, incarnation)

    def push(
        self,
        when_s: float,
        act: Callable[[], object],
        incarnation: ProcessIncarnation | None,
    ) -> Timer:
        """Schedule as `at` does, for a port that has called `check` already."""
        timer = Timer(act, incarnation)
        when_s = when_s if when_s > self.now_s else self.now_s
        self._sequence += 1
        heappush(self._queue, (when_s, self._sequence, timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """Forget a timer; one that has fired already is left alone."""
        self.check()
        if timer.act is None:
            return
        timer.act = None
        self._stale += 1
        if self._stale > _STALE_TIMERS and 2 * self._stale > len(self._queue):
            self._queue[:] = [
                entry for entry in self._queue if entry[2].act is not None
            ]
            heapify(self._queue)
            self._stale = 0

    def begin(self, process: str, number: int) -> ProcessIncarnation:
        """Begin an incarnation: its greenlets end with it, or with the scheduler."""
        incarnation = ProcessIncarnation(process, number)
        self._strands[incarnation] = {}
        return incarnation

    def spawn(self, incarnation: ProcessIncarnation, act: Callable[[], object]) -> None:
        """Call `act` in a greenlet of `incarnation`, from this instant on."""
        self.check()
        if not incarnation.is_alive:
            raise UsageError(f"{incarnation} is dead. Restart the process first.")
        strand = Strand(self, incarnation, act)
        self._strands[incarnation][strand] = None
        self.push(self.now_s, strand.resume, incarnation)

    def sleep(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass for the greenlet that calls."""
        if not 0 <= seconds < math.inf:
            raise UsageError(
                f"sleep({seconds!r}) is not possible. Give finite seconds from 0 on."
            )
        strand = self.waiting_strand()
        self.push(self.now_s + seconds, strand.resume, strand.incarnation)
        self.wait()

    def waiting_strand(self) -> Strand:
        """Return the running strand, to be resumed by an event; then call `wait`."""
        self.check()
        if self.strand is None:
            raise UsageError(
                f"At {self.now_s:.6f} s something waits that is not in a greenlet. "
                "Spawn it in a process, or answer later by a callback."
            )
        return self.strand

    def wait(self) -> None:
        """Leave the greenlet that runs, until its `resume` is called by an event."""
        self._hub.switch()

    def check(self) -> None:
        """Raise `ProcessDead` if the caller's process has died. Ports call this first.

        Raises:
            UsageError: the caller is a thread or greenlet of another owner.
        """
        strand, incarnation = self.strand, self._incarnation
        if getcurrent() is not (self._hub if strand is None else strand.greenlet):
            raise UsageError(
                f"A port was used at {self.now_s:.6f} s by a thread or greenlet that "
                "the scheduler did not start. Spawn it in a process."
            )
        if incarnation is not None and not incarnation.is_alive:
            self._refuse(incarnation)

    def run(self, until_s: float = math.inf) -> None:
        """Run all events up to and including `until_s`, or until `stop`.

        An error that a process did not catch ends the run as `ProcessFailed`, which
        names process and time and has the error as its cause; `run` may be called
        again afterwards.
        """
        if self._is_running or getcurrent() is not self._hub:
            raise UsageError(
                "run() was called inside a run, or by another thread than the one "
                "that made the scheduler. Call it there, once at a time."
            )
        self._is_running, self._stops = True, False
        try:
            self._run(until_s)
        finally:
            self._is_running = False
        if not self._stops and self.now_s < until_s < math.inf:
            self.now_s = until_s

    def stop(self) -> None:
        """Return from `run` after the event that runs now."""
        self._stops = True

    def emit(self, subject: str, action: str, detail: str = "") -> None:
        """Pass an event to `trace`, if it is set."""
        if self.trace is not None:
            self.trace(TraceEvent(self.now_s, subject, action, detail))

    def thaw(self, incarnation: ProcessIncarnation) -> None:
        """Run the timers now that fell due while frozen, in that order."""
        timers, incarnation.deferred = incarnation.deferred, []
        for timer in timers:
            # Before all other events of this instant.
            self._first += 1
            heappush(self._queue, (self.now_s, self._first, timer))

    def end(self, incarnation: ProcessIncarnation) -> None:
        """End an incarnation: drop its events, unwind its greenlets without effect."""
        incarnation.end()
        self._dead.append(incarnation)
        if not self._is_running:
            self._unwind()

    def close(self) -> None:
        """End every incarnation and drop every event. Safe to repeat."""
        self._queue.clear()
        for incarnation in list(self._strands):
            self.end(incarnation)
        while self._idle:
            self._idle.pop().throw()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, until_s: float) -> None:
        queue, instant_from = self._queue, self.events
        while queue and not self._stops:
            when_s, _, timer = entry = heappop(queue)
            act, incarnation = timer.act, timer.incarnation
            if act is None:
                self._stale -= 1
                continue
            if when_s > until_s:
                heappush(queue, entry)
                break
            if incarnation is not None and not incarnation.runs:
                if incarnation.is_alive:
                    incarnation.deferred.append(timer)
                continue
            if when_s > self.now_s:
                self.now_s, instant_from = when_s, self.events
            elif self.events - instant_from > STALLED_EVENTS:
                self._complain_of_a_stall(incarnation)
            self.events += 1
            timer.act = None
            self._perform(act, incarnation)

    def _perform(
        self, act: Callable[[], object], incarnation: ProcessIncarnation | None
    ) -> None:
        self._incarnation = incarnation
        try:
            act()
        except BaseException as exc:
            self._surface(exc, incarnation)
        finally:
            self._incarnation = self.strand = None
        if self._dead:
            self._unwind()
        if self.after_event is not None:
            self.after_event()

    def _surface(
        self, exc: BaseException, incarnation: ProcessIncarnation | None
    ) -> None:
        if (
            isinstance(exc, ProcessDead)
            and incarnation is not None
            and not incarnation.is_alive
        ):
            return
        if incarnation is None or not isinstance(exc, Exception):
            raise exc
        raise ProcessFailed(
            f"{incarnation} failed at {self.now_s:.6f} s: {type(exc).__name__}: {exc}"
        ) from exc

    def spare_greenlet(self) -> greenlet:
        """Return a greenlet for a strand that begins."""
        return self._idle.pop() if self._idle else greenlet(self._work, self._hub)

    def _work(self) -> None:
        """Run one strand after the other; the first that raises ends the greenlet."""
        while True:
            strand = self.strand
            assert strand is not None
            try:
                strand.act()
            finally:
                strand.is_over = True
                idle, strand.greenlet = strand.greenlet, None
                self._strands.get(strand.incarnation, {}).pop(strand, None)
            self._idle.append(idle)
            self._hub.switch()

    def _unwind(self) -> None:
        """Unwind the greenlets of dead incarnations, whose calls have no effect."""
        while self._dead:
            incarnation = self._dead.pop()
            for strand in list(self._strands.pop(incarnation, {})):
                if strand.greenlet is not None:
                    self._kill(strand)

    def _kill(self, strand: Strand) -> None:
        self.strand, self._incarnation, self._refusals = strand, strand.incarnation, 0
        try:
            assert strand.greenlet is not None
            strand.greenlet.throw(ProcessDead(f"{strand.incarnation} is dead."))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a dead process has no caller that could handle it
            pass
        finally:
            self.strand = self._incarnation = None
        if not strand.is_over:
            raise ProcessFailed(
                f"{strand.incarnation} does not die at {self.now_s:.6f} s: a greenlet "
                f"has caught ProcessDead {_REFUSALS} times. Let BaseException pass."
            )

    def _refuse(self, incarnation: ProcessIncarnation) -> None:
        self._refusals += 1
        if self._refusals > _REFUSALS and self.strand is not None:
            self._hub.switch()
        raise ProcessDead(f"{incarnation} is dead: it can no longer have an effect.")

    def _complain_of_a_stall(self, incarnation: ProcessIncarnation | None) -> None:
        raise ProcessFailed(
            f"Time stands still at {self.now_s:.6f} s: {STALLED_EVENTS} events ran in "
            f"one instant, the last for {incarnation or 'the world'}. "
            "Something waits 0 seconds in a loop."
        )


T = TypeVar("T")


class GreenletFuture(Generic[T]):
    """Lets a greenlet wait where a thread's future blocks it. Implements `Future`.

    `on_result` is called with the value, before anything waiting resumes.
    """

    __slots__ = (
        "_error",
        "_is_done",
        "_on_result",
        "_scheduler",
        "_value",
        "_waiters",
    )

    def __init__(
        self, scheduler: Scheduler, on_result: Callable[[T], None] | None = None
    ) -> None:
        self._scheduler, self._on_result = scheduler, on_result
        self._is_done = False
        self._value: T
        self._error: BaseException | None = None
        self._waiters: list[tuple[Strand, Timer | None]] = []

    def set_result(self, value: T) -> None:
        """Set the value; waiting greenlets resume in this instant."""
        if self._on_result is not None:
            self._on_result(value)
        self._finish()
        self._value = value

    def set_exception(self, error: BaseException) -> None:
        """Set an error instead, which is raised in waiting greenlets."""
        self._finish()
        self._error = error

    def done(self) -> bool:
        return self._is_done

    def exception(self) -> BaseException | None:
        """Return the error, or None; waits for neither."""
        return self._error

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the value, and return it or raise the error.

        Raises:
            TimeoutError: `timeout_s` of virtual time have passed without a value.
        """
        if self._is_done:
            self._scheduler.check()
        else:
            self._wait(timeout_s)
        if self._error is not None:
            raise self._error
        return self._value

    def _wait(self, timeout_s: float | None) -> None:
        scheduler = self._scheduler
        strand = scheduler.waiting_strand()
        timer = None
        if timeout_s is not None:
            due_s = scheduler.now_s + timeout_s
            timer = scheduler.push(due_s, strand.resume, strand.incarnation)
        waiter = (strand, timer)
        self._waiters.append(waiter)
        scheduler.wait()
        if not self._is_done:
            self._waiters.remove(waiter)
            raise TimeoutError(f"No result within {timeout_s} s of virtual time.")

    def _finish(self) -> None:
        self._scheduler.check()
        if self._is_done:
            raise UsageError("This future has a result already. Check done() first.")
        self._is_done = True
        for strand, timer in self._waiters:
            if timer is not None:
                self._scheduler.cancel(timer)
            self._scheduler.push(
                self._scheduler.now_s, strand.resume, strand.incarnation
            )
        self._waiters.clear()


class TraceEvent(NamedTuple):
    """One line of a timeline."""

    at_s: float
    subject: str
    action: str
    detail: str = ""


def timeline(events: Iterable[TraceEvent]) -> Iterator[str]:
    """Yield one line of text for each event.

    >>> print(*timeline([TraceEvent(1.5, "i2", "crash", "incarnation 1")]))
         1.500000 s  i2            crash      incarnation 1
    """
    for at_s, subject, action, detail in events:
        yield f"{at_s:13.6f} s  {subject:12}  {action:10} {detail}".rstrip()
