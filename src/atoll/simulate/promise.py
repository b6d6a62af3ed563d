"""A value that is not there yet, and greenlets that wait for it."""

from __future__ import annotations

from typing import Generic, TypeVar

from atoll.errors import UsageError
from atoll.simulate.life import Timer
from atoll.simulate.scheduler import Scheduler, Strand

T = TypeVar("T")


class Promise(Generic[T]):
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
