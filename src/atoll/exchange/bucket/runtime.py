"""The runtime port of a run in a bucket: time, threads and concurrent requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Protocol, TypeVar

from atoll.clock import Clock, SystemClock
from atoll.errors import Unreachable

T = TypeVar("T")

AT_ONCE = 8
"""Requests of one island that may be under way together."""


class Timing(Protocol):
    """What a bucket cannot do: wait, repeat, and do several things at once."""

    def now_s(self) -> float:
        """Return seconds that only ever grow."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            Unreachable: the island gives up, so that nothing may wait any more.
        """
        ...

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` again and again in the background, until the island has left."""
        ...

    def together(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """Call each, at once if that can be, and return what they returned.

        If some raise, the first of those is raised when all have ended.
        """
        ...


class ThreadTiming:
    """Real time and threads. Implements `Timing`; close it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._ended = threading.Event()
        self._crew = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="atoll-bucket")

    def now_s(self) -> float:
        return self._clock.now_s()

    def pause(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise Unreachable("The island has given up waiting for its bucket.")

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            while not self._ended.wait(seconds):
                act()

        threading.Thread(target=again, name="atoll-heartbeat", daemon=True).start()

    def together(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        if len(acts) == 1:
            return [acts[0]()]
        try:
            futures = [self._crew.submit(act) for act in acts]
            errors = [future.exception() for future in futures]
        except (RuntimeError, CancelledError) as exc:
            if not self._ended.is_set():
                raise
            raise Unreachable("The island has given up asking its bucket.") from exc
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def close_after(self, seconds: float) -> None:
        """Let nothing wait for longer than this from now on."""

        def give_up() -> None:
            if not self._ended.wait(seconds):
                self.close()

        threading.Thread(target=give_up, name="atoll-farewell", daemon=True).start()

    def close(self) -> None:
        """End what happens in the background. Safe to repeat."""
        self._ended.set()
        self._crew.shutdown(wait=False, cancel_futures=True)
