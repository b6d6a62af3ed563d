"""Sums and outer steps in place: the very sequences of `atoll.algorithm`."""

from __future__ import annotations

import numpy as np

from atoll.kernels.layouts import F32
from atoll.kernels.with_numpy.ranges import flush, ranges

# Overflow is not this layer's to judge: it becomes infinite, as in the text.
_quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")


@_quiet
def accumulate(total: F32, x: F32) -> None:
    """Let total = flush(total + x)."""
    for here in ranges(total.size):
        total[here] += x[here]
        flush(total[here])


@_quiet
def accumulate_divided(total: F32, x: F32, by: float) -> None:
    """Let total = flush(flush(total + x) / by)."""
    accumulate(total, x)
    divide(total, by)


@_quiet
def accumulate_scaled(total: F32, x: F32, share: float) -> None:
    """Let total = flush(total + flush(share * x))."""
    for here in ranges(total.size):
        total[here] += flush(x[here] * np.float32(share))
        flush(total[here])


@_quiet
def divide(total: F32, by: float) -> None:
    """Let total = flush(total / by)."""
    for here in ranges(total.size):
        total[here] /= np.float32(by)
        flush(total[here])


@_quiet
def scale(total: F32, share: float) -> None:
    """Let total = flush(share * total)."""
    for here in ranges(total.size):
        total[here] *= np.float32(share)
        flush(total[here])


@_quiet
def sgd(anchor: F32, mean: F32, lr: float) -> None:
    """Take the outer step of plain descent."""
    for here in ranges(anchor.size):
        _descend(anchor[here], flush(mean[here].copy()), lr)


@_quiet
def heavy_ball(
    anchor: F32, velocity: F32, mean: F32, lr: float, momentum: float
) -> None:
    """Take the outer step of Polyak's momentum."""
    for here in ranges(anchor.size):
        _gather(velocity[here], flush(mean[here].copy()), momentum)
        _descend(anchor[here], velocity[here], lr)


@_quiet
def nesterov(anchor: F32, velocity: F32, mean: F32, lr: float, momentum: float) -> None:
    """Take the outer step of Nesterov's momentum."""
    for here in ranges(anchor.size):
        pull = flush(mean[here].copy())
        _gather(velocity[here], pull, momentum)
        pull += flush(velocity[here] * np.float32(momentum))
        _descend(anchor[here], flush(pull), lr)


@_quiet
def adam(
    anchor: F32,
    first: F32,
    second: F32,
    mean: F32,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    correction1: float,
    correction2: float,
) -> None:
    """Take the outer step of Adam; the corrections are 1 - beta**count."""
    for here in ranges(anchor.size):
        fresh = flush(mean[here].copy())
        square = flush(flush(fresh * fresh) * np.float32(1.0 - float(beta2)))
        fresh = flush(fresh * np.float32(1.0 - float(beta1)))
        _gather(first[here], fresh, beta1)
        _gather(second[here], square, beta2)
        root = flush(np.sqrt(flush(second[here] / np.float32(correction2))))
        ratio = flush(first[here] / np.float32(correction1))
        ratio /= flush(root + np.float32(eps))
        _descend(anchor[here], flush(ratio), lr)


def _gather(velocity: F32, fresh: F32, momentum: float) -> None:
    velocity *= np.float32(momentum)
    flush(velocity)
    velocity += fresh
    flush(velocity)


def _descend(anchor: F32, direction: F32, lr: float) -> None:
    anchor += flush(direction * -np.float32(lr))
    flush(anchor)
