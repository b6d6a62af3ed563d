"""What goes with a fragment's state: who has counted, and what came before it."""

from __future__ import annotations

from atoll.exchange.bucket.documents import CountedProgress
from atoll.protocol.counted import CountedUpdates

ROSTERS = 2
"""Of each fragment: an island keeps no work that was sealed before them."""

BASES = 64
"""Earlier states of each fragment that a departing update may name."""


def counted_progress(
    counted: CountedUpdates, fragment: int
) -> tuple[CountedProgress, ...]:
    """Return what each island has counted in a fragment, by name."""
    return tuple(
        CountedProgress(
            island=island,
            round=found.round,
            inner_steps=found.inner_steps,
            tokens=found.tokens,
        )
        for island, fragments in sorted(counted.by_island.items())
        if (found := fragments[fragment])
    )
