"""Saved work that an earlier life's update may hold: held back until its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.exchange import Frame
from atoll.protocol.island_rejoin import Left, Since, counted_in, what_is_left
from atoll.weights.layout import F32
from atoll.wire import Roster, update_digest


@dataclass(kw_only=True)
class HeldBack:
    """What is put back when the update that stands for `round` does not count."""

    round: int
    difference: F32
    residual: F32 | None
    settled: tuple[int, int]
    """Inner steps and tokens that are settled if all of it is put back."""

    progress: tuple[int, int]
    """And if nothing is."""

    put: Callable[[F32], None]
    """Adds to the live weights; only the thread that trains may call it."""

    frame: Frame | None = None
    """The saved update, if that may be the one that stands."""

    at_seal: F32 | None = None
    """The part of the difference that is in it."""

    residual_after: F32 | None = None
    at_seal_settled: tuple[int, int] = (0, 0)
    left: Left | None = None
    """None: no outcome yet."""

    def judge(self, roster: Roster, island: str) -> F32 | None:
        """Take note of the outcome, and return the residual that stands."""
        digest = update_digest(self.frame.header) if self.frame else b""
        since = counted_in(roster, island, digest)
        self.left = what_is_left(
            since or Since.NOTHING, is_refused=since is None, is_base_known=True
        )
        match self.left:
            case Left.ALL:
                return self.residual
            case Left.SINCE:
                return self.residual_after
        return None

    def give(self) -> tuple[int, int]:
        """Put what is left into the live weights, and return what is settled then.

        Without an outcome nothing stands any more: all of it is put back.
        """
        if self.left in (None, Left.ALL):
            self.put(self.difference)
            return self.settled
        if self.left is Left.SINCE:
            assert self.at_seal is not None
            self.put(self.difference - self.at_seal)
            return self.at_seal_settled
        return self.progress
