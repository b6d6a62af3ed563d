"""How an island enters a run: it founds the run, or takes its weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from atoll.errors import FoundingLost, NonFinite, Unreachable, UsageError
from atoll.exchange import Exchange, Frame
from atoll.island.base import IslandMemory
from atoll.island.fragment import IslandFragment
from atoll.island.progress import IslandCounters
from atoll.island.resume import EnteredIsland, ResumeReport, resume
from atoll.island.resume import fetch_state as fetch_state
from atoll.island.saved_state import SavedIsland
from atoll.protocol import JoinReply, JoinRequest
from atoll.runtime import Runtime
from atoll.weights import FragmentState, lay_out, terms_of
from atoll.weights.layout import first_non_finite
from atoll.wire import OuterValues

PublishConstants = Callable[[JoinReply], None]
"""Publishes the constants of a founder to its run."""


def enter(
    exchange: Exchange,
    memory: IslandMemory,
    request: JoinRequest,
    *,
    leaving: AbstractContextManager[object],
    saved: ResumeSource | None = None,
    publish_constants: PublishConstants | None = None,
) -> EnteredIsland:
    """Join, and return the reply with one `IslandFragment` per fragment.

    Afterwards the live weights are the run's, or those of the resumed checkpoint. On an
    error, or when SIGTERM ends it, the island is no member: it leaves within `leaving`,
    or its lease expires. A founder publishes its constants before the first weights.
    """
    while True:
        joined = exchange.join(request)
        try:
            if joined.is_founder and publish_constants is not None:
                publish_constants(joined)
            return _enter(exchange, memory, request, joined, saved)
        except FoundingLost:
            continue  # still a member: another island has founded the run, or it will
        except BaseException:
            with suppress(Unreachable), leaving:
                exchange.leave(joined.island, joined.incarnation)
            raise


@dataclass(frozen=True)
class ResumeSource:
    """A checkpoint's island, and the runtime for its updates in flight."""

    island: SavedIsland
    runtime: Runtime


def _enter(
    exchange: Exchange,
    memory: IslandMemory,
    request: JoinRequest,
    joined: JoinReply,
    saved: ResumeSource | None,
) -> EnteredIsland:
    layout = lay_out(request.model, joined.settings)
    memory.lay_out(layout, joined.settings)
    if saved is not None and not joined.is_founder:
        island = saved.island
        return resume(exchange, memory, joined, island, saved.runtime)
    counters, resumed = (
        _founder(joined, saved.island) if saved else (IslandCounters(), None)
    )
    slots = [_slot(exchange, memory, joined, index) for index in range(len(layout))]
    for slot in slots:
        slot.settle(counters.inner_steps, counters.tokens)
    return EnteredIsland(joined=joined, slots=slots, counters=counters, resumed=resumed)


def _founder(
    joined: JoinReply, saved: SavedIsland
) -> tuple[IslandCounters, ResumeReport]:
    """Return the counters and the report of an island that founds its run again."""
    if not saved.is_exact:
        raise UsageError(
            f"The run {joined.run!r} has no weights, and the checkpoint of island "
            f"{saved.island!r} has none either: they were the run's. "
            "Join the run that has them, or found this one without the checkpoint."
        )
    steps, tokens = saved.progress
    reason = "the run is empty: it is founded with the weights of the checkpoint"
    resumed = ResumeReport(is_exact=False, reason=reason, saved=saved.progress)
    counters = IslandCounters(
        inner_steps=steps, tokens=tokens, earlier_steps=steps, earlier_tokens=tokens
    )
    return counters, resumed


def _slot(
    exchange: Exchange, memory: IslandMemory, joined: JoinReply, index: int
) -> IslandFragment:
    state = None if joined.is_founder else fetch_state(exchange, index)
    slot = memory.begin(index, state)
    if joined.is_founder:
        exchange.publish(_founding(joined, slot, memory.whole(slot)))
    return slot


def state_frame(
    joined: JoinReply, fragment: int, state: FragmentState, outer: OuterValues
) -> Frame:
    """Return the frame with which this island publishes a fragment's state."""
    header, body = state.to_frame(
        run=joined.run,
        fragment=fragment,
        outer=outer,
        island=joined.island,
        incarnation=joined.incarnation,
    )
    return Frame(header, body)


def _founding(joined: JoinReply, slot: IslandFragment, state: FragmentState) -> Frame:
    """Return the frame that founds a fragment."""
    layout, anchor = slot.layout, state.anchor
    if (bad := first_non_finite(anchor)) is not None:
        raise NonFinite(
            f"{layout.name_at(bad)!r} holds {anchor[bad]}, and a run cannot be founded "
            "on that. Initialise the model again.",
            index=bad,
        )
    outer = terms_of(layout, joined.settings).outer
    return state_frame(joined, slot.index, state, outer)
