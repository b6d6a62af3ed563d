"""Resuming an island from a checkpoint: exactly, or by joining with its saved work.

*Exact*: the island continues with the bytes of the checkpoint, and makes the same
rounds again. *Rejoin*: the saved work is put on the present anchor of the run. The
rosters of the rounds decide which part of it has counted already.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

from atoll import wire
from atoll.algorithm.schedule import Stride
from atoll.data import Ask
from atoll.errors import OutcomeLost, Refused, UsageError
from atoll.exchange import Exchange, Frame
from atoll.exchange.base import Dealer
from atoll.island.base import IslandMemory
from atoll.island.deal import SavedDeal
from atoll.island.fragment import HeldBackWork, IslandFragment, UpdateInFlight
from atoll.island.progress import IslandCounters
from atoll.island.saved_state import (
    COUNTERS,
    REMAINS,
    SavedFragment,
    SavedIsland,
    SavedUpdate,
    settled_left,
)
from atoll.protocol import IslandState, JoinReply
from atoll.protocol.island import (
    CountedSince,
    RemainingWork,
    counted_in,
    remaining_work,
)
from atoll.runtime import Runtime
from atoll.weights import FragmentState


@dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """The parts of a checkpoint that were resumed, for messages and data cursors."""

    is_exact: bool
    reason: str = ""
    """Why the resume is not exact, though the checkpoint would have allowed it."""

    saved: tuple[int, int] = (0, 0)
    """Inner steps and tokens of all incarnations up to the checkpoint."""

    counted: tuple[int, int] = (0, 0)
    """Inner steps and tokens that the run has counted, in any fragment."""

    lost: tuple[int, int] = (0, 0)
    """Those of the checkpoint that are lost, in the fragment that loses most."""


@dataclass(kw_only=True)
class EnteredIsland:
    """An island that has entered a run."""

    joined: JoinReply
    slots: list[IslandFragment]
    state: IslandState | None = None
    """The machine's state; None: that of a new island."""

    stride: Stride | None = None
    """None: that of a new island, with the window of the join reply."""

    counters: IslandCounters = field(default_factory=IslandCounters)
    resumed: ResumeReport | None = None
    deal: SavedDeal | None = None
    """The rows of the restored work, or all rows of an island that resumes exactly."""


def resume(
    exchange: Exchange,
    memory: IslandMemory,
    joined: JoinReply,
    saved: SavedIsland,
    runtime: Runtime,
) -> EnteredIsland:
    """Return the island of a checkpoint as a member of its run.

    If the resume is exact, the live weights are the checkpoint's; otherwise they are
    the anchor plus the saved work that has not counted.

    Raises:
        UsageError: the checkpoint belongs to another run, or another model.
    """
    _require_same_run(joined, saved)
    if not saved.fragments:
        return _resume_counters(exchange, memory, joined, saved)
    memory.require_fitting(saved.fragments)
    if has_lost_rows(exchange, joined, saved):
        return _without_work(exchange, memory, joined, saved)
    reason = ""
    if saved.is_exact:
        reason = _why_not_exact(exchange, joined, saved)
        if not reason:
            return _exact(memory, joined, saved, runtime)
        saved = memory.as_work(saved)
    return _rejoined(exchange, memory, joined, saved, reason)


def _require_same_run(joined: JoinReply, saved: SavedIsland) -> None:
    if saved.run != joined.run:
        raise UsageError(
            f"The checkpoint is of run {saved.run!r}, and this is {joined.run!r}. "
            "Give this run another directory, or join the run of the checkpoint."
        )


def has_lost_rows(exchange: Exchange, joined: JoinReply, saved: SavedIsland) -> bool:
    """Return whether the run has dealt the rows of the saved work to other islands.

    They are free once an island has left without this work. The run refuses an update
    of such rows, so a claim is repeated: without turns, all before it were released.
    """
    deal = saved.deal
    if deal is None or not joined.last_claim:
        return False
    if deal.number > joined.last_claim:
        return True  # the run has lost the claim
    number = max(1, deal.number)
    ask = Ask(island=joined.island, incarnation=joined.incarnation, number=number)
    try:
        return not cast(Dealer, exchange).claim(ask).spans
    except Refused:
        return True  # a claim that is no longer kept


