"""The norm of an update: fp64 in 64 lanes, with the same bits wherever it is computed.

`Norm` takes decoded elements, `BodyNorm` the encoded bytes, without decoding them where
the codec has a kernel for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll import kernels
from atoll.algorithm.merge import LANES
from atoll.algorithm.outer import LARGEST_NORM
from atoll.errors import CorruptError
from atoll.weights.layout import BLOCK, F32, blocks
from atoll.wire import Codec


class Norm:
    """Adds up an update's squares, block after block."""

    def __init__(self) -> None:
        self._lanes = np.zeros(LANES)

    def add(self, values: F32) -> None:
        """Take in the next block; every block but the last has whole lanes."""
        kernels.active().sum_squares(values, self._lanes)

    def add_beside(self, values: F32, wanted: F32, residual: F32) -> None:
        """Take in the next block, and let `residual` be what it lacks of `wanted`."""
        kernels.active().left_over(wanted, values, residual, self._lanes)

    def value(self) -> float:
        """Return the norm: lanes are summed in order, not pairwise."""
        return math.sqrt(np.add.accumulate(self._lanes)[-1])


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

        Return None, or the index of an element in the same block as the first that no
        encoder writes. Nothing can be added after that.
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
    """Return whether a mean's norm is impossible for a mean of counted updates.

    A lossy codec may double the norm of its input, but not more.
    """
    norm = BodyNorm(packing)
    return norm.add(body, elements) is not None or norm.value() > 2 * LARGEST_NORM


def _fused(codec: str) -> Squares | None:
    """Return the kernel that decodes nothing, where a codec has one."""
    name = f"{codec.partition('-')[0]}_squares"
    kernel: Squares | None = getattr(kernels.active(), name, None)
    return kernel
