"""An update that was being sealed when its island was saved, made again from work."""

from __future__ import annotations

from dataclasses import replace

from atoll.errors import NonFinite
from atoll.exchange import Frame
from atoll.island.memory import Memory
from atoll.island.saved import SavedFragment, SavedUpdate
from atoll.island.seeds import update_seed
from atoll.island.slot import Slot
from atoll.protocol import JoinReply
from atoll.wire import Header, Kind, Progress, with_body


def remade(
    joined: JoinReply, memory: Memory, slot: Slot, saved: SavedFragment
) -> SavedFragment:
    """Return a fragment whose saved update has its bytes."""
    update = saved.update
    if update is None or update.frame is not None:
        return saved
    seed = update_seed(joined.run, slot.index, update.round, joined.island)
    decay = joined.settings.wire.error_feedback_decay
    try:
        body, norm = memory.remake(slot, saved, seed=seed, decay=decay)
    except NonFinite:
        return replace(saved, update=None)  # it was refused where it was made
    header = _header(joined, slot, saved, update, seed=seed, norm=norm)
    frame = Frame(with_body(header, body), body)
    return replace(saved, update=replace(update, frame=frame))


def _header(
    joined: JoinReply,
    slot: Slot,
    saved: SavedFragment,
    update: SavedUpdate,
    *,
    seed: int,
    norm: float,
) -> Header:
    return Header(
        kind=Kind.UPDATE,
        run=joined.run,
        fragment=slot.index,
        round=update.round,
        island=joined.island,
        incarnation=joined.incarnation,
        epoch=joined.epoch,
        base=saved.digest,
        codec=slot.up.name,
        seed=seed,
        elements=slot.layout.elements,
        weight=update.weight,
        norm=norm,
        progress=Progress(inner_steps=update.inner_steps, tokens=update.tokens),
    )
