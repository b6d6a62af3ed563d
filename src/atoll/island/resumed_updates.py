"""Updates that a checkpoint holds, as an island's memory takes them up again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from atoll.errors import UsageError
from atoll.island.saved import SavedFragment
from atoll.island.slot import Sealed, Slot


def resumed_update(index: int, saved: SavedFragment) -> Sealed | None:
    """Return a fragment's update in flight, as a checkpoint has it.

    Its number is below all that this life gives.
    """
    update = saved.update
    if update is None:
        return None
    return Sealed(
        number=-1 - index,
        round=update.round,
        base=update.base,
        inner_steps=update.inner_steps,
        tokens=update.tokens,
        weight=update.weight,
        arrival=Future(),
        is_awaited=update.is_awaited,
        residual_after=update.residual_after,
    )


@contextmanager
def remaking(slot: Slot, saved: SavedFragment) -> Iterator[Sealed]:
    """Let a slot be as it was when a saved update was being sealed.

    What was loaded minus what was there is the saved difference with the other sign,
    exactly: so the bytes are those that the dead life sent, if it did.
    """
    update = saved.update
    assert update is not None
    sealed = Sealed(
        round=update.round,
        base=-update.base,
        inner_steps=update.inner_steps,
        tokens=update.tokens,
        weight=update.weight,
        arrival=Future(),
    )
    now = slot.residual
    if now is not None and saved.residual is not None:
        slot.residual = saved.residual
    try:
        yield sealed
    finally:
        slot.residual = now
    update.residual_after = sealed.residual_after


def require_sizes(sizes: Sequence[int], saved: Sequence[SavedFragment]) -> None:
    """Return when saved vectors have these sizes.

    Raises:
        UsageError: they are of another model, or another part of it.
    """
    theirs = [_elements(each) for each in saved]
    if theirs != list(sizes):
        raise UsageError(
            f"The checkpoint has fragments of {theirs} elements, and the run of "
            f"{list(sizes)}: it is of another model, or of one that is spread otherwise"
            ". Give this island another directory."
        )


def _elements(saved: SavedFragment) -> int:
    vector = saved.vectors[0] if saved.vectors else saved.difference
    return 0 if vector is None else len(vector)
