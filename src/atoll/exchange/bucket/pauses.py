"""When to look again at a round that is open: soon at first, then ever more seldom.

A wait of a minute costs about thirty looks, and each minute after it twenty more: a
look is one request to list a round, and what is new in it is read once.
"""

from __future__ import annotations

from atoll.store import Tries

FIRST_S, GROWTH, LONGEST_S = 0.05, 1.4, 3.0

TRIES = Tries(most=40)
"""How often an island asks a store that does not answer: for some five minutes.

What it had under way is not lost meanwhile, and the others fare alike.
"""


class Pauses:
    """The pauses between the looks at each fragment's open round."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[float, float]] = {}
        """When to look next, and the pause after that."""

    def begin(self, fragment: int, now_s: float) -> None:
        """Start over: this island has published, and others soon will have."""
        self._next[fragment] = (now_s + FIRST_S, FIRST_S * GROWTH)

    def left_s(self, fragment: int, now_s: float) -> float:
        """Return how long it is until the next look."""
        due_s, _ = self._next.get(fragment, (now_s, FIRST_S))
        return max(0.0, due_s - now_s)

    def paused(self, fragment: int, left_s: float, now_s: float) -> None:
        """Take note of what is left after a pause, though the clock may have stood."""
        due_s, pause_s = self._next.get(fragment, (now_s, FIRST_S))
        self._next[fragment] = (min(due_s, now_s + left_s), pause_s)

    def looked(self, fragment: int, now_s: float) -> None:
        """Take note of a look: the next one is further away."""
        _, pause_s = self._next.get(fragment, (now_s, FIRST_S))
        longer_s = min(pause_s * GROWTH, LONGEST_S)
        self._next[fragment] = (now_s + pause_s, longer_s)
