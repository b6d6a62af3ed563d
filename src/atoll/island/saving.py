"""An island's own state at the end of an inner step, for a checkpoint.

Everything here is the thread that trains, while `still` keeps the background from
taking an outcome. Arrays are not copied: whoever saves them does, before it lets go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from atoll.island.held_back import HeldBack
from atoll.island.live import way_of
from atoll.island.saved import COUNTERS, SavedFragment, SavedIsland, SavedUpdate
from atoll.island.slot import Sealed, Slot
from atoll.island.tally import Tally
from atoll.island.view import ParameterView
from atoll.protocol import How, IslandState, JoinReply
from atoll.protocol.island_state import Book
from atoll.settings import SyncSection
from atoll.weights import FragmentLayout, adopt
from atoll.weights.layout import F32


@contextmanager
def still(slots: Sequence[Slot]) -> Iterator[None]:
    """Let no outcome be taken into the slots meanwhile."""
    with ExitStack() as held:
        for slot in slots:
            held.enter_context(slot.turn)
        yield


def save_island(
    joined: JoinReply,
    state: IslandState,
    slots: Sequence[Slot],
    tally: Tally,
    view: ParameterView,
    *,
    is_exact: bool,
) -> SavedIsland:
    """Return the island: as it stands if `is_exact`, else its work.

    One that waits for what an earlier life has left is saved as work.
    """
    is_exact = is_exact and all(slot.held_back is None for slot in slots)
    pairs = zip(slots, state.books, strict=True)
    fragments = [_standing(slot, book) for slot, book in pairs]
    saved = SavedIsland(
        run=joined.run,
        island=joined.island,
        incarnation=joined.incarnation,
        origin=slots[0].origin or joined.incarnation,
        step=state.step,
        inner_steps=tally.inner_steps,
        tokens=tally.tokens,
        before_steps=joined.inner_steps,
        before_tokens=joined.tokens,
        is_exact=is_exact,
        fragments=fragments,
        counters={name: getattr(tally, name) for name in COUNTERS},
    )
    if is_exact:
        return saved
    layouts = [slot.layout for slot in slots]
    saved = as_work(saved, layouts, view, joined.settings.sync)
    for slot, fragment in zip(slots, saved.fragments, strict=True):
        if slot.held_back is not None:
            _add_held_back(fragment, slot.held_back)
    return saved


def as_work(
    saved: SavedIsland,
    layouts: Sequence[FragmentLayout],
    view: ParameterView,
    sync: SyncSection,
) -> SavedIsland:
    """Return an island's work, from how it stands and the live weights."""
    work: list[SavedFragment] = []
    for index, (each, layout) in enumerate(zip(saved.fragments, layouts, strict=True)):
        local = np.empty(layout.elements, np.float32)
        view.read(index, local)
        work.append(_as_work(saved, each, layout, local, sync))
    return replace(saved, is_exact=False, fragments=work)


def _standing(slot: Slot, book: Book) -> SavedFragment:
    state = slot.state
    return SavedFragment(
        round=state.round,
        digest=state.digest,
        settled_steps=slot.settled_steps,
        settled_tokens=slot.settled_tokens,
        residual=slot.residual,
        update=_update(slot.sealed) if slot.sealed else None,
        vectors=state.vectors,
        count=state.count,
        book=book,
    )


def _update(sealed: Sealed) -> SavedUpdate:
    """Return an update; one whose outcome is known has no bytes any more."""
    outcome = sealed.outcome
    frame = sealed.frame if outcome is None else None
    return SavedUpdate(
        round=sealed.round,
        inner_steps=sealed.inner_steps,
        tokens=sealed.tokens,
        weight=sealed.weight,
        base=sealed.base,
        is_awaited=sealed.is_awaited,
        frame=frame,
        # What the codec leaves over is being made until the bytes are there.
        residual_after=sealed.residual_after if frame else None,
        arrival=outcome,
    )


def _as_work(
    saved: SavedIsland,
    fragment: SavedFragment,
    layout: FragmentLayout,
    local: F32,
    sync: SyncSection,
) -> SavedFragment:
    loaded = np.empty(layout.elements, np.float32)
    layout.load(fragment.vectors[0], loaded)
    update, settled = fragment.update, (fragment.settled_steps, fragment.settled_tokens)
    if update is not None and update.arrival is not None:
        settled = _settled(saved, fragment, update)
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
        book=None,
    )


def _take(
    fragment: SavedFragment,
    update: SavedUpdate,
    layout: FragmentLayout,
    local: F32,
    sync: SyncSection,
) -> None:
    """Do to `local` what the outcome will, when its time comes."""
    assert update.arrival is not None
    way = way_of(update.arrival.how, sync)
    anchor = fragment.vectors[0]
    adopt(layout, way, anchor, local, update.base, keep_local=sync.keep_local)
    layout.load(local.copy(), local)


def _add_held_back(fragment: SavedFragment, held: HeldBack) -> None:
    """Add the work that waits for an earlier life's update, and how to tell that."""
    assert fragment.difference is not None
    fragment.difference += held.difference
    fragment.residual = held.residual
    fragment.settled_steps, fragment.settled_tokens = held.settled
    if held.frame is not None and held.at_seal is not None:
        fragment.update = SavedUpdate(
            round=held.round,
            inner_steps=held.at_seal_settled[0],
            tokens=held.at_seal_settled[1],
            weight=held.frame.header.weight,
            base=held.at_seal,
            frame=held.frame,
            residual_after=held.residual_after,
        )


def _settled(
    saved: SavedIsland, fragment: SavedFragment, update: SavedUpdate
) -> tuple[int, int]:
    """Return the inner steps and tokens that are settled once the outcome is taken."""
    assert update.arrival is not None
    match update.arrival.how:
        case How.ADOPT | How.REBASE:
            return update.inner_steps, update.tokens
        case How.CARRY:
            return fragment.settled_steps, fragment.settled_tokens
        case How.DROP | How.REFUSE:
            return saved.inner_steps, saved.tokens
