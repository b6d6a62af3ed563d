"""Who is at the other end of which connections.

The last one that the other side closes is a hint that an island is gone. Only a hint: a
line may break and come back, and an island whose lease runs is waited for a little. Of
those that we close ourselves, because they were idle, nobody is told.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Protocol

MAX_PER_LIFE = 64
"""Connections of one life of an island; beyond it the oldest is ended.

An island keeps four, and opens a few more while it moves fragments.
"""

Who = tuple[str, int]
"""An island, and which of its lives."""


class Tagged(Protocol):
    """A connection, on which a name can be written."""

    tag: object
    is_open: bool

    def abort(self) -> None:
        """End it, from any thread."""


class Connections:
    """Knows the connections of each life of an island. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Who, list[Tagged]] = defaultdict(list)

    def heard(self, connection: Tagged, who: Who) -> None:
        """Remember who has spoken on a connection; before it may have been another."""
        with self._lock:
            if connection.tag == who:
                return
            connection.tag = who
            self._prune(who)
            self._known[who].append(connection)
            while len(self._known[who]) > MAX_PER_LIFE:
                self._known[who].pop(0).abort()

    def closed(self, who: Who) -> bool:
        """Return whether none of them is left open."""
        with self._lock:
            self._prune(who)
            is_last = not self._known[who]
            if is_last:
                del self._known[who]
            return is_last

    def _prune(self, who: Who) -> None:
        known = self._known[who]
        known[:] = [each for each in known if each.is_open and each.tag == who]
