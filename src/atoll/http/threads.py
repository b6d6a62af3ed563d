"""A fixed number of threads that run what they are given, in the order it came.

What is urgent goes before all that is not, but for one in so many: whoever sends many
urgent things must not keep all others out for ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Action = Callable[[], None]

SHARE = 4
"""One in so many that are taken is the first of the others."""


class Threads:
    """Daemons: none of them keeps a process from ending."""

    def __init__(
        self, name: str, count: int, *, on_error: Callable[[Exception], None]
    ) -> None:
        self._on_error = on_error
        self._taken = 0
        self._urgent: deque[Action | None] = deque()
        self._usual: deque[Action | None] = deque()
        self._given: queue.SimpleQueue[None] = queue.SimpleQueue()
        """As many as there are in both together: who has taken one finds an action."""

        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, action: Action, *, is_urgent: bool = False) -> None:
        """Run `action` when a thread is free. Does not wait."""
        (self._urgent if is_urgent else self._usual).append(action)
        self._given.put(None)

    def end(self) -> None:
        """Have every thread end after what was submitted."""
        for _ in self._threads:
            self._usual.append(None)
            self._given.put(None)

    def join(self, until_s: float) -> None:
        """Wait for the threads, at most until `until_s` of `time.monotonic`."""
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception as exc:  # one request must not end the thread of others
                self._on_error(exc)
            del action  # or the last request is kept until the next

    def _next(self) -> Action | None:
        self._given.get()
        self._taken += 1  # about: threads that meet here may count as one
        queues = [self._urgent, self._usual]
        if self._taken % SHARE == 0:
            queues.reverse()
        while True:  # what one queue had a moment ago, another thread may have taken
            for each in queues:
                with suppress(IndexError):
                    return each.popleft()
