"""A clock that drifts and jumps, and alarms that ring by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from atoll.errors import UsageError
from atoll.simulate.scheduler import (
    ProcessIncarnation,
    Scheduler,
    Timer,
)


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
