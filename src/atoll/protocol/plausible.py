"""Bounds of the numbers that an island claims: progress, weight and incarnation.

Weights and the end of a run depend on what islands claim of themselves. Every exchange
judges these claims by the functions below, before a claim can change a round, a sum or
a record. All bounds are generous: they refuse what cannot be, not what is unusual.
"""

from __future__ import annotations

from collections.abc import Iterable

from atoll.protocol.counted import Counted
from atoll.settings import RunSettings
from atoll.wire import Header

SPARE_ROUNDS = 16
WINDOWS_PER_ROUND = 4
"""An island that loses its lease trains some windows again, so its own count of inner
steps may exceed the schedule, but not by more than this factor."""

SPARE_LIVES = 2**20
"""How far beyond the latest known incarnation a returning life may claim to be."""

WINDOWS_AHEAD = 3
"""An island waits at its next send point, and stops at most a window later."""


def progress_fault(
    header: Header, *, counted: Counted | None, settings: RunSettings
) -> str:
    """Return why the progress or weight of an update cannot be true, or "".

    `counted` is the last counted update of the same island and fragment.
    """
    made = header.progress
    most_steps = max_inner_steps(header.round, settings)
    if made.inner_steps > most_steps:
        return (
            f"progress: inner_steps={made.inner_steps} exceeds {most_steps}, the most "
            f"that an island can have made by round {header.round}"
        )
    # Tokens are reported before the optimizer step that trains on them.
    most_tokens = (made.inner_steps + 1) * settings.limits.max_step_tokens
    if made.tokens > most_tokens:
        return (
            f"progress: tokens={made.tokens} exceeds {most_tokens}, which is "
            f"limits.max_step_tokens={settings.limits.max_step_tokens} for each of "
            f"{made.inner_steps} + 1 inner steps"
        )
    return _weight_fault(header, counted, settings)


def _weight_fault(
    header: Header, counted: Counted | None, settings: RunSettings
) -> str:
    if settings.outer.weight != "tokens":
        if header.weight != 1:
            return f"weight: {header.weight} is not 1, and outer.weight is 'uniform'"
        return ""
    before = 0
    if counted and counted.incarnation == header.incarnation:
        # A new life joins before an earlier one's last update counts, so its own
        # tokens may begin below those of that update.
        before = counted.tokens
    most = max(1, header.progress.tokens - before)
    if header.weight > most:
        return (
            f"weight: {header.weight} exceeds {most}, the tokens since the island's "
            "last counted update"
        )
    return ""


def max_inner_steps(round: int, settings: RunSettings) -> int:
    """Return the most inner steps that one island can have made by `round`."""
    windows = WINDOWS_PER_ROUND * (round + SPARE_ROUNDS)
    return windows * settings.sync.sync_every


def max_schedule_step(rounds: Iterable[int], settings: RunSettings) -> int:
    """Return the schedule step that no island exceeds while `rounds` are open."""
    return (max([1, *rounds]) + WINDOWS_AHEAD) * settings.sync.sync_every


def latest_incarnation(claimed: Iterable[int]) -> int:
    """Return the latest of the incarnations that a store has keys of; 0: none.

    Each one may be at most `SPARE_LIVES` after the one before it. What lies further
    ahead has not been reached by joining, and is passed over.
    """
    latest = 0
    for incarnation in sorted(claimed):
        if incarnation > max_incarnation(latest):
            break
        latest = incarnation
    return latest


def max_incarnation(known: int) -> int:
    """Return the highest incarnation that a life may claim after `known`.

    The owner of a name takes the next incarnation, so a claim must leave room for
    every later life of the name.
    """
    return known + SPARE_LIVES
