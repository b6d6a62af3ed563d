"""A fixed number of threads that run what they are given, in the order it came."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Threads:
    """Daemons: none of them keeps a process from ending."""

    def __init__(
        self, name: str, count: int, *, on_error: Callable[[Exception], None]
    ) -> None:
        self._on_error = on_error
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, action: Callable[[], None]) -> None:
        """Run `action` when a thread is free. Does not wait."""
        self._waiting.put(action)

    def end(self) -> None:
        """Have every thread end after what was submitted."""
        for _ in self._threads:
            self._waiting.put(None)

    def join(self, until_s: float) -> None:
        """Wait for the threads, at most until `until_s` of `time.monotonic`."""
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (action := self._waiting.get()) is not None:
            try:
                action()
            except Exception as exc:  # one request must not end the thread of others
                self._on_error(exc)
            del action  # or the last request is kept until the next
