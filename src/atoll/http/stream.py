"""A body without an end in sight: events, pushed by any thread, sent by the lot's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

BUFFERED_BYTES: Final = 2**20


class Stream:
    """Feeds one response. A reader that falls `max_buffered_bytes` behind is dropped.

    No thread waits for it: what is pushed is buffered and sent when the other side
    takes it.
    """

    def __init__(self, *, max_buffered_bytes: int = BUFFERED_BYTES) -> None:
        self._max_buffered_bytes = max_buffered_bytes
        self._lock = threading.Lock()
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._is_closed = False
        self._is_gone = False
        self._is_told = False
        self._tell: Callable[[], None] | None = None
        self._mourners: list[Callable[[], None]] = []

    @property
    def is_gone(self) -> bool:
        """Whether nobody reads any more."""
        return self._is_gone

    def push(self, data: bytes) -> bool:
        """Send `data` when the reader takes it; False when there is no reader left."""
        with self._lock:
            if self._is_gone or self._is_closed:
                return False
            self._parts.append(data)
            self._size += len(data)
            is_kept = self._size <= self._max_buffered_bytes
            if not is_kept:
                self._is_gone = True
        self._told()
        return is_kept

    def close(self) -> None:
        """End the body after what was pushed."""
        with self._lock:
            self._is_closed = True
        self._told()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back once when the reader has gone, was dropped, or had everything."""
        with self._lock:
            if not self._is_gone:
                self._mourners.append(callback)
                return
        callback()

    # What follows is for the listener.

    def attach(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when there is something to take."""
        with self._lock:
            self._tell = tell
        tell()

    def take(self) -> tuple[bytes, bool]:
        """Return what was pushed since, and whether that was all."""
        with self._lock:
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            self._is_told = False
            return data, self._is_closed

    def lose(self) -> list[Callable[[], None]]:
        """Take note that nobody reads any more; return who wants to know."""
        with self._lock:
            self._is_gone = True
            mourners, self._mourners = self._mourners, []
            self._parts.clear()
        return mourners

    def _told(self) -> None:
        with self._lock:
            tell = None if self._is_told else self._tell
            self._is_told = self._tell is not None
        if tell is not None:
            tell()
