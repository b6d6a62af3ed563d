"""Warm host buffers: the first touch of fresh memory costs more than a copy."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np

from atoll.weights.layout import F32


class Buffers:
    """Gives out vectors and takes them back. Any thread may call it."""

    def __init__(self) -> None:
        self._free: dict[tuple[type, int], list[np.ndarray]] = defaultdict(list)
        self._lock = threading.Lock()

    def vector(self, elements: int) -> F32:
        """Return an fp32 vector whose content means nothing."""
        return self._take(np.float32, elements)

    def body(self, size_bytes: int) -> np.ndarray:
        """Return a byte vector whose content means nothing."""
        return self._take(np.uint8, size_bytes)

    def give_back(self, *buffers: np.ndarray | None) -> None:
        """Make buffers available again; None is passed over."""
        with self._lock:
            for buffer in buffers:
                if buffer is not None:
                    self._free[buffer.dtype.type, len(buffer)].append(buffer)

    def _take(self, dtype: type, length: int) -> np.ndarray:
        with self._lock:
            free = self._free[dtype, length]
            if free:
                return free.pop()
        return np.empty(length, dtype)
