"""How often the same thing is told: some times a minute, and then only counted.

Who is turned away has paid nothing for it, and may be turned away a thousand times a
second. Rule 1: each kind has its own measure, so that a scan of the port does not hide
a wrong token. Rule 2: kinds are words of a closed list, so there are few of them.
Rule 3: time is a parameter.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Hashable

MOST = 10
WITHIN_S = 60.0


class Sparing:
    """Says what is told and what is only counted. Threads may share it."""

    def __init__(self, *, most: int = MOST, within_s: float = WITHIN_S) -> None:
        self._within_s = within_s
        self._told_s: defaultdict[Hashable, deque[float]] = defaultdict(
            lambda: deque(maxlen=most)
        )
        self._untold: Counter[Hashable] = Counter()
        self._lock = threading.Lock()

    def untold(self, kind: Hashable, *, now_s: float) -> int | None:
        """Return how many of a kind were not told before this one.

        None means that this one is not to be told either; it is counted.
        """
        with self._lock:
            told_s = self._told_s[kind]
            is_full = len(told_s) == told_s.maxlen
            if is_full and now_s < told_s[0] + self._within_s:
                self._untold[kind] += 1
                return None
            told_s.append(now_s)
            return self._untold.pop(kind, 0)
