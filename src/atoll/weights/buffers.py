"""Buffer pools: scratch vectors and the memory of bodies, reused while they are warm.

A body comes with every round and is as large as the last one. The first touch of fresh
memory costs more than the work on it afterwards, so a pool lends the same memory again
instead of freeing it.

Rule 1: no two threads share a buffer.
Rule 2: the content of a lent buffer is undefined.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from atoll.weights.layout import F32


class ScratchPool:
    """A pool of vectors: as many as all threads ever use at the same time."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._free: deque[F32] = deque()

    @contextmanager
    def vector(self, elements: int) -> Iterator[F32]:
        """Lend a vector of at most the pool's elements; its content is undefined.

        It must not be read after the `with` block.
        """
        try:
            vector = self._free.pop()
        except IndexError:  # all are in use
            vector = np.empty(self._elements, np.float32)
        try:
            yield vector[:elements]
        finally:
            self._free.append(vector)


U8 = NDArray[np.uint8]

MAX_FREE_BODIES = 2
"""The most free bodies in a pool; memory beyond that is freed."""

SMALL_BYTES = 2**20
"""Smaller bodies are allocated, not pooled."""


class BodyPool:
    """Lends memory, which returns when nothing refers to it. Thread-safe."""

    def __init__(self) -> None:
        # No lock: a finalizer may return memory while this very thread searches.
        self._free: deque[U8] = deque(maxlen=MAX_FREE_BODIES)

    def body(self, size_bytes: int) -> U8:
        """Return a byte vector with undefined content.

        Its memory is lent again when its last view is garbage.
        """
        if size_bytes < SMALL_BYTES:
            return np.empty(size_bytes, np.uint8)
        memory = self._fitting(size_bytes)
        lent = np.frombuffer(memory.data, np.uint8, size_bytes)
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return lent

    def _fitting(self, size_bytes: int) -> U8:
        for _ in range(len(self._free)):
            try:
                memory = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if size_bytes <= memory.size <= 2 * size_bytes:
                return memory
            self._free.append(memory)
        return np.empty(size_bytes, np.uint8)
