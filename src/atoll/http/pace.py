"""How fast a body must move: nothing waits for ever for somebody who crawls."""

from __future__ import annotations

from collections.abc import Callable

from atoll.clock import Clock
from atoll.http.limits import Limits


class Gone(Exception):
    """The other side closed the connection, or the network did."""


class Stalled(Exception):
    """The other side is there and too slow."""


class Pace:
    """Measures one body after the other on a connection."""

    def __init__(self, *, limits: Limits, clock: Clock) -> None:
        self._limits, self._clock = limits, clock
        self.begin()

    def begin(self) -> None:
        """Measure what follows by itself."""
        self._moved_bytes = 0
        self._waited_s = 0.0

    def timed(self, move: Callable[[], int]) -> int:
        """Return how many bytes were moved, by a call that waits at most `idle_s`.

        Raises:
            Stalled: nothing moved, or too little for too long.
            Gone: the connection is closed.
        """
        start_s = self._clock.now_s()
        try:
            moved = move()
        except TimeoutError as exc:
            raise Stalled(f"nothing moved for {self._limits.idle_s:g} s") from exc
        except (OSError, ValueError) as exc:
            raise Gone(str(exc)) from exc
        self._waited_s += self._clock.now_s() - start_s
        self._moved_bytes += max(0, moved)
        self._check()
        return moved

    def _check(self) -> None:
        overtime_s = self._waited_s - self._limits.idle_s
        if self._moved_bytes < overtime_s * self._limits.min_bytes_per_s:
            raise Stalled(
                f"{self._moved_bytes} bytes moved in {self._waited_s:.1f} s, less than "
                f"{self._limits.min_bytes_per_s} per second"
            )
