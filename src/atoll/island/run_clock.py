"""What an island knows of the run's clock between two synchronisations.

Rule 1: it is what the run said when the island last took an outcome, or joined. What
        comes with heartbeats in between is not in it: when that is learnt is a matter
        of luck, and a learning rate must not be.
Rule 2: from there on the island's own inner steps move it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from atoll.protocol import Position


@dataclass(frozen=True, kw_only=True)
class RunClock:
    """The run's clock, as it was told last. The same on all ranks of an island."""

    syncs: int = 0
    """How often it was told: another number, another word of the run."""

    rounds: int = 0
    """Rounds that every fragment had committed."""

    tokens: int = 0
    """What had counted by then."""

    last_round: int | None = None
    decay_round: int | None = None
    end_tokens: int | None = None

    @classmethod
    def of(cls, position: Position, *, syncs: int) -> RunClock:
        """Return what a position says."""
        return cls(
            syncs=syncs,
            rounds=min(position.rounds, default=1) - 1,
            tokens=position.tokens,
            last_round=position.last_round,
            decay_round=position.decay_round,
            end_tokens=position.end_tokens,
        )

    def to_dict(self) -> dict[str, int | None]:
        """Return the same as plain values, for a checkpoint or another rank."""
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, int | None]) -> RunClock:
        """Return what `to_dict` has said."""
        return cls(**said)  # type: ignore[arg-type]

    def tokens_at(self, step: int, *, sync_every: int) -> float:
        """Return the tokens that will have counted at a schedule step, at this pace.

        The pace is that of the run from its beginning, so that who joins late reckons
        as the others do. Zero before the first round has counted.
        """
        if not self.rounds:
            return 0.0
        return self.tokens * step / (self.rounds * sync_every)
