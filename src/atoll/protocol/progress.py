"""Progress of islands: their counted updates, and bounds of their claims.

`CountedUpdates` has the last counted update of each island and fragment.

Weights and the end of a run depend on numbers that islands report about themselves:
progress, weight and incarnation. Every exchange checks these claims with the functions
below, before a claim can change a round, a sum or a record. All bounds are generous:
they refuse the impossible, not the unusual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from atoll.settings import RunSettings
from atoll.wire import Header, Roster


@dataclass(frozen=True, kw_only=True)
class CountedWork:
    """The last update of an island that counted in a fragment."""

    round: int
    inner_steps: int
    tokens: int
    incarnation: int = field(default=0, compare=False)
    """The incarnation that published it; 0: unknown."""


@dataclass(frozen=True)
class CountedUpdates:
    """The last counted update of each island, for every fragment."""

    by_island: Mapping[str, tuple[CountedWork | None, ...]] = field(
        default_factory=dict
    )

    @cached_property
    def tokens(self) -> int:
        """The sum over islands of the lowest counted progress."""
        return sum(
            min((work.tokens if work else 0) for work in fragments)
            for fragments in self.by_island.values()
        )

    def of(self, island: str) -> tuple[CountedWork, ...]:
        """Return the last counted update of an island in each fragment that has one."""
        return tuple(work for work in self.by_island.get(island, ()) if work)

    def last(self, island: str, *, fragment: int) -> CountedWork | None:
        """Return the last counted update of an island in one fragment, if any."""
        fragments = self.by_island.get(island, ())
        return fragments[fragment] if fragment < len(fragments) else None

    def by_fragment(
        self, island: str, num_fragments: int
    ) -> tuple[CountedWork | None, ...]:
        """Return the last counted update of an island, fragment by fragment."""
        return self.by_island.get(island, (None,) * num_fragments)

    def adding(
        self, roster: Roster, *, fragment: int, round: int, num_fragments: int
    ) -> CountedUpdates:
        """Return this with the roster of one more round."""
        by_island = dict(self.by_island)
        for entry in roster.counted:
            fragments = list(by_island.get(entry.island, (None,) * num_fragments))
            fragments[fragment] = CountedWork(
                round=round,
                inner_steps=entry.inner_steps,
                tokens=entry.tokens,
                incarnation=entry.incarnation,
            )
            by_island[entry.island] = tuple(fragments)
        return CountedUpdates(by_island)


SPARE_ROUNDS = 16
WINDOWS_PER_ROUND = 4
"""An island that loses its lease trains some windows again, so its own count of inner
steps may exceed the schedule, but not by more than this factor."""

SPARE_LIVES = 2**20
"""How far beyond the latest known incarnation a returning life may claim to be."""

WINDOWS_AHEAD = 3
"""An island waits at its next send point, and stops at most a window later."""


def progress_fault(
    header: Header, *, counted: CountedWork | None, settings: RunSettings
) -> str:
    """Return why the progress or weight of an update cannot be true, or "".

    `counted` is the last counted update of the same island and fragment.
    """
    progress = header.progress
    most_steps = max_inner_steps(header.round, settings)
    if progress.inner_steps > most_steps:
        return (
            f"progress: inner_steps={progress.inner_steps} exceeds {most_steps}, the "
            f"most that an island can have made by round {header.round}"
        )
    # Tokens are reported before the optimizer step that trains on them.
    most_tokens = (progress.inner_steps + 1) * settings.limits.max_step_tokens
    if progress.tokens > most_tokens:
        return (
            f"progress: tokens={progress.tokens} exceeds {most_tokens}, which is "
            f"limits.max_step_tokens={settings.limits.max_step_tokens} for each of "
            f"{progress.inner_steps} + 1 inner steps"
        )
    return _weight_fault(header, counted, settings)


def _weight_fault(
    header: Header, counted: CountedWork | None, settings: RunSettings
) -> str:
    if settings.outer.weight != "tokens":
        if header.weight != 1:
            return f"weight: {header.weight} is not 1, and outer.weight is 'uniform'"
        return ""
    before = 0
    if counted and counted.incarnation == header.incarnation:
        # A new incarnation joins before an earlier one's last update counts, so its
        # tokens may begin below those of that update.
        before = counted.tokens
    max_weight = max(1, header.progress.tokens - before)
    if header.weight > max_weight:
        return (
            f"weight: {header.weight} exceeds {max_weight}, the tokens since the "
            "island's last counted update"
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

    Each one may be at most `SPARE_LIVES` after the one before it. An incarnation
    further ahead was not reached by joins, and is ignored.
    """
    latest = 0
    for incarnation in sorted(claimed):
        if incarnation > max_incarnation(latest):
            break
        latest = incarnation
    return latest


def max_incarnation(latest: int) -> int:
    """Return the highest incarnation that an island may claim after `latest`.

    The owner of a name takes the next incarnation, so a claim must leave room for
    every later incarnation of the name.
    """
    return latest + SPARE_LIVES
