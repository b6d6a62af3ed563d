"""How far each island's work has counted, fragment by fragment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from atoll.wire import Roster


@dataclass(frozen=True, kw_only=True)
class Counted:
    """The last update of an island that counted in a fragment."""

    round: int
    inner_steps: int
    tokens: int
    incarnation: int = field(default=0, compare=False)
    """Which life of the island it was of; 0: not known."""


@dataclass(frozen=True)
class CountedUpdates:
    """The last counted update of each island, for every fragment."""

    by_island: Mapping[str, tuple[Counted | None, ...]] = field(default_factory=dict)

    @cached_property
    def tokens(self) -> int:
        """The sum over islands of the lowest counted progress."""
        return sum(
            min((each.tokens if each else 0) for each in fragments)
            for fragments in self.by_island.values()
        )

    def of(self, island: str) -> tuple[Counted, ...]:
        """Return what has counted of an island, of whatever fragment."""
        return tuple(each for each in self.by_island.get(island, ()) if each)

    def last(self, island: str, *, fragment: int) -> Counted | None:
        """Return the last counted update of an island in one fragment, if any."""
        fragments = self.by_island.get(island, ())
        return fragments[fragment] if fragment < len(fragments) else None

    def by_fragment(
        self, island: str, num_fragments: int
    ) -> tuple[Counted | None, ...]:
        """Return what has counted of an island last, fragment by fragment."""
        return self.by_island.get(island, (None,) * num_fragments)

    def adding(
        self, roster: Roster, *, fragment: int, round: int, num_fragments: int
    ) -> CountedUpdates:
        """Return this with the roster of one more round."""
        by_island = dict(self.by_island)
        for entry in roster.counted:
            fragments = list(by_island.get(entry.island, (None,) * num_fragments))
            fragments[fragment] = Counted(
                round=round,
                inner_steps=entry.inner_steps,
                tokens=entry.tokens,
                incarnation=entry.incarnation,
            )
            by_island[entry.island] = tuple(fragments)
        return CountedUpdates(by_island)
