"""Who is at the other end of how many connections.

The last one that closes is a hint that an island is gone. Only a hint: a line may break
and come back, and an island whose lease runs is waited for a little.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Protocol

Who = tuple[str, int]
"""An island, and which of its lives."""


class Tagged(Protocol):
    """A connection, on which a name can be written."""

    tag: object


class Connections:
    """Counts the connections of each life of an island. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Who] = Counter()

    def heard(self, connection: Tagged, who: Who) -> None:
        """Remember who has spoken on a connection; before it may have been another."""
        with self._lock:
            before = connection.tag
            if before == who:
                return
            connection.tag = who
            self._counts[who] += 1
            if isinstance(before, tuple):
                self._end(before)

    def closed(self, who: Who) -> bool:
        """Forget one connection, and return whether it was the last."""
        with self._lock:
            return self._end(who)

    def _end(self, who: Who) -> bool:
        self._counts[who] -= 1
        is_last = self._counts[who] <= 0
        if is_last:
            del self._counts[who]
        return is_last
