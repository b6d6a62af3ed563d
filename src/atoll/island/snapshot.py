"""A snapshot of an island's state at the end of an inner step, for a checkpoint.

All functions run in the training thread, while `pause_outcomes` keeps the background
threads from applying an outcome. Arrays are not copied: the caller copies them before
it releases the threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from atoll.algorithm.schedule import Stride
from atoll.island.base import ParameterView
from atoll.island.deal import SavedDeal
from atoll.island.fragment import (
    HeldBackWork,
    IslandFragment,
    UpdateInFlight,
    adopt_mode,
)
from atoll.island.progress import IslandCounters
from atoll.island.saved_state import (
    COUNTERS,
    SavedFragment,
    SavedIsland,
    SavedUpdate,
    difference_left,
    residual_left,
)
from atoll.protocol import JoinReply, WorkDecision
from atoll.settings import SyncSection
from atoll.weights import FragmentLayout, adopt
from atoll.weights.layout import F32


@contextmanager
def pause_outcomes(slots: Sequence[IslandFragment]) -> Iterator[None]:
    """Keep the background threads from applying outcomes within the block."""
    with ExitStack() as locks:
        for slot in slots:
            locks.enter_context(slot.turn)
        yield


def save_island(
    joined: JoinReply,
    fragments: list[SavedFragment],
    counters: IslandCounters,
    *,
    stride: Stride,
    is_exact: bool,
    origin: int = 0,
    deal: SavedDeal | None = None,
) -> SavedIsland:
    """Return the island for a checkpoint, of its fragments' exact state or work.

    Without fragments it has its counters alone.
    """
    return SavedIsland(
        run=joined.run,
        island=joined.island,
        incarnation=joined.incarnation,
        origin=origin or joined.incarnation,
        step=stride.step,
        inner_steps=counters.inner_steps,
        tokens=counters.tokens,
        before_steps=joined.inner_steps,
        before_tokens=joined.tokens,
        is_exact=is_exact,
        fragments=fragments,
        counters={name: getattr(counters, name) for name in COUNTERS},
        stride=None if stride.is_full else stride,
        deal=deal,
    )


def can_save_exactly(slots: Sequence[IslandFragment]) -> bool:
    """Return whether an island can be saved exactly.

    An island with held-back work of an earlier incarnation is saved as work.
    """
    return all(slot.held_back is None for slot in slots)


def fragments_of(
    slots: Sequence[IslandFragment],
    view: ParameterView,
    sync: SyncSection,
    *,
    trained: tuple[int, int],
    is_exact: bool,
) -> list[SavedFragment]:
    """Return the fragments' exact state, or their work. Arrays are not copied.

    `trained` are the inner steps and tokens of this incarnation.
    """
    standing = [exact_state(slot) for slot in slots]
    if is_exact:
        return standing
    layouts = [slot.layout for slot in slots]
    work = as_work(standing, layouts, view, sync, trained=trained)
    for slot, fragment in zip(slots, work, strict=True):
        if slot.held_back is not None:
            add_held_back(fragment, slot.held_back)
    return work


def as_work(
    fragments: Sequence[SavedFragment],
    layouts: Sequence[FragmentLayout],
    view: ParameterView,
    sync: SyncSection,
    *,
    trained: tuple[int, int],
) -> list[SavedFragment]:
    """Return the work of fragments, from their exact state and the live weights."""
    work: list[SavedFragment] = []
    for index, (fragment, layout) in enumerate(zip(fragments, layouts, strict=True)):
        local = np.empty(layout.elements, np.float32)
        view.read(index, local)
        work.append(_as_work(fragment, layout, local, sync, trained))
    return work


def exact_state(slot: IslandFragment) -> SavedFragment:
    """Return the exact state of a fragment."""
    state = slot.state
    return SavedFragment(
        index=slot.index,
        round=state.round,
        digest=state.digest,
        settled_steps=slot.settled_steps,
        settled_tokens=slot.settled_tokens,
        residual=slot.residual,
        update=_update(slot.sealed) if slot.sealed else None,
        vectors=state.vectors,
        count=state.count,
    )


def _update(sealed: UpdateInFlight) -> SavedUpdate:
    """Return an update; its frame is gone once its outcome is known."""
    outcome = sealed.applied
    is_made = outcome is None and sealed.has_bytes
    return SavedUpdate(
        round=sealed.round,
        inner_steps=sealed.inner_steps,
        tokens=sealed.tokens,
        weight=sealed.weight,
        base=sealed.base,
        is_awaited=sealed.is_awaited,
        frame=sealed.frame if is_made else None,
        # The sender thread writes the new residual until the frame is made.
        residual_after=sealed.residual_after if is_made else None,
        arrival=outcome,
    )


def _as_work(
    fragment: SavedFragment,
    layout: FragmentLayout,
    local: F32,
    sync: SyncSection,
    trained: tuple[int, int],
) -> SavedFragment:
    loaded = np.empty(layout.elements, np.float32)
    layout.load(fragment.vectors[0], loaded)
    update, settled = fragment.update, (fragment.settled_steps, fragment.settled_tokens)
    if update is not None and update.arrival is not None:
        settled = _settled(fragment, update, trained)
        _take(fragment, update, layout, local, sync)
        update = None
    elif update is not None:
        at_seal = update.base - loaded
        update = None if update.is_awaited else replace(update, base=at_seal)
    np.subtract(local, loaded, out=local)
    return replace(
        fragment,
        settled_steps=settled[0],
        settled_tokens=settled[1],
        update=update,
        difference=local,
        vectors=(),
        sync_state=None,
    )


def _take(
    fragment: SavedFragment,
    update: SavedUpdate,
    layout: FragmentLayout,
    local: F32,
    sync: SyncSection,
) -> None:
    """Change `local` as the outcome will change the live weights."""
    assert update.arrival is not None
    mode = adopt_mode(update.arrival.decision, sync)
    anchor = fragment.vectors[0]
    adopt(layout, mode, anchor, local, update.base, keep_local=sync.keep_local)
    layout.load(local.copy(), local)


def add_held_back(fragment: SavedFragment, held_back: HeldBackWork) -> None:
    """Add held-back work, and the update whose outcome decides about it.

    Once the outcome is known, only the work that it did not count is added.
    """
    assert fragment.difference is not None
    difference = difference_left(held_back.saved, held_back.remains)
    if difference is not None:
        fragment.difference += difference
    fragment.settled_steps, fragment.settled_tokens = held_back.settled
    if held_back.remaining_after is not None:
        return  # the residual is right already
    fragment.residual = residual_left(held_back.saved, held_back.remains)
    if held_back.may_stand:
        fragment.update = held_back.saved.update


def _settled(
    fragment: SavedFragment, update: SavedUpdate, trained: tuple[int, int]
) -> tuple[int, int]:
    """Return the inner steps and tokens that are settled once the outcome is taken."""
    assert update.arrival is not None
    match update.arrival.decision:
        case WorkDecision.ADOPT | WorkDecision.REBASE:
            return update.inner_steps, update.tokens
        case WorkDecision.CARRY:
            return fragment.settled_steps, fragment.settled_tokens
        case WorkDecision.DROP | WorkDecision.REFUSE:
            return trained
