"""A promise of a response: whoever waits for it holds no thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from atoll.http.response import Response


class Later:
    """Given back by a handler that cannot answer yet.

    Exactly one answer is sent: the first that is set, or after `wait_s` what `default`
    makes. A request whose sender has gone gets none.
    """

    def __init__(self, *, wait_s: float, default: Callable[[], Response]) -> None:
        self.wait_s = wait_s
        self.default = default
        self._lock = threading.Lock()
        self._response: Response | None = None
        self._is_settled = False
        self._is_gone = False
        self._deliver: Callable[[Response], None] | None = None
        self._mourners: list[Callable[[], None]] = []

    @property
    def is_gone(self) -> bool:
        """Whether who asked has closed the connection meanwhile."""
        return self._is_gone

    def set(self, response: Response) -> bool:
        """Answer, from any thread; False if it is too late for this answer."""
        with self._lock:
            if self._is_settled:
                return False
            self._is_settled = True
            self._response = response
            deliver = self._deliver
        if deliver is not None:
            deliver(response)
        return True

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back once if who asked goes before the answer."""
        with self._lock:
            if not self._is_gone:
                self._mourners.append(callback)
                return
        callback()

    # What follows is for the listener.

    def attach(self, deliver: Callable[[Response], None]) -> None:
        """Have `deliver` called with the answer: now, if it is there already."""
        with self._lock:
            self._deliver = deliver
            response = self._response
        if response is not None:
            deliver(response)

    def expire(self) -> bool:
        """Settle it without an answer; False if one is on its way."""
        with self._lock:
            was_settled, self._is_settled = self._is_settled, True
        return not was_settled

    def lose(self) -> list[Callable[[], None]]:
        """Take note that who asked has gone; return who wants to know."""
        with self._lock:
            self._is_gone = self._is_settled = True
            mourners, self._mourners = self._mourners, []
        return mourners
