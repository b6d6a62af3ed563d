"""What must hold in every run, whatever fails: one sentence each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Invariant:
    """A name, and the sentence that must be true."""

    name: str
    claim: str


@dataclass(frozen=True)
class Violation:
    """An invariant that did not hold."""

    at_s: float
    who: str
    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:.6f} s, {self.who}: {self.invariant}: {self.what}"


Report = Callable[[Invariant, str, str], None]
"""Takes an invariant that did not hold, of whom, and what was seen instead."""

SAME_STATE = Invariant(
    "same state",
    "Whoever holds a round of a fragment holds its one anchor and velocity.",
)
SAME_OUTCOME = Invariant(
    "same outcome",
    "Every way of learning an outcome gives the bytes that were committed.",
)
DURABLE_FIRST = Invariant(
    "durable first",
    "Nobody holds a round that the journal has not, before or after any crash.",
)
ROUNDS_IN_ORDER = Invariant(
    "rounds in order",
    "A fragment commits rounds 1, 2, 3 and so on up to the last, each once.",
)
COUNTED_ONCE = Invariant(
    "counted once",
    "A counted update was published for its round, and no work of it counted before.",
)
TRUE_MEAN = Invariant(
    "true mean",
    "An agreed mean is that of the counted updates, each of them once.",
)
WORK_CONSERVED = Invariant(
    "work conserved",
    "Committed, in hand and codec error add up to work less refused and dropped.",
)
TOKENS_CONSERVED = Invariant(
    "tokens conserved",
    "Every token is committed, in hand, refused, dropped or lost with a named death.",
)
ZOMBIES_CHANGE_NOTHING = Invariant(
    "zombies change nothing",
    "What an earlier life of an island sends changes nothing once the next has joined.",
)
NOTHING_LEFT_OUT = Invariant(
    "nothing left out",
    "A roster lists every update that was there when it was decided, in calm weather, "
    "and what a farewell has left uncounted that its closer has read, in any.",
)
EVERYONE_COUNTS = Invariant(
    "everyone counts",
    "After a storm every live island is counted in every round but the first two.",
)
PROGRESS = Invariant(
    "progress",
    "While a quorum is connected, no longer than a stated bound passes per round.",
)
BOUNDED = Invariant(
    "bounded",
    "Updates held and bytes in flight stay within what the islands can have sent.",
)
DEADLINES_BOUNDED = Invariant(
    "deadlines bounded",
    "No deadline lies outside deadline_min_s and deadline_max_s.",
)
ISLANDS_GO_ON = Invariant(
    "islands go on",
    "An island that nothing killed sees the end of its run.",
)

ALL = (
    *(SAME_STATE, SAME_OUTCOME, DURABLE_FIRST, ROUNDS_IN_ORDER),
    *(COUNTED_ONCE, TRUE_MEAN, WORK_CONSERVED, TOKENS_CONSERVED),
    *(ZOMBIES_CHANGE_NOTHING, NOTHING_LEFT_OUT, EVERYONE_COUNTS, PROGRESS),
    *(BOUNDED, DEADLINES_BOUNDED, ISLANDS_GO_ON),
)
