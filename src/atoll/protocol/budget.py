"""A token bucket as a value: a burst at once, then a steady rate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What may be done at once, and how fast that is refilled."""

    burst: float
    per_s: float
    left: float
    at_s: float = 0.0
    """When `left` was true; it never goes back, so that no time counts twice."""

    @classmethod
    def full(cls, burst: float, *, per_s: float) -> Budget:
        return cls(burst=burst, per_s=per_s, left=burst)

    def spent(self, now_s: float) -> Budget | None:
        """Return the budget after one more use, or None if nothing is left."""
        left = self.left_at(now_s)
        if left < 1.0:
            return None
        at_s = max(self.at_s, now_s)
        return Budget(burst=self.burst, per_s=self.per_s, left=left - 1.0, at_s=at_s)

    def left_at(self, now_s: float) -> float:
        """Return how many uses are left; a clock that went back refills nothing."""
        passed_s = max(0.0, now_s - self.at_s)
        return min(self.burst, self.left + passed_s * self.per_s)
