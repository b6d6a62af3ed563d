"""What is left of a fragment's saved work, once rosters have said what counted."""

from __future__ import annotations

from atoll.island.saved import SavedFragment
from atoll.protocol.island_rejoin import Left
from atoll.weights.layout import F32

REMAINS = (Left.ALL, Left.SINCE)
"""When anything is left."""


def difference_left(saved: SavedFragment, left: Left) -> F32 | None:
    """Return what is to be added to the live weights."""
    if left is Left.ALL:
        return saved.difference
    if left is not Left.SINCE:
        return None
    assert saved.update is not None
    assert saved.difference is not None
    return saved.difference - saved.update.base


def residual_left(saved: SavedFragment, left: Left) -> F32 | None:
    """Return what the codec has left over and no round has."""
    if left is Left.ALL:
        return saved.residual
    if left is not Left.SINCE:
        return None
    assert saved.update is not None
    return saved.update.residual_after


def settled_left(
    saved: SavedFragment, left: Left, progress: tuple[int, int]
) -> tuple[int, int]:
    """Return the inner steps and tokens that no further update has to hold.

    `progress` are those of all lives.
    """
    if left is Left.ALL:
        return saved.settled_steps, saved.settled_tokens
    if left is Left.SINCE:
        assert saved.update is not None
        return saved.update.inner_steps, saved.update.tokens
    return progress
