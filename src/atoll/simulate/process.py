"""A process that crashes, freezes and comes back."""

from __future__ import annotations

import math
from collections.abc import Callable

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
