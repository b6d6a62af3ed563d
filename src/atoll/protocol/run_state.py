"""All that a coordinator's machine remembers, and what it can say of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.errors import FoundingLost
from atoll.protocol.budget import Budget
from atoll.protocol.counted import CountedUpdates
from atoll.protocol.membership import Members
from atoll.protocol.messages import Holding, ModelSpec, Position
from atoll.protocol.recovery import all_heard, held_by, lost_state
from atoll.protocol.rounds import Phase, Round
from atoll.settings import RunSettings

JOINS = Budget.full(1024, per_s=4.0)
"""New lives that a run takes at once, and then per second."""


@dataclass(frozen=True, kw_only=True)
class Founding:
    """An island is bringing the run's first weights, until its lease runs out."""

    island: str
    incarnation: int
    model: ModelSpec
    until_s: float


@dataclass(frozen=True, kw_only=True)
class Move:
    """The run is on its way elsewhere, or there."""

    target: str
    nonce: str
    """Made for this move: what is found there under it has come with it."""

    is_over: bool = False


@dataclass(frozen=True, kw_only=True)
class CoordinatorState:
    """All that the machine remembers."""

    run: str
    settings: RunSettings
    """The run's own, with the values of the epoch in force."""

    epoch: int = 0
    members: Members = field(default_factory=lambda: Members({}))
    model: ModelSpec | None = None
    founding: Founding | None = None
    rounds: tuple[Round, ...] = ()
    counted: CountedUpdates = field(default_factory=CountedUpdates)
    last_round: int | None = None
    is_paused: bool = False
    """By an operator: nothing closes."""

    saves: int = 0
    """How often an operator has asked islands to save, since the coordinator began."""

    move: Move | None = None
    """By an operator: nothing closes, and nothing else changes."""

    joins: Budget = JOINS
    """What is left for new lives: each is a durable record."""

    @property
    def has_started(self) -> bool:
        """True from the moment `start_islands` took part, though some have left."""
        # Every message asks, and the first round mostly tells: no generator for that.
        for round in self.rounds:  # noqa: SIM110
            if round.phase is not Phase.WAITING:
                return True
        return False

    @property
    def is_held(self) -> bool:
        """Whether an operator keeps rounds from closing."""
        return self.is_paused or self.move is not None

    def position(self, now_s: float, *, island: str | None = None) -> Position:
        """Return where the run is, as live islands say, and what it wants of one."""
        step = self.members.look(now_s).median_step
        return Position(
            step=step if self.has_started else 0,
            rounds=tuple([round.number for round in self.rounds]),
            last_round=self.last_round,
            tokens=self.counted.tokens,
            wanted=self.wanted(island, now_s) if island else (),
            lost=self.asked_of(island, now_s) if island else (),
            saves=self.saves,
            decay_round=self.settings.run.decay_round,
            end_tokens=self.settings.run.end_tokens,
        )

    def lost_state(self, fragment: int, now_s: float) -> Holding | None:
        """Return the state that only islands have, once all have said what they do."""
        if not all_heard(self.members, now_s):
            return None
        return lost_state(self.rounds[fragment], self.members, now_s)

    def asked_of(self, island: str, now_s: float) -> tuple[int, ...]:
        """Return the fragments whose state this island is to bring: it has time to."""
        member = self.members.known[island]
        if not member.waits_for or not all_heard(self.members, now_s):
            return ()
        return tuple(
            round.fragment
            for round in self.rounds
            if (held := held_by(member, round.fragment))
            and held.round >= round.number
            and held == lost_state(round, self.members, now_s)
        )

    def is_stuck(self, now_s: float) -> bool:
        """Return whether every live island waits for a round, so that none will move.

        Islands that are out of phase can wait for each other's fragments. If one of
        them still trains, it will come to its next send point; if none does, only
        what they are asked for can close a round before a deadline.
        """
        live = self.members.live(now_s)
        can_close = not self.is_held and len(live) >= self.settings.run.quorum
        is_blocked = can_close and all(map(self._is_blocked, live))
        return is_blocked and not self._expects_somebody(now_s)

    def wanted(self, island: str, now_s: float) -> tuple[int, ...]:
        """Return the fragments that the run waits for this island to publish.

        That is one it waits for itself, although nothing of it is here: on its way,
        or lost. If the run is stuck it is every fragment, and below the quorum even
        those whose open round does not wait for it, as it is a newcomer.
        """
        waits_for, quorum = (
            self.members.known[island].waits_for,
            self.settings.run.quorum,
        )
        missed = [
            round
            for round in self.rounds
            if round.phase is Phase.OPEN and island not in round.staged
        ]
        is_stuck = bool(missed) and self.is_stuck(now_s)
        return tuple(
            round.fragment
            for round in missed
            if (round.fragment, round.number) == waits_for
            or (is_stuck and (island in round.candidates or len(round.staged) < quorum))
        )

    def _expects_somebody(self, now_s: float) -> bool:
        """Return whether a dead island may come back in time, and then will move."""
        live = self.members.live(now_s)
        return any(
            now_s < round.late_at_s(name, self.members, self.settings)
            for round in self.rounds
            if round.phase is Phase.OPEN
            for name in round.missing(self.members, now_s) - live
        )

    def _is_blocked(self, island: str) -> bool:
        waits_for = self.members.known[island].waits_for
        return waits_for is not None and any(
            (round.fragment, round.number) == waits_for
            and round.phase is Phase.OPEN
            and island in round.staged
            for round in self.rounds
        )

    def founding_of(self, island: str, incarnation: int) -> Founding:
        """Return the founding that this life of an island has in hand.

        Raises:
            FoundingLost: it has none, or no more.
        """
        founding = self.founding
        who = founding and (founding.island, founding.incarnation)
        if founding is None or who != (island, incarnation):
            raise FoundingLost(
                f"Island {island!r} is not founding this run. "
                "Join again to take its weights."
            )
        return founding
