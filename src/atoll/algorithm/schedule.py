"""When each fragment is sent.

Fragment p of P is sent after inner step k*H + ceil((p + 1)*H / P), for k = 0, 1, ...
So the window of every fragment is exactly H = sync_every inner steps, for any H and P;
nothing need divide. Only the first window is shorter. With P > H several fragments are
due at one step, and the last fragment is always sent at a multiple of H.
"""

from __future__ import annotations


def send_step(fragment: int, cycle: int, *, sync_every: int, num_fragments: int) -> int:
    """Return the inner step after which `fragment` is sent in `cycle`, both from 0.

    >>> [send_step(p, 0, sync_every=10, num_fragments=4) for p in range(4)]
    [3, 5, 8, 10]
    """
    offset = -(-(fragment + 1) * sync_every // num_fragments)
    return cycle * sync_every + offset


def due_fragments(
    inner_step: int, *, sync_every: int, num_fragments: int
) -> tuple[int, ...]:
    """Return the fragments to send after `inner_step`, in order.

    Evenly spaced over a period of exactly `sync_every`; several when num_fragments
    exceeds it.

    >>> [due_fragments(s, sync_every=2, num_fragments=3) for s in (1, 2, 3, 4)]
    [(0,), (1, 2), (0,), (1, 2)]
    """
    if inner_step < 1:
        return ()
    offset = (inner_step - 1) % sync_every + 1
    # ceil((p + 1) * H / P) == offset  <=>  P * (offset - 1) < (p + 1) * H <= P * offset
    first = num_fragments * (offset - 1) // sync_every
    last = num_fragments * offset // sync_every
    return tuple(range(first, last))


def next_send(
    fragment: int, after_step: int, *, sync_every: int, num_fragments: int
) -> int:
    """Return the first inner step later than `after_step` that sends `fragment`."""
    first = send_step(fragment, 0, sync_every=sync_every, num_fragments=num_fragments)
    cycle = max(0, (after_step - first) // sync_every + 1)
    return first + cycle * sync_every
