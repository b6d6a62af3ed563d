"""One fragment of an island: its anchor, its residual, and its update in flight.

An update of an earlier incarnation may hold the work of a checkpoint. Such work is held
back until the outcome of that update is known.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from atoll.exchange import Frame
from atoll.island.saved_state import (
    AppliedOutcome,
    FragmentsWanted,
    SavedFragment,
    settled_left,
)
from atoll.protocol import HeldRound, WorkDecision
from atoll.protocol.island import (
    CountedSince,
    RemainingWork,
    counted_in,
    remaining_work,
)
from atoll.runtime import Future
from atoll.settings import SyncSection
from atoll.weights import FragmentLayout, FragmentState
from atoll.weights.layout import F32
from atoll.wire import Codec, Header, Roster, update_digest

KEPT_OUTCOMES = 2
"""Outcomes kept per fragment: as many as rounds that work is carried over."""


@dataclass(kw_only=True)
class UpdateInFlight:
    """An update in flight, with all that undoing or finishing it needs."""

    round: int
    base: F32
    """Local weights at the seal; once the decision is to carry, the old anchor as
    loaded."""

    inner_steps: int
    tokens: int
    weight: int
    cursor: bytes = b""
    """The packed turns of the rows that are in it."""

    number: int = 0
    """The number by which the island's memory finds its buffers."""

    arrival: Future[AppliedOutcome | FragmentsWanted]
    sealed_at_s: float | None = None
    """None: an earlier incarnation has sealed it."""

    held_at_s: float | None = None
    """When its outcome was applied."""

    summoned: set[tuple[int, int]] = field(default_factory=set)
    """Fragments and rounds that the run has requested while the island waited."""

    is_awaited: bool = False
    """No update of this incarnation: the island only waits for the outcome."""

    is_void: bool = False
    """The run requests an update after all: this wait is over, another begins."""

    frame: Frame | None = None
    """Set by the sender, and kept until an outcome lists the update."""

    is_part: bool = False
    """The frame is made of the parts of several processes, and one process has it."""

    residual_after: F32 | None = None
    receipt: AppliedOutcome | None = None
    """Of an asynchronous update: its outcome, before the island has it in `arrival`."""

    listed: int = 0
    """The round of the roster that is the receipt."""

    @property
    def has_bytes(self) -> bool:
        """Whether the update is encoded, here or in another process."""
        return self.frame is not None or self.is_part

    @property
    def outcome(self) -> AppliedOutcome | None:
        """The outcome of the round, once it is applied."""
        if not self.arrival.done() or self.arrival.exception() is not None:
            return None
        result = self.arrival.result()
        return result if isinstance(result, AppliedOutcome) else None

    @property
    def applied(self) -> AppliedOutcome | None:
        """The outcome, as far as it is in the anchor already, for a checkpoint."""
        return self.outcome or self.receipt


@dataclass(frozen=True, kw_only=True)
class SealTerms:
    """The values that an update is encoded with."""

    seed: int
    """Seed of stochastic rounding."""

    decay: float
    """Part of the residual that is fed into the update."""

    is_difference: bool = False
    """Whether the update's base is the work itself, not the local weights."""


@dataclass(kw_only=True)
class IslandFragment:
    """One fragment of an island."""

    index: int
    layout: FragmentLayout
    state: FragmentState
    up: Codec
    residual: F32 | None
    """The error of the codec, fed into the next update; None without feedback."""

    sealed: UpdateInFlight | None = None
    settled_steps: int = 0
    """The island's inner steps that are settled: counted, refused or dropped."""

    settled_tokens: int = 0
    """The same of its tokens."""

    dropped_steps: int = 0
    """The island's inner steps whose work was dropped after missed rounds."""

    outcomes: deque[Header] = field(default_factory=lambda: deque(maxlen=KEPT_OUTCOMES))
    """The last outcomes in the state, for a run that has lost its journal."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `state` while an outcome is applied in the background."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while an outcome changes the fields: its holder sees them consistent."""

    over_through: int = 0
    """Rounds up to here were over when this incarnation resumed a checkpoint: it takes
    them one by one, as the incarnation before did."""

    counted_through: int = 0
    """The last round that counted an earlier incarnation with work of this one."""

    origin: int = 0
    """The first incarnation whose updates may hold this one's work; 0: only its own."""

    held_back: HeldBackWork | None = None
    """Saved work that an update of an earlier incarnation may hold."""

    held_round: HeldRound = field(init=False)
    """The round that the state has reached; heartbeats read it without the lock."""

    def __post_init__(self) -> None:
        self.note_held()

    def note_held(self) -> None:
        """Update `held_round` after the state has changed."""
        self.held_round = HeldRound(self.state.round, self.state.digest)

    def read_digest(self) -> bytes:
        """Return the digest of the state, never within an outer step."""
        with self.lock:
            return self.state.digest

    def is_over(self, round: int) -> bool:
        """Return whether a round was over when this incarnation resumed."""
        return round <= self.over_through

    def settle(self, inner_steps: int, tokens: int) -> None:
        """Note that no further update has to hold the work up to here."""
        self.settled_steps, self.settled_tokens = inner_steps, tokens

    def has_left_over(self) -> bool:
        """Return whether the residual has anything that is not in flight."""
        residual = self.residual
        if self.sealed is not None and self.sealed.outcome is None:
            residual = self.sealed.residual_after
        return residual is not None and bool(residual.any())


@dataclass(kw_only=True)
class HeldBackWork:
    """Saved work to be added again if the staged update of `round` does not count."""

    round: int
    saved: SavedFragment
    remaining_before: RemainingWork
    """The part that had not counted before that update: all, or since its seal."""

    progress: tuple[int, int]
    """Inner steps and tokens of all incarnations: settled, if nothing is added."""

    remaining_after: RemainingWork | None = None
    """The part that has not counted after that update; None: no outcome yet."""

    @property
    def may_stand(self) -> bool:
        """Whether the staged update may be the saved one: its digest tells."""
        update = self.saved.update
        is_of_round = update is not None and update.round <= self.round
        return self.remaining_before is RemainingWork.ALL and is_of_round

    @property
    def remains(self) -> RemainingWork:
        """The part to be added now. Without an outcome the update is lost."""
        return (
            self.remaining_before
            if self.remaining_after in (None, RemainingWork.ALL)
            else self.remaining_after
        )

    @property
    def settled(self) -> tuple[int, int]:
        """The inner steps and tokens that are settled once it is added."""
        return settled_left(self.saved, self.remains, self.progress)

    def judge(self, roster: Roster, island: str) -> None:
        """Set `remaining_after` by the roster of the outcome."""
        since = counted_in(roster, island, self._digest())
        self.remaining_after = remaining_work(
            since or CountedSince.NOTHING, is_refused=since is None, is_base_known=True
        )

    def _digest(self) -> bytes:
        update = self.saved.update
        if not self.may_stand or update is None or update.frame is None:
            return b""
        return update_digest(update.frame.header)


def adopt_mode(decision: WorkDecision, sync: SyncSection) -> str:
    """Return the mode of `weights.adopt` for the decision about an update."""
    match decision:
        case WorkDecision.ADOPT:
            return sync.adopt
        case WorkDecision.REBASE:
            return "rebase"
        case WorkDecision.CARRY:
            return "carry"
        case WorkDecision.DROP | WorkDecision.REFUSE:
            return "replace"
