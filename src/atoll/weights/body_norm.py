"""The norm of an update from its bytes: who judges it needs none of its elements."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.algorithm.merge import LANES
from atoll.algorithm.outer import LARGEST_NORM
from atoll.errors import CorruptError
from atoll.weights.layout import BLOCK, blocks
from atoll.wire import Codec

Squares = Callable[[NDArray[np.uint8], int, NDArray[np.float64]], int]


class BodyNorm:
    """Adds up the squares of a body in a codec, part after part.

    The bits are those of `Norm`, which takes decoded elements.
    """

    def __init__(self, packing: Codec) -> None:
        self._packing = packing
        self._lanes = np.zeros(LANES)

    def add(self, data: NDArray[np.uint8], elements: int) -> int | None:
        """Take in the next elements; every part but the last has whole lanes.

        Return None, or which of them is near the first that no encoder writes: in the
        same block of elements. Nothing can be added then.
        """
        fused = _fused(self._packing.name)
        if fused is None or data.size != self._packing.body_bytes(elements):
            return self._add_decoded(data, elements)
        refused = fused(data, elements, self._lanes)
        return refused if refused >= 0 else None

    def value(self) -> float:
        """Return the norm: lanes are summed in order, not pairwise."""
        return math.sqrt(np.add.accumulate(self._lanes)[-1])

    def _add_decoded(self, data: NDArray[np.uint8], elements: int) -> int | None:
        scratch = np.empty(min(BLOCK, elements), np.float32)
        for block in blocks(elements):
            values = scratch[: block.stop - block.start]
            try:
                self._packing.decode(data, values, first=block.start)
            except CorruptError:
                return int(block.start)
            kernels.active().sum_squares(values, self._lanes)
        return None


def exceeds_largest(packing: Codec, body: NDArray[np.uint8], elements: int) -> bool:
    """Return whether a mean's norm is beyond what counted updates can lead to.

    A lossy codec may double the norm of what it encodes, but not more.
    """
    norm = BodyNorm(packing)
    return norm.add(body, elements) is not None or norm.value() > 2 * LARGEST_NORM


def _fused(codec: str) -> Squares | None:
    """Return the kernel that decodes nothing, where a codec has one."""
    name = f"{codec.partition('-')[0]}_squares"
    found: Squares | None = getattr(kernels.active(), name, None)
    return found
