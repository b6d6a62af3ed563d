"""The runtime port of a run in a bucket: time, threads and concurrent requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Protocol, TypeVar

from atoll.clock import Clock, SystemClock
from atoll.errors import Unreachable

T = TypeVar("T")

MAX_REQUESTS = 8
"""Most requests of one island that are in flight at the same time."""


class Timing(Protocol):
    """Waits, periodic calls and concurrent calls, for a run in a bucket."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait.

        Raises:
            Unreachable: the island gives up, and no thread may wait any longer.
        """
        ...

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` periodically in the background, until the island has left."""
        ...

    def together(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """Call all, concurrently if possible, and return their results in order.

        If some raise, the first of those errors is raised when all have ended.
        """
        ...


class ThreadTiming:
    """Real time and threads. Implements `Timing`; close it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="atoll-bucket")

    def now_s(self) -> float:
        return self._clock.now_s()

    def pause(self, seconds: float) -> None:
        if self._ended.wait(seconds):
            raise Unreachable("The island has given up waiting for its bucket.")

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        def repeat() -> None:
            while not self._ended.wait(seconds):
                act()

        threading.Thread(target=repeat, name="atoll-heartbeat", daemon=True).start()

    def together(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        if len(acts) == 1:
            return [acts[0]()]
        try:
            futures = [self._pool.submit(act) for act in acts]
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
        """Give up every wait that is longer than this from now on."""

        def give_up() -> None:
            if not self._ended.wait(seconds):
                self.close()

        threading.Thread(target=give_up, name="atoll-farewell", daemon=True).start()

    def close(self) -> None:
        """End all background threads. Safe to repeat."""
        self._ended.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
