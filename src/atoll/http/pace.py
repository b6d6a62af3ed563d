"""How fast a body must move: nothing waits for ever for somebody who crawls."""

from __future__ import annotations

from collections.abc import Callable

from atoll.clock import Clock
from atoll.http.limits import Limits


class Gone(Exception):
    """The other side closed the connection, or the network did."""


class Stalled(Exception):
    """The other side is there and too slow."""


class Cutoff(Stalled):
    """The other side is slower than those who wait for its lane need it to be."""


class Pace:
    """Measures one body after the other on a connection."""

    def __init__(self, *, limits: Limits, clock: Clock) -> None:
        self._limits, self._clock = limits, clock
        self.is_cut = False
        """Whether others need what this connection holds; see `Channel.cut`."""

        self._past_waited_s = 0.0
        self._waits_since_s: float | None = None
        self.begin()

    def all_waited_s(self, now_s: float) -> float:
        """Return the time spent waiting for the other side so far. From any thread."""
        since_s = self._waits_since_s
        return self._past_waited_s + (0.0 if since_s is None else now_s - since_s)

    def begin(self) -> None:
        """Measure what follows by itself."""
        self._moved_bytes = 0
        self._waited_s = 0.0

    def timed(self, move: Callable[[], int]) -> int:
        """Return how many bytes were moved, by a call that waits at most `idle_s`.

        Raises:
            Cutoff: others need the lane.
            Stalled: nothing moved, or too little for too long.
            Gone: the connection is closed.
        """
        start_s = self._waits_since_s = self._clock.now_s()
        try:
            moved = move()
        except TimeoutError as exc:
            self._require_not_cut()
            raise Stalled(f"nothing moved for {self._limits.idle_s:g} s") from exc
        except (OSError, ValueError) as exc:
            self._require_not_cut()
            raise Gone(str(exc)) from exc
        finally:
            self._waits_since_s = None
            took_s = self._clock.now_s() - start_s
            self._past_waited_s += took_s
        self._require_not_cut()
        self._waited_s += took_s
        self._moved_bytes += max(0, moved)
        self._check()
        return moved

    def _require_not_cut(self) -> None:
        if self.is_cut:
            raise Cutoff("it was too slow while others waited for its lane")

    def _check(self) -> None:
        overtime_s = self._waited_s - self._limits.idle_s
        if self._moved_bytes < overtime_s * self._limits.min_bytes_per_s:
            raise Stalled(
                f"{self._moved_bytes} bytes moved in {self._waited_s:.1f} s, less than "
                f"{self._limits.min_bytes_per_s} per second"
            )
