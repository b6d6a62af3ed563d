"""What an island wants to send, and what is left of it once it is sealed."""

from __future__ import annotations

import numpy as np

from atoll.kernels.layouts import F32, F64, LANES
from atoll.kernels.with_numba.jit import jit
from atoll.kernels.with_numba.vectors import LINE, WRITES_AHEAD, fetch_line


def difference(loaded: F32, local: F32, out: F32) -> None:
    """Let out = loaded - local."""
    _difference(loaded, local, out)


def difference_fed(
    loaded: F32, local: F32, residual: F32, decay: float, out: F32
) -> None:
    """Let out = (loaded - local) + decay * residual."""
    _difference_fed(loaded, local, residual, np.float32(decay), out)


def left_over(wanted: F32, sent: F32, residual: F32, lanes: F64) -> None:
    """Let residual = wanted - sent, and add the squares of `sent` to a norm's lanes."""
    _left_over(wanted, sent, residual, lanes)


@jit
def _difference(loaded: F32, local: F32, out: F32) -> None:
    for i in range(out.size):
        out[i] = loaded[i] - local[i]


@jit
def _difference_fed(
    loaded: F32, local: F32, residual: F32, decay: np.float32, out: F32
) -> None:
    for i in range(out.size):
        out[i] = (loaded[i] - local[i]) + residual[i] * decay


@jit
def _left_over(wanted: F32, sent: F32, residual: F32, lanes: F64) -> None:
    whole = sent.size // LANES * LANES
    for first in range(0, whole, LANES):
        row, left = sent[first : first + LANES], residual[first : first + LANES]
        want = wanted[first : first + LANES]
        for line in range(first, first + LANES, LINE):
            fetch_line(residual, line + WRITES_AHEAD)
        for j in range(LANES):
            left[j] = want[j] - row[j]
        for j in range(LANES):
            lanes[j] += np.float64(row[j]) * np.float64(row[j])
    for j in range(sent.size - whole):
        residual[whole + j] = wanted[whole + j] - sent[whole + j]
        lanes[j] += np.float64(sent[whole + j]) * np.float64(sent[whole + j])
