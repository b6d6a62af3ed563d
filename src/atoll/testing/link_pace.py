"""When bytes that enter a line come out of it: rate, delay and jitter, without I/O.

Rule 1: nothing here reads a clock; the caller says what time it is.
Rule 2: a piece is through when the pieces before it and its own bytes have passed at
the line's rate, and arrives `delay_s` after that, plus its jitter. This is a token
bucket that saves nothing up: after a pause there is no burst, so that over no stretch
of time more bytes come out than the rate allows.
Rule 3: no piece overtakes another. Jitter that would let it is cut short.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Line(Generic[Item]):
    """One direction of a line: a queue, then the rate, then the delay."""

    def __init__(
        self,
        *,
        rate_bytes_per_s: float | None = None,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        queue_bytes: int = 2**18,
        seed: int = 0,
    ) -> None:
        self._seconds_per_byte = 1.0 / rate_bytes_per_s if rate_bytes_per_s else 0.0
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self._queue_s = queue_bytes * self._seconds_per_byte
        self._random = random.Random(seed)
        self._free_at_s = float("-inf")
        self._last_arrival_s = float("-inf")
        self._items: deque[tuple[float, Item]] = deque()

    def enter(self, item: Item, size_bytes: int, *, ready_s: float) -> float:
        """Put an item that is there since `ready_s` on the line; say when it arrives.

        So a line whose keeper comes late has not been idle, if something was there.
        """
        begins_s = max(ready_s, self._free_at_s)
        self._free_at_s = begins_s + size_bytes * self._seconds_per_byte
        late_s = self._delay_s + self._random.uniform(0.0, self._jitter_s)
        arrival_s = max(self._free_at_s + late_s, self._last_arrival_s)
        self._last_arrival_s = arrival_s
        self._items.append((arrival_s, item))
        return arrival_s

    def room_in_s(self, size_bytes: int, *, now_s: float) -> float:
        """Return after how many seconds the queue has room for `size_bytes`.

        An empty queue has room for anything, so that large pieces pass a small queue.
        """
        waiting_s = max(0.0, self._free_at_s - now_s)
        too_long_s = waiting_s + size_bytes * self._seconds_per_byte - self._queue_s
        return min(waiting_s, max(0.0, too_long_s))

    def arrived(self, *, now_s: float) -> Iterator[Item]:
        """Take off the line, in order, what has arrived."""
        while self._items and self._items[0][0] <= now_s:
            yield self._items.popleft()[1]

    def next_in_s(self, *, now_s: float) -> float | None:
        """Return after how many seconds something arrives; None for an empty line."""
        return max(0.0, self._items[0][0] - now_s) if self._items else None


class LineTime:
    """The time of a line, which stands still while the line is cut.

    So what was under way stays as far from its arrival as it was, and a line that is
    mended does not let out at once what it held.
    """

    def __init__(self) -> None:
        self._cut_at_s: float | None = None
        self._stood_s = 0.0

    @property
    def is_cut(self) -> bool:
        return self._cut_at_s is not None

    def at(self, now_s: float) -> float:
        """Return the line's time when the clock shows `now_s`."""
        return (now_s if self._cut_at_s is None else self._cut_at_s) - self._stood_s

    def cut(self, *, now_s: float) -> None:
        """Stand still from now on; a cut line stays cut."""
        if self._cut_at_s is None:
            self._cut_at_s = now_s

    def mend(self, *, now_s: float) -> None:
        """Go on from where it stands; a whole line stays whole."""
        if self._cut_at_s is not None:
            self._stood_s += now_s - self._cut_at_s
            self._cut_at_s = None


def piece_bytes(rate_bytes_per_s: float | None) -> int:
    """Return how much to read at once: two milliseconds' worth, within reason.

    Less would cost processor time; more would let one sender hold up the others, and
    would come out in lumps.
    """
    if rate_bytes_per_s is None:
        return 2**18
    return int(min(max(rate_bytes_per_s * 0.002, 1448), 2**16))


def in_flight_bytes(rate_bytes_per_s: float | None, delay_s: float) -> int:
    """Return the bytes that are under way on a full line: rate times delay."""
    # No line of ours comes near a gigabyte per second, so this bounds nothing.
    return int((1e9 if rate_bytes_per_s is None else rate_bytes_per_s) * delay_s)
