"""The local weights of an island after the outcome of a round.

All values are fp32; the caller casts to the parameter's dtype afterwards. *Loaded*
means the anchor cast to that dtype and back: the values that the island loaded.
"""

from __future__ import annotations

from atoll.algorithm.arithmetic import A, flush, fp32


def pseudo_gradient(loaded: A, local: A) -> A:
    """Return the loaded anchor minus the local weights: positive means descend."""
    return flush(loaded - local)


def rebase(anchor: A, local_now: A, local_at_seal: A) -> A:
    """Return the new anchor plus the local change since the seal.

    local <- anchor + (local_now - local_at_seal). Without steps in flight it is the
    anchor itself.
    """
    return flush(anchor + flush(local_now - local_at_seal))


def mix(anchor: A, local: A, *, keep_local: float) -> A:
    """Return the blend of Streaming DiLoCo (arXiv 2501.18512), its alpha on local.

    local <- keep_local local + (1 - keep_local) anchor. At 0 it is the anchor, at 1 the
    local weights, bit for bit.
    """
    if keep_local == 0.0:
        return flush(anchor)
    if keep_local == 1.0:
        return flush(local)
    return flush(flush(local * keep_local) + flush(anchor * fp32(1.0 - keep_local)))


def carry(loaded_new: A, loaded_old: A, local: A) -> A:
    """Return local weights whose next pseudo-gradient is the missed work, once.

    local <- loaded_new - (loaded_old - local)

    >>> import numpy as np
    >>> new, old, local = (np.array([x], np.float32) for x in (5.0, 4.0, 3.0))
    >>> moved = carry(new, old, local)
    >>> moved.tolist(), pseudo_gradient(new, moved).tolist()  # one unit of work, kept
    ([4.0], [1.0])
    """
    return flush(loaded_new - pseudo_gradient(loaded_old, local))
