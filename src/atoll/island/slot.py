"""What an island holds of one fragment, and of its update in flight."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from atoll.exchange import Frame
from atoll.island.arrivals import Arrival, Summons
from atoll.island.background import Promise
from atoll.island.held_back import HeldBack
from atoll.protocol import Holding
from atoll.weights import FragmentLayout, FragmentState
from atoll.weights.layout import F32
from atoll.wire import Codec, Header

KEPT_OUTCOMES = 2
"""As many rounds as work is carried over."""


@dataclass(kw_only=True)
class Sealed:
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

    arrival: Promise[Arrival | Summons]
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
    def outcome(self) -> Arrival | None:
        """What the round came to, if that is known."""
        if not self.arrival.done() or self.arrival.exception() is not None:
            return None
        result = self.arrival.result()
        return result if isinstance(result, Arrival) else None


@dataclass(kw_only=True)
class Slot:
    """One fragment of an island."""

    index: int
    layout: FragmentLayout
    state: FragmentState
    up: Codec
    residual: F32 | None
    """What the codec has left over; None without error feedback."""

    sealed: Sealed | None = None
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

    held_back: HeldBack | None = None
    """Saved work that an update of an earlier life may hold."""

    held: Holding = field(init=False)
    """The round that the state has reached; read without the lock, by who must not
    wait for it."""

    def __post_init__(self) -> None:
        self.note_held()

    def note_held(self) -> None:
        """Say anew what is held: the state has changed."""
        self.held = Holding(self.state.round, self.state.digest)

    def read_digest(self) -> bytes:
        """Return the digest of the state, never of one that is half a round ahead."""
        with self.lock:
            return self.state.digest

    def holding(self) -> Holding:
        """Return the round that the state has reached."""
        with self.lock:
            return Holding(self.state.round, self.state.digest)

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
