"""Virtual time: events in order, and greenlets that wait for them.

Rule 1: one thing runs at a time, and nothing here reads the machine's clock.
Rule 2: events of one instant run in the order in which they were made.
Rule 3: an event belongs to one incarnation of a process or to the world. Events of a
    dead incarnation are dropped; events of a frozen one wait for its thaw.
Rule 4: every port calls `check` first. Greenlets of a dead incarnation are unwound at
    once, so their `finally` blocks do run, and stop at the first port they touch.
Rule 5: randomness comes from named streams of one seed.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

from greenlet import (  # type: ignore[import-untyped]  # it ships no types
    getcurrent,
    greenlet,
)

from atoll.errors import UsageError


class ProcessDead(BaseException):
    """What runs belongs to a process that has died: it stops here, without effect.

    Not an `Exception`, so that a program's own recovery does not outlive it.
    """


class ProcessFailed(Exception):
    """A process raised something that its program did not catch."""


class Timer:
    """Something that will happen, unless it is cancelled or its life ends first."""

    __slots__ = ("act", "life")

    def __init__(
        self, act: Callable[[], object], life: ProcessIncarnation | None
    ) -> None:
        self.act: Callable[[], object] | None = act
        self.life = life


class ProcessIncarnation:
    """One incarnation of a process; its timers, messages and greenlets end with it."""

    __slots__ = ("deferred", "freezes", "is_alive", "number", "process", "runs")

    def __init__(self, process: str, number: int) -> None:
        self.process, self.number = process, number
        self.is_alive = True
        self.runs = True
        """Alive and not frozen: kept as one flag, since every event asks."""

        self.freezes = 0
        self.deferred: list[Timer] = []
        """What fell due while frozen, in that order."""

    def end(self) -> None:
        """Make everything this life owns inert."""
        self.is_alive = self.runs = False
        self.deferred.clear()

    def __str__(self) -> str:
        return f"process {self.process!r} (incarnation {self.number})"


STALLED_EVENTS = 200_000
"""So many events in one instant are a loop that waits for no time at all."""

_STALE_TIMERS = 1_000
_REFUSALS = 100
"""A program that catches its own death so often will do it for ever."""


class Strand:
    """One line of execution in a life."""

    __slots__ = ("_scheduler", "act", "greenlet", "is_over", "life")

    def __init__(
        self, scheduler: Scheduler, life: ProcessIncarnation, act: Callable[[], object]
    ) -> None:
        self._scheduler, self.life, self.act = scheduler, life, act
        self.greenlet: greenlet | None = None
        """What it runs in; None before it begins and when it is over."""

        self.is_over = False

    def resume(self) -> None:
        """Go on in its greenlet: the event of who waits. Nothing if it is over."""
        if self.is_over:
            return
        scheduler = self._scheduler
        scheduler.strand = self
        if self.greenlet is None:
            self.greenlet = scheduler.spare_greenlet()
        self.greenlet.switch()


class Scheduler:
    """Runs events and greenlets in virtual time, the same for the same seed.

    Close it, or use it as a context manager: a greenlet that waits is not collected
    with what refers to it, so that an open scheduler stays in memory for good.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.events = 0
        """How many events have run; a dropped or cancelled one is none."""

        self.trace: Callable[[TraceEvent], None] | None = None
        """Called with everything that happens; a list's `append` will do."""

        self.after_event: Callable[[], None] | None = None
        """Called by the world after every event; what it raises ends the run."""

        self._queue: list[tuple[float, int, Timer]] = []
        self._sequence = self._stale = self._refusals = 0
        self._first = -(2**62)
        self._streams: dict[str, random.Random] = {}
        self._hub = getcurrent()
        self.strand: Strand | None = None
        """The strand that runs now; None is no greenlet of ours."""

        self._life: ProcessIncarnation | None = None
        self._strands: dict[ProcessIncarnation, dict[Strand, None]] = {}
        self._idle: list[greenlet] = []
        """Whose strands are over: a greenlet costs as much to make as ten to resume."""

        self._graves: list[ProcessIncarnation] = []
        self._is_running = self._stops = False

    @property
    def life(self) -> ProcessIncarnation | None:
        """The life that runs now; None is the world."""
        return self._life

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
        life: ProcessIncarnation | None = None,
    ) -> Timer:
        """Call `act` at `when_s`, or now if that has passed, as `life` or the world."""
        self.check()
        if not when_s < math.inf:
            raise UsageError(
                f"when_s={when_s!r} is not an instant of virtual time. "
                "Give finite seconds."
            )
        return self.push(when_s, act, life)

    def push(
        self, when_s: float, act: Callable[[], object], life: ProcessIncarnation | None
    ) -> Timer:
        """Do what `at` does, for a port that has checked already."""
        timer = Timer(act, life)
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
            self._queue[:] = [each for each in self._queue if each[2].act is not None]
            heapify(self._queue)
            self._stale = 0

    def begin(self, process: str, number: int) -> ProcessIncarnation:
        """Begin a life: what is spawned in it ends with it, or with the scheduler."""
        life = ProcessIncarnation(process, number)
        self._strands[life] = {}
        return life

    def spawn(self, life: ProcessIncarnation, act: Callable[[], object]) -> None:
        """Call `act` in a greenlet of `life`, from this instant on."""
        self.check()
        if not life.is_alive:
            raise UsageError(f"{life} is dead. Restart the process first.")
        strand = Strand(self, life, act)
        self._strands[life][strand] = None
        self.push(self.now_s, strand.resume, life)

    def sleep(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass for the greenlet that calls."""
        if not 0 <= seconds < math.inf:
            raise UsageError(
                f"sleep({seconds!r}) is not possible. Give finite seconds from 0 on."
            )
        strand = self.waiting_strand()
        self.push(self.now_s + seconds, strand.resume, strand.life)
        self.wait()

    def waiting_strand(self) -> Strand:
        """Return the greenlet that runs, for who will resume it; then call `wait`."""
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
        """Raise `ProcessDead` if what runs now has died. Every port calls this first.

        Raises:
            UsageError: what runs is a thread or greenlet of somebody else.
        """
        strand, life = self.strand, self._life
        if getcurrent() is not (self._hub if strand is None else strand.greenlet):
            raise UsageError(
                f"A port was used at {self.now_s:.6f} s by a thread or greenlet that "
                "the scheduler did not start. Spawn it in a process."
            )
        if life is not None and not life.is_alive:
            self._refuse(life)

    def run(self, until_s: float = math.inf) -> None:
        """Let everything happen up to and including `until_s`, or until `stop`.

        What a process did not catch ends the run as `ProcessFailed`, naming process
        and time, with the error as its cause; the scheduler can go on afterwards.
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

    def tell(self, who: str, what: str, about: str = "") -> None:
        """Add a line to the timeline, if anyone keeps one."""
        if self.trace is not None:
            self.trace(TraceEvent(self.now_s, who, what, about))

    def thaw(self, life: ProcessIncarnation) -> None:
        """Let what fell due while `life` was frozen happen now, in that order."""
        timers, life.deferred = life.deferred, []
        for timer in timers:
            # Before anything that falls due in this very instant.
            self._first += 1
            heappush(self._queue, (self.now_s, self._first, timer))

    def end(self, life: ProcessIncarnation) -> None:
        """End a life: drop its events, unwind its greenlets without effect."""
        life.end()
        self._graves.append(life)
        if not self._is_running:
            self._unwind()

    def close(self) -> None:
        """End every life and forget every event. Safe to repeat."""
        self._queue.clear()
        for life in list(self._strands):
            self.end(life)
        while self._idle:
            self._idle.pop().throw()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, until_s: float) -> None:
        queue, instant_from = self._queue, self.events
        while queue and not self._stops:
            when_s, _, timer = entry = heappop(queue)
            act, life = timer.act, timer.life
            if act is None:
                self._stale -= 1
                continue
            if when_s > until_s:
                heappush(queue, entry)
                break
            if life is not None and not life.runs:
                if life.is_alive:
                    life.deferred.append(timer)
                continue
            if when_s > self.now_s:
                self.now_s, instant_from = when_s, self.events
            elif self.events - instant_from > STALLED_EVENTS:
                self._complain_of_a_stall(life)
            self.events += 1
            timer.act = None
            self._perform(act, life)

    def _perform(
        self, act: Callable[[], object], life: ProcessIncarnation | None
    ) -> None:
        self._life = life
        try:
            act()
        except BaseException as exc:
            self._surface(exc, life)
        finally:
            self._life = self.strand = None
        if self._graves:
            self._unwind()
        if self.after_event is not None:
            self.after_event()

    def _surface(self, exc: BaseException, life: ProcessIncarnation | None) -> None:
        if isinstance(exc, ProcessDead) and life is not None and not life.is_alive:
            return
        if life is None or not isinstance(exc, Exception):
            raise exc
        raise ProcessFailed(
            f"{life} failed at {self.now_s:.6f} s: {type(exc).__name__}: {exc}"
        ) from exc

    def spare_greenlet(self) -> greenlet:
        """Return a greenlet for a strand that begins."""
        return self._idle.pop() if self._idle else greenlet(self._work, self._hub)

    def _work(self) -> None:
        """Live one strand after the other; the first that raises ends the greenlet."""
        while True:
            strand = self.strand
            assert strand is not None
            try:
                strand.act()
            finally:
                strand.is_over = True
                own, strand.greenlet = strand.greenlet, None
                self._strands.get(strand.life, {}).pop(strand, None)
            self._idle.append(own)
            self._hub.switch()

    def _unwind(self) -> None:
        """Unwind the greenlets of dead lives; whatever they still do has no effect."""
        while self._graves:
            life = self._graves.pop()
            for strand in list(self._strands.pop(life, {})):
                if strand.greenlet is not None:
                    self._kill(strand)

    def _kill(self, strand: Strand) -> None:
        self.strand, self._life, self._refusals = strand, strand.life, 0
        try:
            assert strand.greenlet is not None
            strand.greenlet.throw(ProcessDead(f"{strand.life} is dead."))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the last words of a dead process reach nobody
            pass
        finally:
            self.strand = self._life = None
        if not strand.is_over:
            raise ProcessFailed(
                f"{strand.life} does not die at {self.now_s:.6f} s: a greenlet has "
                f"caught ProcessDead {_REFUSALS} times. Let BaseException pass."
            )

    def _refuse(self, life: ProcessIncarnation) -> None:
        self._refusals += 1
        if self._refusals > _REFUSALS and self.strand is not None:
            self._hub.switch()
        raise ProcessDead(f"{life} is dead: it can have no effect any more.")

    def _complain_of_a_stall(self, life: ProcessIncarnation | None) -> None:
        raise ProcessFailed(
            f"Time stands still at {self.now_s:.6f} s: {STALLED_EVENTS} events ran in "
            f"one instant, the last for {life or 'the world'}. "
            "Something waits 0 seconds in a loop."
        )


