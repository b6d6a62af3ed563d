"""Memory of bodies that nobody looks at any more, kept warm for the next ones.

A body comes with every round and is as large as the last one. The first touch of fresh
memory costs more than what is done with it afterwards, so it is lent again instead of
being freed and asked for anew.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

KEPT = 2
"""Memory of so many bodies is kept; what comes back beyond is freed."""

SMALL_BYTES = 2**20
"""What is smaller is not worth keeping."""


class Spare:
    """Lends memory, and has it back when nothing refers to it. Any thread may ask."""

    def __init__(self) -> None:
        # No lock: memory may come back while this very thread looks for some.
        self._kept: deque[U8] = deque(maxlen=KEPT)

    def body(self, size_bytes: int) -> U8:
        """Return a byte vector whose content means nothing.

        Every view of it keeps it: it is lent again when the last one is gone.
        """
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8)
        whole = self._fitting(size_bytes)
        lent = np.frombuffer(whole.data, np.uint8, size_bytes)
        weakref.finalize(lent, self._kept.append, whole).atexit = False
        return lent

    def _fitting(self, size_bytes: int) -> U8:
        for _ in range(len(self._kept)):
            try:
                whole = self._kept.popleft()
            except IndexError:  # another thread was faster
                break
            if size_bytes <= whole.size <= 2 * size_bytes:
                return whole
            self._kept.append(whole)
        return np.empty(size_bytes, np.uint8)
