"""Clients by the URL of a run, and statuses that are read again and again."""

from __future__ import annotations

from contextlib import closing

from atoll.errors import AtollError
from atoll.island.connection import is_coordinator
from atoll.run_client.base import RunClient, RunStatus
from atoll.runtime import SystemClock
from atoll.security import parse_run_url


def open_run(url: str) -> RunClient:
    """Return the client of a run, by the URL of its coordinator or its store.

    The imports are local because each loads libraries that the other does not need.

    Raises:
        UsageError: the URL of a coordinator is malformed.
    """
    if is_coordinator(url):
        from atoll.run_client.coordinator import CoordinatorRunClient

        return CoordinatorRunClient(parse_run_url(url))
    from atoll.run_client.store import StoreRunClient

    return StoreRunClient(url)


def try_status(url: str) -> RunStatus | None:
    """Return the status of a run, or None if it cannot be read now."""
    with closing(StatusPoll(url)) as poll:
        return poll.status()


class StatusPoll:
    """Reads the status of one run repeatedly, at a bounded rate. Close it."""

    def __init__(self, url: str) -> None:
        self._url, self._run = url, open_run(url)
        self._every_s = 0.0 if is_coordinator(url) else self._run.poll_s
        self._clock = SystemClock()
        self._next_s = 0.0
        self.newest: RunStatus | None = None
        """The last status that could be read."""

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        self._run.close()

    def status(self, *, at_once: bool = False) -> RunStatus | None:
        """Return the newest status, read again if the interval has passed."""
        if at_once or self._clock.now_s() >= self._next_s:
            try:
                self.newest = self._run.status()
            except AtollError:
                # The next read connects again: the run may be served again.
                self._run.close()
                self._run = open_run(self._url)
            self._next_s = self._clock.now_s() + self._every_s
        return self.newest
