"""Who decides the rounds of a run, as the invariants see it."""

from __future__ import annotations

from typing import Protocol


class Referee(Protocol):
    """A coordinator with its journal, or the rosters in a bucket. `Watch` asks it."""

    @property
    def opened(self) -> tuple[int, ...]:
        """The open round of each fragment; nothing before the run is founded."""
        ...

    @property
    def has_started(self) -> bool:
        """Whether enough islands have come, as far as can be said now."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether every fragment has committed the run's last round."""
        ...

    @property
    def digests(self) -> list[bytes]:
        """Of the state of each fragment after its last committed round."""
        ...

    def look(self) -> None:
        """Take note of what the event that just ran has changed."""
        ...

    def judge(self) -> None:
        """Judge what must hold whenever rounds were committed."""
        ...

    def conclude(self) -> None:
        """Judge the record of the run at its end."""
        ...
