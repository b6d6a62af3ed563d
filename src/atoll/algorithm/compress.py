"""Error feedback: the error of a lossy codec is added to the next update.

Sealing is tentative. The island keeps the residual from before a seal until it has the
outcome of that round, and the outcome chooses:

    counted   the codec's error stays behind      `counted`: the residual after
    missed    nothing of the update was used      `missed`: the residual before
    refused   the work is not to be used at all   `refused`: zero

A missed update's pseudo-gradient is kept in the local weights (`adopt.carry`), so with
decay 1 nothing is lost and nothing counts twice.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.algorithm.arithmetic import A, flush


def seal(
    pseudo: A, residual: A, roundtrip: Callable[[A], A], *, decay: float
) -> tuple[A, A]:
    """Return what the others will decode, and the residual if it is counted.

    x = D + beta e;  q = C(x);  e <- x - q

    `roundtrip` encodes and decodes. Over T counted seals
    sum beta**(T-t) D_t = sum beta**(T-t) q_t + e_T, to rounding (Seide et al. 2014;
    decay 0.95 in SparseLoCo, arXiv 2508.15706). If `roundtrip` raises, `residual`
    is still the island's.

    >>> import numpy as np
    >>> whole = lambda x: np.trunc(x)
    >>> pseudo, residual = np.array([1.25], np.float32), np.array([1.0], np.float32)
    >>> [part.tolist() for part in seal(pseudo, residual, whole, decay=0.5)]
    [[1.0], [0.75]]
    """
    wanted = flush(pseudo + flush(residual * decay))
    decoded = flush(roundtrip(wanted))
    return decoded, flush(wanted - decoded)


def counted(before: A, after: A) -> A:
    """Return the residual once the roster lists this very update as counted."""
    return after


def missed(before: A, after: A) -> A:
    """Return the residual once the round closed without this update."""
    return before


def refused(before: A, after: A) -> A:
    """Return the residual once the update was refused: zero.

    `before` is finite, since a codec refuses to encode anything else.
    """
    return flush(before * 0.0)
