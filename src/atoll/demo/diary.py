"""What one island of the demo writes down while it trains."""

from __future__ import annotations

import time
from collections.abc import Mapping

from atoll.demo.results import Point

SHORTEST_WAIT_S = 0.005
"""A shorter one is the cost of looking, and nobody would see it in a picture."""


class Diary:
    """Losses, rounds and waits of an island by the time since its first entry."""

    def __init__(self) -> None:
        self.started_unix_s = time.time()
        self.seconds = 0.0
        self.losses: list[Point] = []
        self.rounds: list[Point] = []
        self.waits: list[Point] = []
        self._started_s: float | None = None
        self._wait_s = 0.0

    def note(self, metrics: Mapping[str, float]) -> None:
        """Write down what an island counts of itself, once for each inner step."""
        now_s = time.monotonic()
        if self._started_s is None:
            self._started_s, self.started_unix_s = now_s, time.time()
        self.seconds = now_s - self._started_s
        self.losses.append((metrics["atoll/tokens"], metrics["atoll/loss"]))
        self._note_round(metrics["atoll/round"])
        self._note_wait(metrics["atoll/wait_s"])

    def _note_round(self, round: float) -> None:
        if not self.rounds or self.rounds[-1][1] < round:
            self.rounds.append((self.seconds, round))

    def _note_wait(self, wait_s: float) -> None:
        waited_s, self._wait_s = wait_s - self._wait_s, wait_s
        if waited_s >= SHORTEST_WAIT_S:
            self.waits.append((max(0.0, self.seconds - waited_s), self.seconds))
