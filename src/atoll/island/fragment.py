"""One fragment of an island: its anchor, its residual, and its update in flight.

An update of an earlier incarnation may hold the work of a checkpoint. Such work is held
back until the outcome of that update is known.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from atoll.exchange import Frame
from atoll.island.base import Promise
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
from atoll.settings import SyncSection
from atoll.weights import FragmentLayout, FragmentState
from atoll.weights.layout import F32
from atoll.wire import Codec, Header, Roster, update_digest

KEPT_OUTCOMES = 2
"""As many rounds as work is carried over."""


@dataclass(kw_only=True)
class UpdateInFlight:
    """An update in flight, with all that undoing or finishing it needs."""

    round: int
    base: F32
    """Local weights at the seal; once the outcome says carry, the old anchor as
    loaded."""

    inner_steps: int
    tokens: int
    weight: int
    number: int = 0
    """By which the island's memory knows it."""

    arrival: Promise[AppliedOutcome | FragmentsWanted]
    told: set[tuple[int, int]] = field(default_factory=set)
    """Fragments and rounds that the island was summoned for while it waited."""

    is_awaited: bool = False
    """Nothing of this life is in it: an outcome is waited for, and that is all."""

    is_void: bool = False
    """The run wants an update after all: this wait is over, and another begins."""

    frame: Frame | None = None
    """Set by the sender: these bytes are kept until an outcome lists them."""

    is_part: bool = False
    """The bytes are made of this and of what other processes hold: one has them."""

    residual_after: F32 | None = None

    @property
    def has_bytes(self) -> bool:
        """Whether the update's bytes are made, here or elsewhere."""
        return self.frame is not None or self.is_part

    @property
    def outcome(self) -> AppliedOutcome | None:
        """What the round came to, if that is known."""
        if not self.arrival.done() or self.arrival.exception() is not None:
            return None
        result = self.arrival.result()
        return result if isinstance(result, AppliedOutcome) else None


@dataclass(kw_only=True)
class IslandFragment:
    """One fragment of an island."""

    index: int
    layout: FragmentLayout
    state: FragmentState
    up: Codec
    residual: F32 | None
    """What the codec has left over; None without error feedback."""

    sealed: UpdateInFlight | None = None
    settled_steps: int = 0
    """The island's inner steps that are settled: counted, refused or dropped."""

    settled_tokens: int = 0
    """The same of its tokens."""

    dropped_steps: int = 0
    """The island's inner steps whose work was dropped after missed rounds."""

    outcomes: deque[Header] = field(default_factory=lambda: deque(maxlen=KEPT_OUTCOMES))
    """The last ones that are in the state, for a run that lost its journal."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `state` while an outcome is applied in the background."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while an outcome is taken in: without it all of this belongs together."""

    over_through: int = 0
    """Rounds up to here were over when this life went on from a checkpoint: it takes
    them one by one, as the life before did."""

    counted_through: int = 0
    """The last round that counted an earlier life, whose work this one has too."""

    origin: int = 0
    """The first life whose updates may hold this one's work; 0: only this one's."""

    held_back: HeldBackWork | None = None
    """Saved work that an update of an earlier life may hold."""

    held: HeldRound = field(init=False)
    """The round that the state has reached; read without the lock, by who must not
    wait for it."""

    def __post_init__(self) -> None:
        self.note_held()

    def note_held(self) -> None:
        """Say anew what is held: the state has changed."""
        self.held = HeldRound(self.state.round, self.state.digest)

    def read_digest(self) -> bytes:
        """Return the digest of the state, never of one that is half a round ahead."""
        with self.lock:
            return self.state.digest

    def holding(self) -> HeldRound:
        """Return the round that the state has reached."""
        with self.lock:
            return HeldRound(self.state.round, self.state.digest)

    def is_over(self, round: int) -> bool:
        """Return whether a round was over before this life came to it."""
        return round <= self.over_through

    def settle(self, inner_steps: int, tokens: int) -> None:
        """Take note that no further update has to hold what was done up to here."""
        self.settled_steps, self.settled_tokens = inner_steps, tokens

    def has_left_over(self) -> bool:
        """Return whether the codec has left over anything that is not in flight."""
        residual = self.residual
        if self.sealed is not None and self.sealed.outcome is None:
            residual = self.sealed.residual_after
        return residual is not None and bool(residual.any())


@dataclass(kw_only=True)
class HeldBackWork:
    """What is put back when the update that stands for `round` does not count."""

    round: int
    saved: SavedFragment
    most: RemainingWork
    """What was left of it before that update: all, or what came since its seal."""

    progress: tuple[int, int]
    """Inner steps and tokens of all lives: settled, if nothing is put back."""

    left: RemainingWork | None = None
    """None: no outcome yet."""

    @property
    def may_stand(self) -> bool:
        """Whether the update that stands may be the saved one."""
        update = self.saved.update
        is_of_round = update is not None and update.round == self.round
        return self.most is RemainingWork.ALL and is_of_round

    @property
    def remains(self) -> RemainingWork:
        """What is to be put back now: without an outcome nothing stands any more."""
        return self.most if self.left in (None, RemainingWork.ALL) else self.left

    @property
    def settled(self) -> tuple[int, int]:
        """The inner steps and tokens that are settled when that is put back."""
        return settled_left(self.saved, self.remains, self.progress)

    def judge(self, roster: Roster, island: str) -> None:
        """Take note of the outcome."""
        since = counted_in(roster, island, self._digest())
        self.left = remaining_work(
            since or CountedSince.NOTHING, is_refused=since is None, is_base_known=True
        )

    def _digest(self) -> bytes:
        update = self.saved.update
        if not self.may_stand or update is None or update.frame is None:
            return b""
        return update_digest(update.frame.header)


def adopt_mode(how: WorkDecision, sync: SyncSection) -> str:
    """Return which text of `weights.adopt` an outcome asks for."""
    match how:
        case WorkDecision.ADOPT:
            return sync.adopt
        case WorkDecision.REBASE:
            return "rebase"
        case WorkDecision.CARRY:
            return "carry"
        case WorkDecision.DROP | WorkDecision.REFUSE:
            return "replace"
