"""Blocks of memory for what is not kept: warm, and none shared by two threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from atoll.weights.layout import F32


class Scratch:
    """Lends vectors. There are as many as are ever in use at once, by any threads."""

    def __init__(self, elements: int) -> None:
        self._elements = elements
        self._free: deque[F32] = deque()

    @contextmanager
    def vector(self, elements: int) -> Iterator[F32]:
        """Lend a vector of at most the scratch's elements; its content means nothing.

        It is not to be looked at afterwards.
        """
        try:
            whole = self._free.pop()
        except IndexError:  # all are in use
            whole = np.empty(self._elements, np.float32)
        try:
            yield whole[:elements]
        finally:
            self._free.append(whole)