def _without_work(
    exchange: Exchange, memory: IslandMemory, joined: JoinReply, saved: SavedIsland
) -> EnteredIsland:
    """Return an island that takes the anchor: others train the rows of its work."""
    entered = _resume_counters(exchange, memory, joined, saved)
    if saved.is_exact and entered.resumed is not None:
        reason = "it had left, and the run deals the rows of its work to all islands"
        entered.resumed = replace(entered.resumed, reason=reason)
    return entered


def _why_not_exact(exchange: Exchange, joined: JoinReply, saved: SavedIsland) -> str:
    """Return why the resume cannot be exact; empty if it can."""
    if joined.settings.sync.is_async:
        return "the rounds of an asynchronous run do not pass at the same steps again"
    for index, fragment in enumerate(saved.fragments):
        last = joined.position.rounds[index] - 1
        if fragment.round > last:
            return (
                f"fragment {index} was saved after round {fragment.round}, and the run "
                f"has only reached round {last}"
            )
        if fragment.round < last:
            base = _base_of_kept(exchange, index, fragment.round + 1)
        else:
            base = fetch_state(exchange, index).digest
        if base is None:
            return (
                f"the outcome of round {fragment.round + 1} of fragment {index} is "
                "no longer stored"
            )
        if base != fragment.digest:
            return f"the run has another history since round {fragment.round}"
    return ""


def _base_of_kept(exchange: Exchange, fragment: int, round: int) -> bytes | None:
    """Return the base of a round; None if its outcome cannot be fetched."""
    try:
        outcome = exchange.outcome(fragment, round, wait_s=0.0)
    except OutcomeLost:
        return None
    if outcome is None or not outcome.has_body:
        return None
    return outcome.agreed.header.base


def _exact(
    memory: IslandMemory,
    joined: JoinReply,
    saved: SavedIsland,
    runtime: Runtime,
) -> EnteredIsland:
    # Progress is part of an update: a repeated update must have the same.
    joined = replace(joined, inner_steps=saved.before_steps, tokens=saved.before_tokens)
    slots = [
        _slot(memory, joined, fragment, saved.origin, runtime)
        for fragment in saved.fragments
    ]
    sync_states = tuple(
        fragment.sync_state
        for fragment in saved.fragments
        if fragment.sync_state is not None
    )
    sync_every = joined.settings.sync.sync_every
    stride = saved.stride or Stride(sync_every, sync_every, since=saved.step)
    return EnteredIsland(
        joined=joined,
        slots=slots,
        state=IslandState(
            step=stride.step,
            sync_states=sync_states,
            last_round=joined.position.last_round,
        ),
        stride=stride,
        counters=_counters(saved),
        resumed=ResumeReport(
            is_exact=True, saved=saved.progress, counted=_counted(joined, saved)
        ),
        deal=saved.deal,
    )


def _counters(saved: SavedIsland) -> IslandCounters:
    counters = IslandCounters(inner_steps=saved.inner_steps, tokens=saved.tokens)
    for name in COUNTERS:
        setattr(counters, name, saved.counters.get(name, 0))
    return counters


def _rejoined_tally(
    progress: tuple[int, int], earlier: tuple[int, int]
) -> IslandCounters:
    return IslandCounters(
        inner_steps=progress[0],
        tokens=progress[1],
        earlier_steps=earlier[0],
        earlier_tokens=earlier[1],
    )


