"""Sums and outer steps in place: the very sequences of `atoll.algorithm`."""

from __future__ import annotations

import numpy as np

from atoll.kernels.layouts import F32
from atoll.kernels.with_numba.jit import flush, jit


def accumulate(total: F32, x: F32) -> None:
    """Let total = flush(total + x)."""
    _accumulate(total, x)


def accumulate_divided(total: F32, x: F32, by: float) -> None:
    """Let total = flush(flush(total + x) / by)."""
    _accumulate_divided(total, x, np.float32(by))


def accumulate_scaled(total: F32, x: F32, share: float) -> None:
    """Let total = flush(total + flush(share * x))."""
    _accumulate_scaled(total, x, np.float32(share))


def divide(total: F32, by: float) -> None:
    """Let total = flush(total / by)."""
    _divide(total, np.float32(by))


def scale(total: F32, share: float) -> None:
    """Let total = flush(share * total)."""
    _scale(total, np.float32(share))


def sgd(anchor: F32, mean: F32, lr: float) -> None:
    """Take the outer step of plain descent."""
    _sgd(anchor, mean, np.float32(lr))


def heavy_ball(
    anchor: F32, velocity: F32, mean: F32, lr: float, momentum: float
) -> None:
    """Take the outer step of Polyak's momentum."""
    _heavy_ball(anchor, velocity, mean, np.float32(lr), np.float32(momentum))


def nesterov(anchor: F32, velocity: F32, mean: F32, lr: float, momentum: float) -> None:
    """Take the outer step of Nesterov's momentum."""
    nesterov_loop(anchor, velocity, mean, np.float32(lr), np.float32(momentum))


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
    rests = 1.0 - float(beta1), 1.0 - float(beta2)
    given = np.array(
        [beta1, beta2, *rests, eps, correction1, correction2, lr], np.float32
    )
    _adam(anchor, first, second, mean, given)


@jit
def _accumulate(total: F32, x: F32) -> None:
    for i in range(total.size):
        total[i] = flush(total[i] + x[i])


@jit
def _accumulate_divided(total: F32, x: F32, by: np.float32) -> None:
    for i in range(total.size):
        total[i] = flush(flush(total[i] + x[i]) / by)


@jit
def _accumulate_scaled(total: F32, x: F32, share: np.float32) -> None:
    for i in range(total.size):
        total[i] = flush(total[i] + flush(x[i] * share))


@jit
def _divide(total: F32, by: np.float32) -> None:
    for i in range(total.size):
        total[i] = flush(total[i] / by)


@jit
def _scale(total: F32, share: np.float32) -> None:
    for i in range(total.size):
        total[i] = flush(total[i] * share)


@jit
def _sgd(anchor: F32, mean: F32, lr: np.float32) -> None:
    for i in range(anchor.size):
        anchor[i] = flush(anchor[i] - flush(flush(mean[i]) * lr))


@jit
def _heavy_ball(
    anchor: F32, velocity: F32, mean: F32, lr: np.float32, momentum: np.float32
) -> None:
    for i in range(anchor.size):
        gathered = flush(flush(velocity[i] * momentum) + flush(mean[i]))
        velocity[i] = gathered
        anchor[i] = flush(anchor[i] - flush(gathered * lr))


@jit
def nesterov_loop(
    anchor: F32, velocity: F32, mean: F32, lr: np.float32, momentum: np.float32
) -> None:
    """Take Nesterov's step; the scalars are fp32 already."""
    for i in range(anchor.size):
        fresh = flush(mean[i])
        gathered = flush(flush(velocity[i] * momentum) + fresh)
        velocity[i] = gathered
        pull = flush(fresh + flush(gathered * momentum))
        anchor[i] = flush(anchor[i] - flush(pull * lr))


@jit
def _adam(anchor: F32, first: F32, second: F32, mean: F32, given: F32) -> None:
    beta1, beta2, rest1, rest2 = given[0], given[1], given[2], given[3]
    eps, correction1, correction2, lr = given[4], given[5], given[6], given[7]
    for i in range(anchor.size):
        fresh = flush(mean[i])
        square = flush(flush(fresh * fresh) * rest2)
        first[i] = flush(flush(first[i] * beta1) + flush(fresh * rest1))
        second[i] = flush(flush(second[i] * beta2) + square)
        root = flush(np.sqrt(flush(second[i] / correction2)))
        ratio = flush(flush(first[i] / correction1) / flush(root + eps))
        anchor[i] = flush(anchor[i] - flush(ratio * lr))
