"""When each fragment is sent.

Fragment p of P is sent after inner step k*H + ceil((p + 1)*H / P), for k = 0, 1, ...
So the window of every fragment is exactly H = sync_every inner steps, for any H and P;
nothing need divide. Only the first window is shorter. With P > H several fragments are
due at one step, and the last fragment is always sent at a multiple of H.

The steps of this schedule are those of an island that makes H inner steps per window. A
slower island makes h of them, and takes longer strides through the same schedule: see
`Stride`.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import UsageError


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


@dataclass(frozen=True, slots=True)
class Stride:
    """The schedule step of an island whose windows have `window` inner steps.

    `inner_steps` after schedule step `since`, it is at

        since + floor(inner_steps * sync_every / window).

    So the window of every fragment has exactly `window` inner steps, although nothing
    need divide, and fragment p of P is first sent after
    ceil(ceil((p + 1) * H / P) * window / H) of them, H = sync_every. With
    window == sync_every, an inner step is a schedule step.

    >>> [Stride(4, 10, inner_steps=made).step for made in range(6)]
    [0, 2, 5, 7, 10, 12]
    """

    window: int
    sync_every: int
    since: int = 0
    inner_steps: int = 0

    def __post_init__(self) -> None:
        is_possible = 1 <= self.window <= self.sync_every
        if not is_possible or self.since < 0 or self.inner_steps < 0:
            raise UsageError(
                f"window={self.window} must be 1 to sync_every={self.sync_every}, and "
                f"since={self.since} and inner_steps={self.inner_steps} at least 0."
            )

    @property
    def is_full(self) -> bool:
        """Whether every schedule step is an inner step."""
        return self.window == self.sync_every

    @property
    def step(self) -> int:
        """The schedule step that the island has reached."""
        return self.since + self.inner_steps * self.sync_every // self.window

    def stepped(self, inner_steps: int = 1) -> Stride:
        """Return the stride after more inner steps."""
        total = self.inner_steps + inner_steps
        return Stride(self.window, self.sync_every, self.since, total)

    def until(self, step: int) -> int:
        """Return the inner steps until a schedule step is reached; 0 if it is."""
        needed = -(-(step - self.since) * self.window // self.sync_every)
        return max(0, needed - self.inner_steps)

    def to(self, window: int) -> Stride:
        """Return the stride with another window, from the step that it has reached."""
        if window == self.window:
            return self
        return Stride(window, self.sync_every, self.step)

    def at(self, step: int) -> Stride:
        """Return the stride at another schedule step, with the same window."""
        return self if step == self.step else Stride(self.window, self.sync_every, step)
