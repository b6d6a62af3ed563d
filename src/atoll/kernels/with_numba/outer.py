"""Differences, sums and outer steps in place: the sequences of `atoll.algorithm`."""

from __future__ import annotations

import numpy as np

from atoll.kernels.layouts import F32, F64, U16
from atoll.kernels.with_numba.codecs import ALL, add_squares
from atoll.kernels.with_numba.jit import (
    BF16,
    FP32,
    INFINITY,
    MAGNITUDE,
    U32,
    Half,
    first_at_least,
    float_of,
    flush,
    jit,
    widen,
)

Share = np.float32 | None
"""A factor of the mean; None is 1, for which numba leaves out the product."""

_STRIP = 4096
"""Elements: a multiple of a norm's lanes, whose vectors fit the first cache."""


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
    _left_over(wanted, sent, sent.view(np.uint32), residual, lanes)


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
def _left_over(wanted: F32, sent: F32, bits: U32, residual: F32, lanes: F64) -> None:
    for first in range(0, sent.size, _STRIP):
        last = first + _STRIP
        _difference(wanted[first:last], sent[first:last], residual[first:last])
        add_squares(bits[first:last], FP32, ALL, lanes)


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


def sgd(anchor: F32, mean: F32, lr: float, share: float = 1.0) -> None:
    """Take the outer step of plain descent, by a share of the mean."""
    _sgd(anchor, mean, np.float32(lr), _share(share))


def heavy_ball(
    anchor: F32, velocity: F32, mean: F32, lr: float, momentum: float
) -> None:
    """Take the outer step of Polyak's momentum."""
    _heavy_ball(anchor, velocity, mean, np.float32(lr), np.float32(momentum))


def nesterov(
    anchor: F32,
    velocity: F32,
    mean: F32 | U16,
    lr: float,
    momentum: float,
    share: float = 1.0,
    is_first: bool = True,
    is_last: bool = True,
) -> int:
    """Take the outer step of Nesterov's momentum, delayed if a buffer is not filled.

    `mean` is fp32, or a bf16 body that is decoded on the way. Returns the index of its
    first number that is not finite, or -1; the state is then spoilt.
    """
    decay, ahead = momentum if is_first else 1.0, momentum if is_last else 0.0
    scalars = np.float32(lr), _share(share), np.float32(decay), np.float32(ahead)
    if mean.dtype == np.uint16:
        return _nesterov(anchor, velocity, mean.view(np.uint16), BF16, *scalars)
    return _nesterov(anchor, velocity, mean.view(np.uint32), FP32, *scalars)


def _share(share: float) -> Share:
    return None if share == 1.0 else np.float32(share)


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
    scalars = np.array(
        [beta1, beta2, *rests, eps, correction1, correction2, lr], np.float32
    )
    _adam(anchor, first, second, mean, scalars)


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
def _sgd(anchor: F32, mean: F32, lr: np.float32, share: Share) -> None:
    for i in range(anchor.size):
        fresh = flush(mean[i] if share is None else mean[i] * share)
        anchor[i] = flush(anchor[i] - flush(fresh * lr))


@jit
def _heavy_ball(
    anchor: F32, velocity: F32, mean: F32, lr: np.float32, momentum: np.float32
) -> None:
    for i in range(anchor.size):
        gathered = flush(flush(velocity[i] * momentum) + flush(mean[i]))
        velocity[i] = gathered
        anchor[i] = flush(anchor[i] - flush(gathered * lr))


@jit
def _nesterov(
    anchor: F32,
    velocity: F32,
    mean: U32 | U16,
    half: Half,
    lr: np.float32,
    share: Share,
    decay: np.float32,
    ahead: np.float32,
) -> int:
    largest = np.uint32(0)
    for i in range(anchor.size):
        bits = widen(mean[i], half)
        largest = max(largest, np.uint32(bits & MAGNITUDE))
        fresh = flush(float_of(bits) if share is None else float_of(bits) * share)
        gathered = flush(flush(velocity[i] * decay) + fresh)
        velocity[i] = gathered
        pull = flush(fresh + flush(gathered * ahead))
        anchor[i] = flush(anchor[i] - flush(pull * lr))
    return first_at_least(mean, INFINITY, half) if largest >= INFINITY else -1


@jit
def _adam(anchor: F32, first: F32, second: F32, mean: F32, scalars: F32) -> None:
    beta1, beta2, rest1, rest2 = scalars[0], scalars[1], scalars[2], scalars[3]
    eps, correction1, correction2, lr = scalars[4], scalars[5], scalars[6], scalars[7]
    for i in range(anchor.size):
        fresh = flush(mean[i])
        square = flush(flush(fresh * fresh) * rest2)
        first[i] = flush(flush(first[i] * beta1) + flush(fresh * rest1))
        second[i] = flush(flush(second[i] * beta2) + square)
        root = flush(np.sqrt(flush(second[i] / correction2)))
        ratio = flush(flush(first[i] / correction1) / flush(root + eps))
        anchor[i] = flush(anchor[i] - flush(ratio * lr))
