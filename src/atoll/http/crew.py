"""The threads of a listener: a fixed number, whatever the number of connections.

small   handlers of small requests, and their answers
in      bulk bodies that are read, each with its handler
out     bulk bodies that are sent
tell    callbacks about who has gone: one thread, so that none of them waits for us
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.clock import Clock
from atoll.http.channel import Channel
from atoll.http.lanes import Lanes
from atoll.http.limits import Limits
from atoll.http.lot import Lot
from atoll.http.threads import Threads


class Crew:
    """Every thread but the lot's."""

    def __init__(
        self,
        *,
        lot: Lot,
        limits: Limits,
        clock: Clock,
        on_error: Callable[[Exception], None],
        on_cut: Callable[[Channel], None],
    ) -> None:
        self.small = Threads("http-small", limits.small_threads, on_error=on_error)
        self.tell = Threads("http-tell", 1, on_error=on_error)
        self._in = Threads("http-in", limits.bulk_lanes, on_error=on_error)
        self._out = Threads("http-out", limits.bulk_lanes, on_error=on_error)
        lanes = partial(Lanes, lot=lot, limits=limits, clock=clock, on_cut=on_cut)
        self.lanes_in = lanes(
            threads=self._in,
            max_bytes=limits.max_body_bytes_in_flight,
            is_sending=False,
        )
        # What is sent is in memory or in a file already: its bytes need no bound.
        self.lanes_out = lanes(threads=self._out, max_bytes=None, is_sending=True)

    def start(self) -> None:
        for threads in self._all():
            threads.start()

    def close(self, until_s: float) -> None:
        """End every thread that is not stuck, by `until_s` of `time.monotonic`."""
        for threads in self._all():
            threads.end()
        for threads in self._all():
            threads.join(until_s)

    def _all(self) -> list[Threads]:
        return [self.small, self.tell, self._in, self._out]
