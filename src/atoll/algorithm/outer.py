"""The outer optimizers: from the agreed mean to the change of the anchor.

The pseudo-gradient is anchor minus local, so a positive mean means descend and every
`change` below carries the minus sign; `apply` adds it. Velocity starts at zero. The
fused kernels follow the very sequences of this file.
"""

from __future__ import annotations

from collections.abc import Callable
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

In an asynchronous run the k-th update of a buffer has at most 1 / k as its share, also
if the buffer grows meanwhile, and a buffer has at most 2^16 updates before its last
round. So their shares sum to less than 2^4, velocity stays below 2^81, and a change
below 2^102, which is less than half of that ulp.
"""

LARGEST_MOMENT = 2.0**102
"""No moment of a run's own steps exceeds it: 2^81 for a velocity, 2^77 for Adam's first
moment, and 2^102 for Adam's second moment, a mean of squares."""

ADAM_BETA2 = fp32(0.99)
ADAM_EPS = fp32(1e-8)


def apply(anchor: A, change: A) -> A:
    """Return the anchor after an outer step."""
    return flush(anchor + change)


def sgd(mean: A, *, lr: float, share: float = 1.0) -> A:
    """Return the change of plain descent, `-lr * share * mean`.

    With `lr = 1` the new anchor is the mean of the islands' weights (FedAvg). `share`
    is below 1 in a round that does not fill the buffer of an asynchronous run.
    """
    return flush(flush(mean * share) * -lr)


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


def delayed_nesterov(
    mean: A,
    velocity: A,
    *,
    lr: float,
    momentum: float,
    share: float,
    is_first: bool,
    is_last: bool,
) -> tuple[A, A]:
    """Return change and velocity of a round that fills a share of a buffer.

    x = share D;  b <- (mu if is_first else 1) b + x
    change = -eta (x + (mu if is_last else 0) b)        (arXiv 2401.09135)

    `is_first` and `is_last` say whether the round begins and fills a buffer of N
    updates. N updates with shares of 1 / N move the anchor as one Nesterov step on
    their mean. The paper keeps their sum apart until the last one. Here each is added
    to the velocity directly, because only the last one reads the velocity. A round
    that is both first and last, with a share of 1, is `nesterov`, to the bit.

    >>> import numpy as np
    >>> velocity = np.array([4.0], np.float32)
    >>> for is_last in (False, True):  # a buffer of 2, means 2 and 6
    ...     mean = np.array([6.0 if is_last else 2.0], np.float32)
    ...     change, velocity = delayed_nesterov(
    ...         mean, velocity, lr=0.5, momentum=0.5, share=0.5,
    ...         is_first=not is_last, is_last=is_last,
    ...     )
    ...     print(velocity.tolist(), change.tolist())
    [3.0] [-0.5]
    [6.0] [-3.0]
    """
    decay, ahead = momentum if is_first else 1.0, momentum if is_last else 0.0
    fresh = flush(mean * share)  # a tiny mean is flushed too: share is at most 1
    velocity = flush(flush(velocity * decay) + fresh)
    return flush(flush(fresh + flush(velocity * ahead)) * -lr), velocity


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
