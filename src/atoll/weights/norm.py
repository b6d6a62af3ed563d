"""The norm of an update: fp64 in 64 lanes, the same wherever it is taken."""

from __future__ import annotations

import math

import numpy as np

from atoll import kernels
from atoll.algorithm.merge import LANES
from atoll.weights.layout import F32


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
