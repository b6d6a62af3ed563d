"""What a leader tells the others of fragments that are saved: all but their vectors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from atoll.island.arrivals import Arrival, Summons
from atoll.island.held_back import HeldBack
from atoll.island.saved import SavedFragment, SavedIsland
from atoll.island.slot import Sealed, Slot
from atoll.protocol import How
from atoll.protocol.island_rejoin import Left
from atoll.wire import Verdict

Outline = dict[str, Any]


def outline(slot: Slot) -> Outline:
    """Return what the other ranks must know of a leader's slot."""
    return {"update": _update(slot.sealed), "held": _held(slot.held_back)}


def filled(
    own: Slot,
    said: Outline,
    sealed: Callable[[int], Sealed],
    saved: SavedFragment | None,
) -> Slot:
    """Return a rank's slot as the leader's outline says, with its own vectors.

    `sealed` finds an update by its number, and `saved` is the rank's own of a
    checkpoint that the leader may hold back.
    """
    update, held = said["update"], said["held"]
    return replace(
        own,
        sealed=_filled_update(sealed(update["number"]), update) if update else None,
        held_back=_filled_held(held, saved) if held and saved else None,
    )


def part_of_island(fragments: list[SavedFragment]) -> SavedIsland:
    """Return a rank's vectors as a checkpoint keeps them; the leader's has the rest."""
    return SavedIsland(
        run="",
        island="",
        incarnation=0,
        origin=0,
        step=0,
        inner_steps=0,
        tokens=0,
        before_steps=0,
        before_tokens=0,
        is_exact=False,
        fragments=fragments,
    )


def _update(sealed: Sealed | None) -> Outline | None:
    if sealed is None:
        return None
    outcome = sealed.outcome
    return {
        "number": sealed.number,
        "round": sealed.round,
        "is_awaited": sealed.is_awaited,
        "has_bytes": sealed.has_bytes,
        "how": outcome.how.value if outcome else None,
    }


def _filled_update(own: Sealed, said: Outline) -> Sealed:
    arrival: Future[Arrival | Summons] = Future()
    if said["how"] is not None:
        arrival.set_result(
            Arrival(
                how=How(said["how"]),
                verdict=Verdict.COUNTED,
                reason="",
                through=said["round"],
                position=None,
            )
        )
    return replace(
        own,
        round=said["round"],
        is_awaited=said["is_awaited"],
        is_part=said["has_bytes"],
        arrival=arrival,
    )


def _held(held: HeldBack | None) -> Outline | None:
    if held is None:
        return None
    left = held.left.value if held.left else None
    return {"round": held.round, "most": held.most.value, "left": left}


def _filled_held(said: Outline, saved: SavedFragment) -> HeldBack:
    return HeldBack(
        round=said["round"],
        saved=saved,
        most=Left(said["most"]),
        progress=(0, 0),
        left=Left(said["left"]) if said["left"] else None,
    )
