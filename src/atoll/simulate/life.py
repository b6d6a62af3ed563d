"""One incarnation of a process, and what ends with it."""

from __future__ import annotations

from collections.abc import Callable


class ProcessDead(BaseException):
    """What runs belongs to a process that has died: it stops here, without effect.

    Not an `Exception`, so that a program's own recovery does not outlive it.
    """


class ProcessFailed(Exception):
    """A process raised something that its program did not catch."""


class Timer:
    """Something that will happen, unless it is cancelled or its life ends first."""

    __slots__ = ("act", "life")

    def __init__(self, act: Callable[[], object], life: Life | None) -> None:
        self.act: Callable[[], object] | None = act
        self.life = life


class Life:
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
