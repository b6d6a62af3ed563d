"""A process that crashes, freezes and restarts; its clock, which drifts and jumps."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from atoll.errors import UsageError
from atoll.simulate.scheduler import ProcessDead, ProcessIncarnation, Scheduler, Timer


class SimProcess:
    """A named process with one incarnation after another.

    Greenlets, timers and listeners of an incarnation end with it, and have no effect
    afterwards.
    """

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self.name, self.scheduler = name, scheduler
        self.incarnation_number = 0
        """The number of the present or last incarnation; 0 before the first."""

        self.slowdowns: list[float] = []
        """Each multiplies the time that `work` takes."""

        self._incarnation: ProcessIncarnation | None = None
        self._program: Callable[[], object] | None = None
        self._on_crash: list[Callable[[], object]] = []

    @property
    def is_alive(self) -> bool:
        return self._incarnation is not None and self._incarnation.is_alive

    @property
    def incarnation(self) -> ProcessIncarnation:
        """The present incarnation; `UsageError` if the process is dead."""
        if self._incarnation is None or not self._incarnation.is_alive:
            raise UsageError(
                f"Process {self.name!r} is dead at {self.scheduler.now_s:.6f} s. "
                "Start it first."
            )
        return self._incarnation

    def start(self, program: Callable[[], object]) -> None:
        """Begin an incarnation, and run `program` in a greenlet.

        A program that returns does not end the incarnation: its timers, greenlets and
        listeners remain.
        """
        self.scheduler.check()
        if self.is_alive:
            raise UsageError(
                f"Process {self.name!r} cannot start: it is alive. Crash it first."
            )
        self._program = program
        self.incarnation_number += 1
        self._incarnation = self.scheduler.begin(self.name, self.incarnation_number)
        self._emit("start")
        self.scheduler.spawn(self._incarnation, program)

    def restart(self) -> None:
        """Begin the next incarnation, with the program of the last one."""
        if self._program is None:
            raise UsageError(
                f"Process {self.name!r} has no program yet. Call start() with one."
            )
        self.start(self._program)

    def spawn(self, act: Callable[[], object]) -> None:
        """Call `act` in another greenlet of this incarnation."""
        self.scheduler.spawn(self.incarnation, act)

    def after(self, delay_s: float, act: Callable[[], object]) -> Timer:
        """Call `act` in this incarnation, `delay_s` of true time from now."""
        return self.scheduler.at(
            self.scheduler.now_s + delay_s, act, incarnation=self.incarnation
        )

    def work(self, seconds: float) -> None:
        """Sleep for the time that `seconds` of work take: longer when slowed."""
        self.scheduler.sleep(seconds * math.prod(self.slowdowns))

    def on_crash(self, act: Callable[[], object]) -> None:
        """Call `act` at every crash, as the world: so a disk loses unsynced bytes."""
        self._on_crash.append(act)

    def crash(self) -> None:
        """End this incarnation immediately; does not return if it is the caller's own.

        Crashing a dead process changes nothing.
        """
        self.scheduler.check()
        incarnation = self._incarnation
        if incarnation is None or not incarnation.is_alive:
            return
        self._emit("crash")
        for act in self._on_crash:
            act()
        self.scheduler.end(incarnation)
        if self.scheduler.incarnation is incarnation:
            raise ProcessDead(f"{incarnation} crashed itself.")

    def freeze(self) -> ProcessIncarnation:
        """Stop this incarnation as SIGSTOP does, and return it: `thaw` resumes it.

        Its timers and messages are kept. Freezes add up: each needs its thaw.
        """
        self.scheduler.check()
        incarnation = self.incarnation
        incarnation.freezes += 1
        incarnation.runs = False
        self._emit("freeze")
        return incarnation

    def thaw(self, incarnation: ProcessIncarnation | None = None) -> None:
        """Undo one freeze; timers that fell due meanwhile run now, in that order.

        With the `incarnation` that `freeze` returned, a later one is left unchanged.
        """
        self.scheduler.check()
        if incarnation is not None and (
            incarnation is not self._incarnation or not incarnation.is_alive
        ):
            return
        incarnation = self.incarnation
        if not incarnation.freezes:
            raise UsageError(f"{incarnation} is not frozen: there is nothing to thaw.")
        incarnation.freezes -= 1
        if incarnation.freezes == 0:
            incarnation.runs = True
            self._emit("thaw")
            self.scheduler.thaw(incarnation)

    def _emit(self, action: str) -> None:
        self.scheduler.emit(self.name, action, f"incarnation {self.incarnation_number}")


class SimClock:
    """The clock of a process. Implements `atoll.runtime.Clock`: it never goes back.

    It shows `rate` seconds per true second, and outlasts crashes of its process.
    """

    def __init__(
        self, scheduler: Scheduler, *, rate: float = 1.0, origin_s: float = 0.0
    ) -> None:
        self._scheduler = scheduler
        self._rate = _checked(rate)
        self._true_s, self._shown_s = scheduler.now_s, origin_s
        self._behind_s = 0.0
        """Seconds of this clock for which it still stands still after a jump back."""

        self._alarms: list[
            tuple[float, int, ProcessIncarnation | None, Callable[[], object]]
        ] = []
        self._sequence = 0
        self._next: Timer | None = None

    @property
    def rate(self) -> float:
        return self._rate

    def now_s(self) -> float:
        passed_s = (self._scheduler.now_s - self._true_s) * self._rate
        ahead_s = passed_s - self._behind_s
        return self._shown_s + ahead_s if ahead_s > 0.0 else self._shown_s

    def set_rate(self, rate: float) -> None:
        """Show `rate` seconds per true second from now on."""
        self._settle()
        self._rate = _checked(rate)
        self._arm()

    def jump(self, by_s: float) -> None:
        """Jump ahead by `by_s`; below 0, stand still until that time has passed.

        Alarms that a jump ahead passes over run immediately.
        """
        self._settle()
        self._behind_s -= by_s
        if self._behind_s < 0.0:
            self._shown_s -= self._behind_s
            self._behind_s = 0.0
        self._arm()

    def at(
        self,
        when_s: float,
        act: Callable[[], object],
        *,
        incarnation: ProcessIncarnation | None = None,
    ) -> None:
        """Call `act` once this clock shows `when_s`, as `incarnation` or the world."""
        self._scheduler.check()
        if not -math.inf < when_s < math.inf:
            raise UsageError(f"when_s={when_s!r} is no time. Give finite seconds.")
        self._sequence += 1
        heappush(self._alarms, (when_s, self._sequence, incarnation, act))
        self._arm()

    def sleep(self, seconds: float) -> None:
        """Wait in a greenlet until this clock has moved on by `seconds`."""
        strand = self._scheduler.waiting_strand()
        self.at(self.now_s() + seconds, strand.resume, incarnation=strand.incarnation)
        self._scheduler.wait()

    def _settle(self) -> None:
        """Count from this instant, without changing the time shown."""
        passed_s = (self._scheduler.now_s - self._true_s) * self._rate
        self._shown_s += max(0.0, passed_s - self._behind_s)
        self._behind_s = max(0.0, self._behind_s - passed_s)
        self._true_s = self._scheduler.now_s

    def _arm(self) -> None:
        if self._next is not None:
            self._scheduler.cancel(self._next)
            self._next = None
        if self._alarms:
            to_go_s = self._alarms[0][0] - self._shown_s + self._behind_s
            due_s = self._true_s + to_go_s / self._rate
            self._next = self._scheduler.at(due_s, self._ring)

    def _ring(self) -> None:
        """Schedule every alarm that is due; its process may be frozen or dead."""
        self._next = None
        self._settle()
        # The division that gave this instant rounds: an alarm that reads the clock must
        # not see a time before its own, or it would wait for 0 seconds in a loop.
        self._shown_s = max(self._shown_s, self._alarms[0][0])
        while self._alarms and self._alarms[0][0] <= self._shown_s:
            _, _, incarnation, act = heappop(self._alarms)
            self._scheduler.at(self._scheduler.now_s, act, incarnation=incarnation)
        self._arm()


def _checked(rate: float) -> float:
    if not 0.0 < rate < math.inf:
        raise UsageError(
            f"rate={rate!r} must be finite and above 0: a clock shows that many "
            "seconds per true second. Choose 1.0 for a true one."
        )
    return rate
