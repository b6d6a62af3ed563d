"""State, events and actions of the island's machine, and the plan it follows.

Events are the facts that the host reports; actions are the work that it must do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from atoll.protocol.messages import Position
from atoll.wire import Verdict

CARRIED_ROUNDS = 2
"""Work is carried over this many missed rounds; beyond that it is dropped."""

REFUSALS = 3
"""So many refusals in succession mean that the optimizer's moments are poisoned."""


class WorkDecision(StrEnum):
    """The effect of an outcome on an island's local weights."""

    ADOPT = "adopt"
    """Counted: rebase or mix, as the settings say."""

    REBASE = "rebase"
    """Counted, and later rounds passed: keep the progress since the seal."""

    CARRY = "carry"
    """Missed: keep all of the work, to contribute it next round."""

    DROP = "drop"
    """Missed too often: take the anchor, keep the residual."""

    REFUSE = "refuse"
    """Refused: take the anchor, clear the residual."""


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
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
class RoundInFlight:
    """A sealed update whose outcome has not been taken."""

    round: int
    take_at: int
    is_awaited: bool = False
    """This incarnation has no update in it: the round is over or published before."""


@dataclass(frozen=True, kw_only=True)
class FragmentSync:
    """The state of one fragment's syncs on an island."""

    taken: int
    """The last round whose outcome was taken; 0 is the founding."""

    missed: int = 0
    refused: int = 0
    flight: RoundInFlight | None = None
    is_due: bool = False
    """Wanted now: to be sealed as soon as the update in flight is taken."""

    not_before: int = 0
    """The step before which nothing is sealed: an island that has just joined."""

    is_spoken_for: bool = False
    """An earlier incarnation has published for the next round: only take it."""

    @property
    def next_round(self) -> int:
        return (self.flight.round if self.flight else self.taken) + 1


@dataclass(frozen=True, kw_only=True)
class IslandState:
    """The machine's whole state."""

    step: int
    books: tuple[FragmentSync, ...]
    last_round: int | None = None

    def finished(self, book: FragmentSync) -> bool:
        return self.last_round is not None and book.next_round > self.last_round

    @property
    def has_ended(self) -> bool:
        return all(self.finished(b) and b.flight is None for b in self.books)


@dataclass(frozen=True)
class Stepped:
    """The island's step counter has reached `step`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class OutcomeTaken:
    """The outcome of the update in flight, and of later rounds, is in the weights."""

    fragment: int
    verdict: Verdict
    through: int
    """The last round taken: more than the sealed one when rounds passed meanwhile."""

    position: Position


@dataclass(frozen=True)
class FragmentsRequested:
    """All islands wait: this one for `fragment`, others for it at `position.wanted`."""

    fragment: int
    position: Position


@dataclass(frozen=True)
class NeverOpens:
    """The round in flight of a fragment will not open: the one before was the last."""

    fragment: int


@dataclass(frozen=True)
class SyncNow:
    """The user wants every fragment's work in its open round, at this step."""

    step: int


@dataclass(frozen=True)
class Leaving:
    """The island leaves: all of its work must be published."""


Event = Stepped | OutcomeTaken | FragmentsRequested | NeverOpens | SyncNow | Leaving


@dataclass(frozen=True)
class Seal:
    """Seal the fragment's work for `round` and publish it."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Await:
    """Only take `round`: an earlier incarnation has sealed for it, or it is over."""

    fragment: int
    round: int


@dataclass(frozen=True)
class Take:
    """Wait for the outcome of the update in flight, take it, send `OutcomeTaken`.

    Does nothing if a request in between has taken it already.
    """

    fragment: int
    round: int


@dataclass(frozen=True)
class Resend:
    """Publish the update in flight again, same bytes, marked departing."""

    fragment: int
    round: int


@dataclass(frozen=True)
class PublishRest:
    """Publish the work since the last seal as a departing update for `round`."""

    fragment: int
    round: int


@dataclass(frozen=True)
class End:
    """Every fragment has taken the run's last round."""


Action = Seal | Await | Take | Resend | PublishRest | End
