"""What an island wants to send, and what is left of it once it is sealed."""

from __future__ import annotations

import numpy as np

from atoll.kernels.layouts import F32, F64
from atoll.kernels.with_numpy.floats import sum_squares
from atoll.kernels.with_numpy.ranges import ranges

# What is not finite is the codec's to refuse, by its name.
_quiet = np.errstate(over="ignore", invalid="ignore")


@_quiet
def difference(loaded: F32, local: F32, out: F32) -> None:
    """Let out = loaded - local."""
    np.subtract(loaded, local, out=out)


@_quiet
def difference_fed(
    loaded: F32, local: F32, residual: F32, decay: float, out: F32
) -> None:
    """Let out = (loaded - local) + decay * residual."""
    for here in ranges(out.size):
        np.subtract(loaded[here], local[here], out=out[here])
        out[here] += residual[here] * np.float32(decay)


@_quiet
def left_over(wanted: F32, sent: F32, residual: F32, lanes: F64) -> None:
    """Let residual = wanted - sent, and add the squares of `sent` to a norm's lanes."""
    np.subtract(wanted, sent, out=residual)
    sum_squares(sent, lanes)
