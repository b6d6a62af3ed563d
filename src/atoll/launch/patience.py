"""How long somebody who watches islands goes on asking an engine that falters.

Rule 1: a silence is told once, and is over with the next answer.
Rule 2: only who could not be asked is asked again: who is refused, or has asked for
what cannot be, learns it at once.
"""

from __future__ import annotations

from atoll.clock import Clock, SystemClock
from atoll.errors import Unreachable

SILENT_S = 600.0
"""How long an engine may not answer before it is given up to follow its islands."""


class Patience:
    """With one engine, about one thing that it is asked again and again."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._silent_since_s: float | None = None

    def answered(self) -> None:
        """Take note of an answer."""
        self._silent_since_s = None

    def bear(self, error: Unreachable) -> list[str]:
        """Return the line that is said of a silence: none if it was said before.

        Raises:
            Unreachable: it has lasted so long that nobody can tell what runs.
        """
        now_s = self._clock.now_s()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
            return [f"atoll: {error} It is asked again."]
        if now_s - self._silent_since_s > SILENT_S:
            raise error
        return []
