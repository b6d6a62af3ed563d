"""Where an island's machine begins, from what joining has brought."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.island.slot import Slot
from atoll.protocol import IslandState, JoinReply, Plan, Position, join_at


def plan_of(joined: JoinReply, slots: Sequence[Slot]) -> Plan:
    """Return what is due when, as the run's settings say."""
    sync = joined.settings.sync
    return Plan(
        sync_every=sync.sync_every,
        num_fragments=sync.num_fragments,
        overlap_steps=sync.overlap_steps,
        has_buffers=slots[-1].layout.is_buffers,
    )


def begin(joined: JoinReply, slots: Sequence[Slot], plan: Plan) -> IslandState:
    """Return the machine's first state."""
    return join_at(_position_of(joined, slots), plan, _still_spoken_for(joined, slots))


def _position_of(joined: JoinReply, slots: Sequence[Slot]) -> Position:
    """Where this island starts: a state may be newer than the join reply."""
    position = joined.position
    return Position(
        step=position.step,
        rounds=tuple(slot.state.round + 1 for slot in slots),
        last_round=position.last_round,
        tokens=position.tokens,
    )


def _still_spoken_for(joined: JoinReply, slots: Sequence[Slot]) -> tuple[int, ...]:
    """Return what an earlier life has published for the round that is open here."""
    opened = joined.position.rounds
    return tuple(
        index
        for index in joined.spoken_for
        if slots[index].state.round + 1 == opened[index]
    )
