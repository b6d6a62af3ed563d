"""How an island goes on from a checkpoint: exactly, or by joining anew with its work.

*Exact*: everything is as it was, and the outcomes of rounds that are made again are
taken from the run. Where they are no longer kept, or the run has another past, the
island rejoins and says so. *Rejoin*: see `rejoining`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from atoll.errors import OutcomeLost, UsageError
from atoll.exchange import Exchange, Frame
from atoll.island.background import Background
from atoll.island.fetching import fetch_state
from atoll.island.memory import Memory
from atoll.island.rejoining import Kept, rejoin
from atoll.island.saved import COUNTERS, SavedFragment, SavedIsland, SavedUpdate
from atoll.island.slot import Sealed, Slot
from atoll.island.tally import Tally
from atoll.protocol import IslandState, JoinReply
from atoll.protocol.island_rejoin import Left
from atoll.weights import FragmentLayout, Layout, terms_of


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What became of what a checkpoint held, for people and for data cursors."""

    is_exact: bool
    why: str = ""
    """Why it is not, though the checkpoint would have allowed it."""

    saved: tuple[int, int] = (0, 0)
    """Inner steps and tokens of all lives up to the checkpoint."""

    counted: tuple[int, int] = (0, 0)
    """And those that the run has counted, in whatever fragment."""

    lost: tuple[int, int] = (0, 0)
    """Of the checkpoint, in the fragment that loses most."""


@dataclass(kw_only=True)
class Entry:
    """An island that has entered a run."""

    joined: JoinReply
    slots: list[Slot]
    state: IslandState | None = None
    """The machine's state; None: it begins as a newcomer's."""

    tally: Tally = field(default_factory=Tally)
    resumed: Resumed | None = None


def resume(
    exchange: Exchange,
    memory: Memory,
    joined: JoinReply,
    layout: Layout,
    saved: SavedIsland,
    background: Background,
) -> Entry:
    """Return the island as its checkpoint has it, at a run that goes on.

    The live weights are the checkpoint's if that `is_exact`; otherwise they are the
    anchor with what is left of the saved work.

    Raises:
        UsageError: the checkpoint belongs to another run, or another model.
    """
    _require_same_run(joined, saved)
    if not saved.fragments:
        return _counting_on(exchange, memory, joined, layout, saved)
    memory.require_fitting(layout, saved.fragments)
    why = ""
    if saved.is_exact:
        why = _why_not_exact(exchange, joined, saved)
        if not why:
            return _exact(memory, joined, layout, saved, background)
        saved = memory.as_work(saved, joined.settings.sync)
    return _rejoined(exchange, memory, joined, layout, saved, why)


def _require_same_run(joined: JoinReply, saved: SavedIsland) -> None:
    if saved.run != joined.run:
        raise UsageError(
            f"The checkpoint is of run {saved.run!r}, and this is {joined.run!r}. "
            "Give this run another directory, or join the run of the checkpoint."
        )


def _why_not_exact(exchange: Exchange, joined: JoinReply, saved: SavedIsland) -> str:
    """Return why rounds cannot be made again; empty if they can."""
    for index, fragment in enumerate(saved.fragments):
        last = joined.position.rounds[index] - 1
        if fragment.round > last:
            return (
                f"fragment {index} was saved after round {fragment.round}, and the run "
                f"has come to {last} only"
            )
        if fragment.round < last:
            base = _base_of_kept(exchange, index, fragment.round + 1)
        else:
            base = fetch_state(exchange, index).digest
        if base is None:
            return (
                f"the outcome of round {fragment.round + 1} of fragment {index} is "
                "kept no more"
            )
        if base != fragment.digest:
            return f"the run has another past since round {fragment.round}"
    return ""


def _base_of_kept(exchange: Exchange, fragment: int, round: int) -> bytes | None:
    """Return the base of a round whose outcome can be taken; None: it cannot."""
    try:
        outcome = exchange.outcome(fragment, round, wait_s=0.0)
    except OutcomeLost:
        return None
    if outcome is None or not outcome.has_body:
        return None
    return outcome.agreed.header.base


def _exact(
    memory: Memory,
    joined: JoinReply,
    layout: Layout,
    saved: SavedIsland,
    background: Background,
) -> Entry:
    # Progress is part of an update: made again, it must be the same.
    joined = replace(joined, inner_steps=saved.before_steps, tokens=saved.before_tokens)
    slots = [
        _slot(memory, joined, index, each, saved, background)
        for index, each in enumerate(layout)
    ]
    books = tuple(each.book for each in saved.fragments if each.book is not None)
    return Entry(
        joined=joined,
        slots=slots,
        state=IslandState(
            step=saved.step, books=books, last_round=joined.position.last_round
        ),
        tally=_tally(saved),
        resumed=Resumed(is_exact=True, saved=saved.progress, counted=_counted(joined)),
    )


