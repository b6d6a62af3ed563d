"""When a learning rate falls, and how far it has.

A decay ends with the run, where its end is known, if not before. One that an operator
has begun with a round is measured in inner steps, whatever else is: the step of a round
is known to all, and what had counted then is not known to who joins later.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.island.run_clock import RunClock


@dataclass(frozen=True, kw_only=True)
class Decay:
    """From where to where the rate falls; nowhere, if there is no length."""

    first: int = 0
    length: int = 0
    is_steps: bool = True
    fault: str = ""
    """Why a decay that was asked for cannot be."""

    def factor(self, step: int, tokens: float) -> float:
        """Return how much of the rate is left for the inner step after `step`.

        In steps the first one has lost a share of the rate, and the last one has as
        much left, which stays if the run goes on.
        """
        if not self.length:
            return 1.0
        if not self.is_steps:
            left = (self.first + self.length - tokens) / self.length
            return min(1.0, max(0.0, left))
        made = min(max(step - self.first + 1, 0), self.length)
        return 1.0 - made / (self.length + 1)


def decay_of(clock: RunClock, *, decay: int, is_steps: bool, sync_every: int) -> Decay:
    """Return the decay that follows from what the run says."""
    if clock.decay_round is not None:
        return _begun_by_round(
            clock.decay_round, clock, decay if is_steps else 0, sync_every
        )
    end = _end(clock, is_steps=is_steps, sync_every=sync_every)
    if not decay or end is None:
        return Decay()
    return Decay(first=end - decay, length=decay, is_steps=is_steps)


def _begun_by_round(round: int, clock: RunClock, decay: int, sync_every: int) -> Decay:
    first = (round - 1) * sync_every
    end = _end(clock, is_steps=True, sync_every=sync_every)
    if end is not None:
        left = max(0, end - first)
        return Decay(first=first, length=min(decay, left) if decay else left)
    if decay:
        return Decay(first=first, length=decay)
    return Decay(
        fault=f"run.decay_round={round} begins a decay whose length in inner steps "
        "nobody knows. Set run.end_rounds, or give WSD(..., decay=STEPS) with "
        "unit='inner_steps'."
    )


def require_room(
    clock: RunClock, *, warmup: int, decay: int, is_steps: bool, sync_every: int
) -> None:
    """Return if a rate can rise and fall as is asked before the run ends.

    Raises:
        UsageError: it cannot, and what to set.
    """
    plan = decay_of(clock, decay=decay, is_steps=is_steps, sync_every=sync_every)
    if plan.fault:
        raise UsageError(plan.fault)
    end = _end(clock, is_steps=is_steps, sync_every=sync_every)
    own = decay if clock.decay_round is None else 0
    if end is not None and warmup + own > end:
        raise UsageError(
            f"warmup={warmup} and decay={own} are longer than the run, which ends "
            f"after {end} {'inner steps' if is_steps else 'tokens'}. Make one of them "
            "shorter, or let the run end later."
        )


def _end(clock: RunClock, *, is_steps: bool, sync_every: int) -> int | None:
    """Return where the run ends in steps or tokens, if that is known."""
    if not is_steps:
        return clock.end_tokens
    return None if clock.last_round is None else clock.last_round * sync_every
