"""Bulk bodies travel in lanes: few at once, so that small requests are never starved.

Who finds no lane, or too many bytes in flight, waits in the lot: nothing of it is read,
and that is the back-pressure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from atoll.http.channel import Channel
from atoll.http.lot import Lot, Watch
from atoll.http.threads import Threads


class Lanes:
    """Runs bulk transfers, each on its own thread, in the order they came.

    Its state belongs to the lot's thread.
    """

    def __init__(
        self, *, lot: Lot, threads: Threads, count: int, max_bytes: int | None
    ) -> None:
        self._lot = lot
        self._threads = threads
        self._count = count
        self._max_bytes = max_bytes
        self._waiting: deque[Queued] = deque()
        self._active = 0
        self._bytes = 0

    @property
    def active(self) -> int:
        return self._active

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, queued: Queued) -> None:
        """Run it when there is a lane. From any thread."""
        self._lot.call(partial(self._arrive, queued))

    def leave_queue(self, queued: Queued) -> None:
        """Forget one that waited too long. On the lot's thread."""
        self._waiting.remove(queued)
        self._admit()

    def _arrive(self, queued: Queued) -> None:
        self._lot.add(queued)
        self._waiting.append(queued)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0].size_bytes):
            queued = self._waiting.popleft()
            self._lot.take(queued)
            self._active += 1
            self._bytes += queued.size_bytes
            self._threads.submit(partial(self._run, queued))

    def _has_room(self, size_bytes: int) -> bool:
        # One that is larger than the bound alone would otherwise wait for ever.
        if self._active == self._count:
            return False
        if self._max_bytes is None or self._bytes == 0:
            return True
        return self._bytes + size_bytes <= self._max_bytes

    def _run(self, queued: Queued) -> None:
        try:
            queued.run()
        finally:
            self._lot.call(partial(self._leave, queued.size_bytes))

    def _leave(self, size_bytes: int) -> None:
        self._active -= 1
        self._bytes -= size_bytes
        self._admit()


class Queued(Watch):
    """A connection that waits for its lane, unread."""

    def __init__(
        self,
        channel: Channel,
        *,
        until_s: float,
        size_bytes: int,
        run: Callable[[], None],
        refuse: Callable[[], None],
        lanes: Lanes,
        lot: Lot,
    ) -> None:
        super().__init__(channel, until_s=until_s, events=0)
        self.size_bytes = size_bytes
        self.run = run
        self._refuse = refuse
        self._lanes = lanes
        self._lot = lot

    def begin(self) -> None:
        """Look at nothing: the body stays where it is."""

    def ready(self, events: int) -> None:
        """React to nothing: no event was asked for."""

    def due(self) -> None:
        if self._lot.take(self):
            self._lanes.leave_queue(self)
            self._refuse()