def _minus(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    return left[0] - right[0], left[1] - right[1]


def _slot(
    memory: IslandMemory,
    joined: JoinReply,
    fragment: SavedFragment,
    origin: int,
    runtime: Runtime,
) -> IslandFragment:
    """Return a fragment in its saved state."""
    index = fragment.index
    opened = joined.position.rounds[index]
    counted = joined.counted[index] if joined.counted else None
    slot = memory.resume(fragment)
    slot.over_through = opened - 1
    slot.counted_through = counted.round if counted else 0
    slot.origin = origin
    if index in joined.spoken_for:
        slot.counted_through = opened  # it has an update already, and takes no other
    slot.settle(fragment.settled_steps, fragment.settled_tokens)
    if fragment.update is not None:
        assert slot.sealed is not None
        slot.sealed.arrival = runtime.future()
        _put_bytes(slot.sealed, joined, fragment.update)
    return slot


def _put_bytes(sealed: UpdateInFlight, joined: JoinReply, saved: SavedUpdate) -> None:
    """Give an update in flight its saved frame and outcome, if it has them."""
    if saved.frame is not None:
        header = replace(saved.frame.header, incarnation=joined.incarnation)
        sealed.frame = Frame(header, saved.frame.body)
    if saved.arrival is not None:
        sealed.arrival.set_result(saved.arrival)


def _resume_counters(
    exchange: Exchange,
    memory: IslandMemory,
    joined: JoinReply,
    saved: SavedIsland,
) -> EnteredIsland:
    """Return an island that takes the anchor, and has saved its counters only.

    The trainer hooks save no work of an island of several ranks: it is lost.
    """
    counted = _counted(joined, saved)
    steps, tokens = saved.progress
    progress = (max(steps, counted[0]), max(tokens, counted[1]))
    slots = [
        memory.begin(index, fetch_state(exchange, index))
        for index in range(len(joined.position.rounds))
    ]
    for slot in slots:
        slot.settle(*progress)
    return EnteredIsland(
        joined=replace(joined, inner_steps=0, tokens=0),
        slots=slots,
        counters=_rejoined_tally(
            progress, _minus(progress, _minus(counted, saved.earlier))
        ),
        resumed=ResumeReport(
            is_exact=False,
            saved=saved.progress,
            counted=counted,
            lost=_minus(progress, counted),
        ),
    )


def _rejoined(
    exchange: Exchange,
    memory: IslandMemory,
    joined: JoinReply,
    saved: SavedIsland,
    reason: str,
) -> EnteredIsland:
    saved_steps, saved_tokens = saved.progress
    counted = _counted(joined, saved)
    progress = (max(saved_steps, counted[0]), max(saved_tokens, counted[1]))
    slots: list[IslandFragment] = []
    rejoined: list[RejoinedWork] = []
    for fragment in _cumulative(saved):
        slot = memory.begin(fragment.index, fetch_state(exchange, fragment.index))
        rejoined.append(
            rejoin(
                exchange,
                memory,
                joined,
                slot,
                fragment,
                progress=progress,
            )
        )
        slots.append(slot)
    earlier = saved.earlier
    if all(work.remaining is RemainingWork.LOST for work in rejoined):
        # The run has another history: continue from the counts it has of this island.
        earlier = _minus(progress, _minus(counted, saved.earlier))
    lost = max(
        [
            (
                saved_steps - fragment.settled_steps,
                saved_tokens - fragment.settled_tokens,
            )
            for fragment, work in zip(_cumulative(saved), rejoined, strict=True)
            if work.remaining is RemainingWork.LOST
        ],
        default=(0, 0),
    )
    return EnteredIsland(
        joined=replace(joined, inner_steps=0, tokens=0),
        slots=slots,
        counters=_rejoined_tally(progress, earlier),
        resumed=ResumeReport(
            is_exact=False,
            reason=reason,
            saved=saved.progress,
            counted=counted,
            lost=lost,
        ),
        deal=_rows_left(saved, rejoined),
    )


def _rows_left(saved: SavedIsland, rejoined: list[RejoinedWork]) -> SavedDeal | None:
    """Return the rows of the saved work that is added again, or may be."""
    if saved.deal is None:
        return None
    since = [work.settled_steps for work in rejoined if work.remaining in REMAINS]
    steps = min(since, default=None)
    return saved.deal.work_since(steps, before_steps=saved.before_steps)


def _cumulative(saved: SavedIsland) -> list[SavedFragment]:
    """Return the fragments with counts over all incarnations of the island."""
    steps, tokens = saved.before_steps, saved.before_tokens
    return [
        replace(
            fragment,
            settled_steps=fragment.settled_steps + steps,
            settled_tokens=fragment.settled_tokens + tokens,
            update=_cumulated(fragment.update, steps, tokens),
        )
        for fragment in saved.fragments
    ]


def _cumulated(
    update: SavedUpdate | None, steps: int, tokens: int
) -> SavedUpdate | None:
    if update is None:
        return None
    return replace(
        update, inner_steps=update.inner_steps + steps, tokens=update.tokens + tokens
    )


def _counted(joined: JoinReply, saved: SavedIsland) -> tuple[int, int]:
    """Return the inner steps and tokens that have counted, in any fragment.

    They include those from before the run began, as the island's counters do.
    """
    counted = [progress for progress in joined.counted if progress is not None]
    steps = max([progress.inner_steps for progress in counted], default=0)
    tokens = max([progress.tokens for progress in counted], default=0)
    earlier_steps, earlier_tokens = saved.earlier
    return (
        max(steps, joined.inner_steps) + earlier_steps,
        max(tokens, joined.tokens) + earlier_tokens,
    )


@dataclass(frozen=True)
class RejoinedWork:
    """The part of one fragment's saved work that remains, and the settled counts."""

    remaining: RemainingWork
    settled_steps: int
    settled_tokens: int


def rejoin(
    exchange: Exchange,
    memory: IslandMemory,
    joined: JoinReply,
    slot: IslandFragment,
    saved: SavedFragment,
    *,
    progress: tuple[int, int],
) -> RejoinedWork:
    """Add the saved work of a fragment that has not counted to the slot's anchor.

    `progress` counts the inner steps and tokens of all incarnations, as the slot does
    afterwards.
    """
    if saved.update is not None and saved.update.frame is None:
        saved = replace(saved, update=None)  # of 0.1.0: saved while it was being sealed
    if joined.settings.sync.is_async and saved.update is not None:
        memory.unseal(slot, saved)
    history = _RoundHistory(exchange, slot.index, joined.island, slot.state)
    remaining = _remaining(history, joined, slot, saved)
    settled = settled_left(saved, remaining, progress)
    opened = joined.position.rounds[slot.index]
    is_spoken_for = slot.index in joined.spoken_for and slot.state.round + 1 == opened
    if is_spoken_for and remaining in REMAINS:
        slot.held_back = HeldBackWork(
            round=opened, saved=saved, remaining_before=remaining, progress=progress
        )
        slot.settle(*progress)
        return RejoinedWork(remaining, *settled)
    memory.leave_over(slot, saved, remaining)
    memory.give(slot, saved, remaining)
    slot.settle(*settled)
    return RejoinedWork(remaining, *settled)


class _RoundHistory:
    """The rosters of a fragment's rounds, as far as the run still has them."""

    def __init__(
        self, exchange: Exchange, fragment: int, island: str, state: FragmentState
    ) -> None:
        self._exchange, self._fragment, self._island = exchange, fragment, island
        self._state = state

    def knows(self, round: int, digest: bytes) -> bool:
        """Return whether the state after a round had this digest."""
        if round == self._state.round:
            return self._state.digest == digest
        after = self._header(round + 1)
        return after is not None and after.base == digest

    def counted(self, round: int, digest: bytes) -> CountedSince | None:
        """Return which update of the island a closed round counted; None: refused."""
        header = self._header(round)
        roster = header.roster if header else None
        return counted_in(roster or wire.Roster(()), self._island, digest)

    def _header(self, round: int) -> wire.Header | None:
        if not 0 < round <= self._state.round:
            return None
        try:
            outcome = self._exchange.outcome(
                self._fragment, round, wait_s=0.0, has_body=False
            )
        except OutcomeLost:
            return None
        return outcome.agreed.header if outcome else None


def _remaining(
    history: _RoundHistory,
    joined: JoinReply,
    slot: IslandFragment,
    saved: SavedFragment,
) -> RemainingWork:
    digest, since, is_refused = _digest(saved.update), CountedSince.NOTHING, False
    counted = joined.counted[slot.index] if joined.counted else None
    latest = counted.round if counted else 0
    listed = max(latest, counted.listed) if counted else 0
    opened = joined.position.rounds[slot.index]
    if slot.index in joined.spoken_for and opened <= slot.state.round:
        # The round has closed since the join reply.
        closed = history.counted(opened, digest)
        latest = opened if closed in _COUNTED else latest
        listed = opened if closed is not CountedSince.NOTHING else listed
    if latest > saved.round:
        since = history.counted(latest, digest) or CountedSince.ANOTHER
    elif saved.update is not None and joined.settings.sync.is_async:
        # Updates that are listed up to the saved round are older than this one.
        is_refused = listed > saved.round and history.counted(listed, digest) is None
    elif saved.update is not None:
        is_refused = history.counted(saved.update.round, digest) is None
    return remaining_work(
        since,
        is_refused=is_refused,
        is_base_known=history.knows(saved.round, saved.digest),
    )


_COUNTED = (CountedSince.SAVED, CountedSince.ANOTHER)


def _digest(update: SavedUpdate | None) -> bytes:
    frame = update.frame if update else None
    return wire.update_digest(frame.header) if frame else b""


def fetch_state(exchange: Exchange, fragment: int) -> FragmentState:
    """Return the run's state of a fragment, verified."""
    frame = exchange.state(fragment)
    wire.verify_body(frame.header, frame.body)
    return FragmentState.from_frame(frame.header, frame.body)
