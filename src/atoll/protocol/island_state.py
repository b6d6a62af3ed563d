"""What an island's machine remembers, and the plan it follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CARRIED_ROUNDS = 2
"""Work is carried over this many missed rounds; beyond that it is dropped."""

REFUSALS = 3
"""So many refusals in succession mean that the optimizer's moments are poisoned."""


class How(StrEnum):
    """What an outcome does to an island's local weights."""

    ADOPT = "adopt"
    """Counted: rebase or mix, as the settings say."""

    REBASE = "rebase"
    """Counted, and later rounds passed: keep what was learnt since the seal."""

    CARRY = "carry"
    """Missed: keep all of the work, to contribute it next round."""

    DROP = "drop"
    """Missed too often: take the anchor, keep the residual."""

    REFUSE = "refuse"
    """Refused: take the anchor, clear the residual."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The part of the settings that the machine needs."""

    sync_every: int
    num_fragments: int
    overlap_steps: int
    has_buffers: bool = False
    """One more fragment, sent with the last one."""

    @property
    def num_books(self) -> int:
        return self.num_fragments + self.has_buffers

    def schedule_of(self, book: int) -> int:
        """Return the fragment whose send points `book` follows."""
        return min(book, self.num_fragments - 1)


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A sealed update whose outcome has not been taken."""

    round: int
    take_at: int
    is_awaited: bool = False
    """Nothing of this life is in it: the round is over, or an earlier life spoke."""


@dataclass(frozen=True, kw_only=True)
class Book:
    """What an island knows of one fragment."""

    taken: int
    """The last round whose outcome was taken; 0 is the founding."""

    missed: int = 0
    refused: int = 0
    flight: Flight | None = None
    is_due: bool = False
    """Wanted now: to be sealed as soon as the update in flight is taken."""

    not_before: int = 0
    """The step before which nothing is sealed: an island that has just joined."""

    is_spoken_for: bool = False
    """The next round holds an update of an earlier life: this one only takes it."""

    @property
    def next_round(self) -> int:
        return (self.flight.round if self.flight else self.taken) + 1


@dataclass(frozen=True, kw_only=True)
class IslandState:
    """All that the machine remembers."""

    step: int
    books: tuple[Book, ...]
    last_round: int | None = None

    def finished(self, book: Book) -> bool:
        return self.last_round is not None and book.next_round > self.last_round

    @property
    def has_ended(self) -> bool:
        return all(self.finished(b) and b.flight is None for b in self.books)
