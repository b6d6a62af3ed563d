"""The outer optimizers: from the agreed mean to the change of the anchor.

The pseudo-gradient is anchor minus local, so a positive mean means descend and every
`change` below carries the minus sign; `apply` adds it. Velocity starts at zero. The
fused kernels follow the very sequences of this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.algorithm.arithmetic import A, divide, flush, fp32, power
from atoll.errors import UsageError

LARGEST_NORM = 2.0**50
"""The largest norm of an update that may count in any run.

It keeps every outer step finite, so that no result has to be checked. An element of a
mean is then at most 2^51, even after a lossy codec. Momentum is at most 1 - 2^-24, so
velocity stays below 2^51 * 2^26 = 2^77, and with an outer learning rate of at most
2^20, as settings demand, a change stays below 2^98. The largest finite fp32 has an ulp
of 2^104, so its sum with such a change is finite, and so is that of any other anchor.
"""

LARGEST_MOMENT = 2.0**102
"""No moment of a run's own steps exceeds it: 2^77 for a velocity or Adam's first
moment, and 2^102 for Adam's second moment, a mean of squares."""

ADAM_BETA2 = fp32(0.99)
ADAM_EPS = fp32(1e-8)


def apply(anchor: A, change: A) -> A:
    """Return the anchor after an outer step."""
    return flush(anchor + change)


def sgd(mean: A, *, lr: float) -> A:
    """Return the change of plain descent, `-lr * mean`.

    With `lr = 1` the new anchor is the mean of the islands' weights (FedAvg).
    """
    return flush(flush(mean) * -lr)


def heavy_ball(mean: A, velocity: A, *, lr: float, momentum: float) -> tuple[A, A]:
    """Return change and velocity of Polyak's momentum.

    b <- mu b + D;  change = -eta b
    """
    velocity = flush(flush(velocity * momentum) + flush(mean))
    return flush(velocity * -lr), velocity


def nesterov(mean: A, velocity: A, *, lr: float, momentum: float) -> tuple[A, A]:
    """Return change and velocity of Nesterov's momentum, the outer step of DiLoCo.

    b <- mu b + D;  change = -eta (D + mu b)            (arXiv 2311.08105)

    A first step moves by (1 + mu) eta D, a steady drift is amplified by eta / (1 - mu).

    >>> import numpy as np
    >>> mean, velocity = np.array([2.0], np.float32), np.array([4.0], np.float32)
    >>> change, velocity = nesterov(mean, velocity, lr=0.5, momentum=0.5)
    >>> velocity.tolist(), change.tolist()  # b = 2 + 2, change = -(2 + 2) / 2
    ([4.0], [-2.0])
    """
    mean = flush(mean)
    velocity = flush(flush(velocity * momentum) + mean)
    return flush(flush(mean + flush(velocity * momentum)) * -lr), velocity


class AdamScalars(NamedTuple):
    """Inputs of an Adam step beside the settings, each exact in fp32.

    The corrections may be arrays of one element, where a program is compiled once for
    all outer steps.
    """

    beta2: float
    eps: float
    correction1: Any
    correction2: Any


def adam_corrections(*, momentum: float, count: int) -> AdamScalars:
    """Return the scalars of Adam's step number `count`, counted from 1.

    correction = 1 - beta**count, in fp64 by squaring and rounded to fp32 once.
    """
    if count < 1:
        raise UsageError(
            f"count={count} is not the number of an outer step. Count from 1."
        )
    return AdamScalars(
        beta2=ADAM_BETA2,
        eps=ADAM_EPS,
        correction1=fp32(1.0 - power(momentum, count)),
        correction2=fp32(1.0 - power(ADAM_BETA2, count)),
    )


def adam(
    mean: A,
    moments: tuple[A, A],
    *,
    lr: float,
    momentum: float,
    count: int,
    sqrt: Callable[[A], A],
) -> tuple[A, tuple[A, A]]:
    """Return change and moments of Adam; `momentum` is its beta1, no weight decay.

    m <- beta1 m + (1 - beta1) D;  v <- beta2 v + (1 - beta2) D D
    change = -eta (m / correction1) / (sqrt(v / correction2) + eps)  (arXiv 1412.6980)

    `sqrt` must be correctly rounded, or machines disagree. `numpy.sqrt` and
    `jax.numpy.sqrt` are; `torch.sqrt` on a CPU is not, and has to be taken in fp64:
    `lambda x: x.double().sqrt().float()`. A test proves it for every mantissa.
    """
    scalars = adam_corrections(momentum=momentum, count=count)
    return adam_step(
        mean, moments, lr=lr, momentum=momentum, scalars=scalars, sqrt=sqrt
    )


def adam_step(
    mean: A,
    moments: tuple[A, A],
    *,
    lr: float,
    momentum: float,
    scalars: AdamScalars,
    sqrt: Callable[[A], A],
) -> tuple[A, tuple[A, A]]:
    """Return change and moments of the Adam step that has these scalars."""
    beta2, eps, correction1, correction2 = scalars
    first, second = moments
    mean = flush(mean)
    fresh = flush(mean * fp32(1.0 - momentum))
    fresh_square = flush(flush(mean * mean) * fp32(1.0 - beta2))
    first = flush(flush(first * momentum) + fresh)
    second = flush(flush(second * beta2) + fresh_square)
    root = flush(sqrt(divide(second, correction2)))
    ratio = flush(divide(first, correction1) / flush(root + eps))
    return flush(ratio * -lr), (first, second)


@dataclass(frozen=True, kw_only=True)
class Delay:
    """How delayed Nesterov spreads momentum over arrivals."""

    buffer: int
    """Arrivals between two moves of the velocity."""

    activation: float = 0.0
    """Share of the momentum step that each arrival takes, at most 1 / buffer."""

    def __post_init__(self) -> None:
        if self.buffer < 1:
            raise UsageError(f"buffer={self.buffer} must be at least 1 arrival.")
        max_activation = fp32(1.0 / self.buffer)
        if not 0.0 <= self.activation <= max_activation:
            raise UsageError(
                f"activation={self.activation} must lie between 0 and "
                f"1/buffer={max_activation}."
            )

    def share(self, *, is_last: bool) -> float:
        """Return the part of the momentum step taken by one arrival of the buffer."""
        if is_last:
            return 1.0 - (self.buffer - 1) * self.activation
        return self.activation


def delayed_nesterov(
    pseudo: A,
    velocity: A,
    pending: A,
    *,
    arrival: int,
    delay: Delay,
    lr: float,
    momentum: float,
) -> tuple[A, A, A]:
    """Return change, velocity and pending sum after one asynchronous arrival.

    S <- S + D;  the N-th arrival: b <- mu b + S/N, then S <- 0
    change = -eta (D/N + share mu b)                    (arXiv 2401.09135)

    share is c, and 1 - (N - 1) c for the N-th, so that the shares of a buffer sum to 1.
    `arrival` counts from 0 over the whole run.
    With c = 0, N arrivals from one base move the anchor as one Nesterov step on their
    mean; with N = 1 every arrival is that step.
    """
    is_last = (arrival + 1) % delay.buffer == 0
    arrivals = float(delay.buffer)
    pseudo = flush(pseudo)
    pending = flush(pending + pseudo)
    if is_last:
        velocity = flush(flush(velocity * momentum) + divide(pending, arrivals))
        pending = flush(pending * 0.0)
    pull = flush(velocity * fp32(delay.share(is_last=is_last) * momentum))
    change = flush(flush(divide(pseudo, arrivals) + pull) * -lr)
    return change, velocity, pending