def _tally(saved: SavedIsland) -> Tally:
    tally = Tally(inner_steps=saved.inner_steps, tokens=saved.tokens)
    for name in COUNTERS:
        setattr(tally, name, saved.counters[name])
    return tally


def _slot(
    memory: Memory,
    joined: JoinReply,
    index: int,
    layout: FragmentLayout,
    saved: SavedIsland,
    background: Background,
) -> Slot:
    """Return a fragment as it stood."""
    fragment = saved.fragments[index]
    opened = joined.position.rounds[index]
    counted = joined.counted[index] if joined.counted else None
    terms = terms_of(layout, joined.settings)
    slot = memory.resume(index, layout, terms, fragment)
    slot.over_through = opened - 1
    slot.counted_through = counted.round if counted else 0
    slot.origin = saved.origin
    if index in joined.spoken_for:
        slot.counted_through = opened  # it stands, and nothing else can
    slot.settle(fragment.settled_steps, fragment.settled_tokens)
    if fragment.update is not None:
        assert slot.sealed is not None
        slot.sealed.arrival = background.promise()
        _put_bytes(slot.sealed, joined, fragment.update)
    return slot


def _put_bytes(sealed: Sealed, joined: JoinReply, saved: SavedUpdate) -> None:
    """Let an update in flight have what was known of it."""
    if saved.frame is not None:
        header = replace(saved.frame.header, incarnation=joined.incarnation)
        sealed.frame = Frame(header, saved.frame.body)
    if saved.arrival is not None:
        sealed.arrival.set_result(saved.arrival)


def _counting_on(
    exchange: Exchange,
    memory: Memory,
    joined: JoinReply,
    layout: Layout,
    saved: SavedIsland,
) -> Entry:
    """Return an island that takes the anchor, and has saved no more than its counts.

    Of an island of several ranks a trainer saves no work: it is told as lost.
    """
    counted = _counted(joined)
    steps, tokens = saved.progress
    progress = (max(steps, counted[0]), max(tokens, counted[1]))
    slots = [
        memory.begin(
            index, each, terms_of(each, joined.settings), fetch_state(exchange, index)
        )
        for index, each in enumerate(layout)
    ]
    for slot in slots:
        slot.settle(*progress)
    return Entry(
        joined=replace(joined, inner_steps=0, tokens=0),
        slots=slots,
        tally=Tally(inner_steps=progress[0], tokens=progress[1]),
        resumed=Resumed(
            is_exact=False,
            saved=saved.progress,
            counted=counted,
            lost=(progress[0] - counted[0], progress[1] - counted[1]),
        ),
    )


def _rejoined(
    exchange: Exchange,
    memory: Memory,
    joined: JoinReply,
    layout: Layout,
    saved: SavedIsland,
    why: str,
) -> Entry:
    saved_steps, saved_tokens = saved.progress
    counted = _counted(joined)
    progress = (max(saved_steps, counted[0]), max(saved_tokens, counted[1]))
    slots: list[Slot] = []
    kept: list[Kept] = []
    for index, (fragment, each) in enumerate(
        zip(_cumulative(saved), layout, strict=True)
    ):
        terms = terms_of(each, joined.settings)
        slot = memory.begin(index, each, terms, fetch_state(exchange, index))
        kept.append(rejoin(exchange, memory, joined, slot, fragment, progress=progress))
        slots.append(slot)
    lost = max(
        [
            (
                saved_steps - fragment.settled_steps,
                saved_tokens - fragment.settled_tokens,
            )
            for fragment, each_kept in zip(_cumulative(saved), kept, strict=True)
            if each_kept.left is Left.LOST
        ],
        default=(0, 0),
    )
    return Entry(
        joined=replace(joined, inner_steps=0, tokens=0),
        slots=slots,
        tally=Tally(inner_steps=progress[0], tokens=progress[1]),
        resumed=Resumed(
            is_exact=False,
            why=why,
            saved=saved.progress,
            counted=counted,
            lost=lost,
        ),
    )


def _cumulative(saved: SavedIsland) -> list[SavedFragment]:
    """Return the fragments with counts over all lives of the island."""
    steps, tokens = saved.before_steps, saved.before_tokens
    return [
        replace(
            each,
            settled_steps=each.settled_steps + steps,
            settled_tokens=each.settled_tokens + tokens,
            update=_cumulated(each.update, steps, tokens),
        )
        for each in saved.fragments
    ]


def _cumulated(
    update: SavedUpdate | None, steps: int, tokens: int
) -> SavedUpdate | None:
    if update is None:
        return None
    return replace(
        update, inner_steps=update.inner_steps + steps, tokens=update.tokens + tokens
    )


def _counted(joined: JoinReply) -> tuple[int, int]:
    """Return how far the island's work has counted, in whatever fragment."""
    counted = [each for each in joined.counted if each is not None]
    steps = max([each.inner_steps for each in counted], default=0)
    tokens = max([each.tokens for each in counted], default=0)
    return max(steps, joined.inner_steps), max(tokens, joined.tokens)