T = TypeVar("T")


class GreenletFuture(Generic[T]):
    """Lets a greenlet wait where a `concurrent.futures.Future` blocks a thread."""

    __slots__ = ("_error", "_is_done", "_scheduler", "_value", "_waiters")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_done = False
        self._value: T
        self._error: BaseException | None = None
        self._waiters: list[tuple[Strand, Timer | None]] = []

    def set(self, value: T) -> None:
        """Give the value; who waits goes on in this instant."""
        self._finish()
        self._value = value

    def set_error(self, error: BaseException) -> None:
        """Give an error instead; who waits gets it raised."""
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
            TimeoutError: `timeout_s` of virtual time have passed without.
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
            timer = scheduler.push(due_s, strand.resume, strand.life)
        waiter = (strand, timer)
        self._waiters.append(waiter)
        scheduler.wait()
        if not self._is_done:
            self._waiters.remove(waiter)
            raise TimeoutError(f"Nothing came within {timeout_s} s of virtual time.")

    def _finish(self) -> None:
        self._scheduler.check()
        if self._is_done:
            raise UsageError("This promise is kept already. Ask done() first.")
        self._is_done = True
        for strand, timer in self._waiters:
            if timer is not None:
                self._scheduler.cancel(timer)
            self._scheduler.push(self._scheduler.now_s, strand.resume, strand.life)
        self._waiters.clear()


class TraceEvent(NamedTuple):
    """One line of a timeline."""

    at_s: float
    who: str
    what: str
    about: str = ""


def timeline(happenings: Iterable[TraceEvent]) -> Iterator[str]:
    """Yield one line of text for each happening.

    >>> print(*timeline([TraceEvent(1.5, "i2", "crash", "incarnation 1")]))
         1.500000 s  i2            crash      incarnation 1
    """
    for at_s, who, what, about in happenings:
        yield f"{at_s:13.6f} s  {who:12}  {what:10} {about}".rstrip()
