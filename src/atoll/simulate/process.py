"""A process that crashes, freezes and restarts; its clock, which drifts and jumps."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from atoll.errors import UsageError
from atoll.simulate.scheduler import (
    ProcessDead,
    ProcessIncarnation,
    Scheduler,
    Timer,
)


class SimProcess:
    """A name that lives one life after another.

    What a life owns (greenlets, timers, what it listens to) ends with it; nothing of
    it has any effect afterwards.
    """

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self.name, self.scheduler = name, scheduler
        self.incarnation = 0
        """The number of the present or last life; 0 before the first."""

        self.slowdowns: list[float] = []
        """Each multiplies the time that `work` takes."""

        self._life: ProcessIncarnation | None = None
        self._program: Callable[[], object] | None = None
        self._on_crash: list[Callable[[], object]] = []

    @property
    def is_alive(self) -> bool:
        return self._life is not None and self._life.is_alive

    @property
    def is_frozen(self) -> bool:
        return self.is_alive and not self.life.runs

    @property
    def life(self) -> ProcessIncarnation:
        """The present life; `UsageError` if the process is dead."""
        if self._life is None or not self._life.is_alive:
            raise UsageError(
                f"Process {self.name!r} is dead at {self.scheduler.now_s:.6f} s. "
                "Start it first."
            )
        return self._life

    def start(self, program: Callable[[], object]) -> None:
        """Begin a life, with `program` in a greenlet of its own.

        A program that returns does not end the life: it may have left timers,
        greenlets or something that listens.
        """
        self.scheduler.check()
        if self.is_alive:
            raise UsageError(
                f"Process {self.name!r} cannot start: it is alive. Crash it first."
            )
        self._program = program
        self.incarnation += 1
        self._life = self.scheduler.begin(self.name, self.incarnation)
        self._tell("start")
        self.scheduler.spawn(self._life, program)

    def restart(self) -> None:
        """Begin the next life, with the program of the last one."""
        if self._program is None:
            raise UsageError(
                f"Process {self.name!r} has no program yet. Call start() with one."
            )
        self.start(self._program)

    def spawn(self, act: Callable[[], object]) -> None:
        """Call `act` in another greenlet of this life."""
        self.scheduler.spawn(self.life, act)

    def after(self, delay_s: float, act: Callable[[], object]) -> Timer:
        """Call `act` in this life, `delay_s` of true time from now."""
        return self.scheduler.at(self.scheduler.now_s + delay_s, act, life=self.life)

    def work(self, seconds: float) -> None:
        """Let the time pass that `seconds` of work take here: longer when slowed."""
        self.scheduler.sleep(seconds * math.prod(self.slowdowns))

    def on_crash(self, act: Callable[[], object]) -> None:
        """Call `act` at every crash, as the world: a disk loses what it must lose."""
        self._on_crash.append(act)

    def crash(self) -> None:
        """End this life at once. A process that crashes itself does not return.

        Crashing a dead process changes nothing.
        """
        self.scheduler.check()
        life = self._life
        if life is None or not life.is_alive:
            return
        self._tell("crash")
        for act in self._on_crash:
            act()
        self.scheduler.end(life)
        if self.scheduler.life is life:
            raise ProcessDead(f"{life} crashed itself.")

    def freeze(self) -> ProcessIncarnation:
        """Stop this life as SIGSTOP does, and return it: `thaw` ends it.

        Its timers and messages are kept. Freezes add up: each needs its thaw.
        """
        self.scheduler.check()
        life = self.life
        life.freezes += 1
        life.runs = False
        self._tell("freeze")
        return life

    def thaw(self, life: ProcessIncarnation | None = None) -> None:
        """Undo one freeze; what fell due meanwhile happens now, in that order.

        With the `life` that `freeze` returned, a later life is left alone.
        """
        self.scheduler.check()
        if life is not None and (life is not self._life or not life.is_alive):
            return
        life = self.life
        if not life.freezes:
            raise UsageError(f"{life} is not frozen: there is nothing to thaw.")
        life.freezes -= 1
        if life.freezes == 0:
            life.runs = True
            self._tell("thaw")
            self.scheduler.thaw(life)

    def _tell(self, what: str) -> None:
        self.scheduler.tell(self.name, what, f"incarnation {self.incarnation}")


class SimClock:
    """A process's own clock. Implements `atoll.clock.Clock`: it never goes back.

    It shows `rate` seconds per true second, and outlives its process's crashes.
    """

    def __init__(
        self, scheduler: Scheduler, *, rate: float = 1.0, origin_s: float = 0.0
    ) -> None:
        self._scheduler = scheduler
        self._rate = _checked(rate)
        self._true_s, self._shown_s = scheduler.now_s, origin_s
        self._behind_s = 0.0
        """How long it still stands still after a jump back, on its own scale."""

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
        """Let `rate` seconds pass here per true second, from now on."""
        self._settle()
        self._rate = _checked(rate)
        self._arm()

    def jump(self, by_s: float) -> None:
        """Jump ahead by `by_s`; back is to stand still until that much has passed.

        Alarms that a jump ahead passes over ring at once.
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
        life: ProcessIncarnation | None = None,
    ) -> None:
        """Call `act` once this clock shows `when_s`, as `life` or the world."""
        self._scheduler.check()
        if not -math.inf < when_s < math.inf:
            raise UsageError(f"when_s={when_s!r} is no time. Give finite seconds.")
        self._sequence += 1
        heappush(self._alarms, (when_s, self._sequence, life, act))
        self._arm()

    def sleep(self, seconds: float) -> None:
        """Wait in a greenlet until this clock has moved on by `seconds`."""
        strand = self._scheduler.waiting_strand()
        self.at(self.now_s() + seconds, strand.resume, life=strand.life)
        self._scheduler.wait()

    def _settle(self) -> None:
        """Begin to count anew from this instant, without changing what is shown."""
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
        """Hand over every alarm that is due; its life may be frozen or dead by now."""
        self._next = None
        self._settle()
        # The division that found this instant rounds: who asks the clock in an alarm
        # must not read a moment before it, or would wait for no time in a loop.
        self._shown_s = max(self._shown_s, self._alarms[0][0])
        while self._alarms and self._alarms[0][0] <= self._shown_s:
            _, _, life, act = heappop(self._alarms)
            self._scheduler.at(self._scheduler.now_s, act, life=life)
        self._arm()


def _checked(rate: float) -> float:
    if not 0.0 < rate < math.inf:
        raise UsageError(
            f"rate={rate!r} must be finite and above 0: a clock shows that many "
            "seconds per true second. Choose 1.0 for a true one."
        )
    return rate
