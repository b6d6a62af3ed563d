"""The state of the coordinator's machine, and questions that it answers.

Recovery: states that a coordinator lost and its islands still hold.
Rule 1: after a restart nothing closes before every live member of the journal has
        reported its holdings, for one lease from the restart at most. Nothing renews
        that.
Rule 2: a fragment has lost rounds when a live member holds one that is not committed.
        It opens again after the newest of them: no island ever has to go back.
        Only a holding with the run's receipt counts: the host refuses a message with
        any other at or beyond the open round before the machine sees it.
Rule 3: of several digests for that round, the one that most islands report is right.
Rule 4: the run requests it from every waiting holder, and uses the first upload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from atoll.data import RowLedger
from atoll.errors import FoundingLost, Refused, RunEnded, RunMoved
from atoll.protocol.membership import Member, Members
from atoll.protocol.messages import CountedWork, HeldRound, Position
from atoll.protocol.model import ModelSpec
from atoll.protocol.rounds import ListedUpdate, Phase, Round, listed_updates
from atoll.protocol.tables import changed
from atoll.settings import RunSettings
from atoll.wire import Header, Roster


@dataclass(frozen=True)
class CountedUpdates:
    """The last counted update of each island, for every fragment."""

    by_island: Mapping[str, tuple[CountedWork | None, ...]] = field(
        default_factory=dict
    )
    listed: Mapping[tuple[int, str], ListedUpdate] = field(default_factory=dict)
    """By fragment and island; empty in a synchronous run."""

    @cached_property
    def tokens(self) -> int:
        """The sum over islands of the lowest counted progress."""
        return sum(
            min((work.tokens if work else 0) for work in fragments)
            for fragments in self.by_island.values()
        )

    def of(self, island: str) -> tuple[CountedWork, ...]:
        """Return the last counted update of an island in each fragment that has one."""
        return tuple(work for work in self.by_island.get(island, ()) if work)

    def last(self, island: str, *, fragment: int) -> CountedWork | None:
        """Return the last counted update of an island in one fragment, if any."""
        fragments = self.by_island.get(island, ())
        return fragments[fragment] if fragment < len(fragments) else None

    def by_fragment(
        self, island: str, num_fragments: int
    ) -> tuple[CountedWork | None, ...]:
        """Return the last counted update of an island, fragment by fragment.

        In an asynchronous run one of round 0 says when its last update was refused.
        """
        fragments = self.by_island.get(island, (None,) * num_fragments)
        if not self.listed:
            return fragments
        return tuple(
            self._with_listed(work, self.listed.get((index, island)))
            for index, work in enumerate(fragments)
        )

    def _with_listed(
        self, work: CountedWork | None, listed: ListedUpdate | None
    ) -> CountedWork | None:
        if listed is None or (work is not None and work.round >= listed.round):
            return work
        if work is None:
            work = CountedWork(round=0, inner_steps=0, tokens=0)
        return replace(work, listed=listed.round)

    def adding(
        self,
        roster: Roster,
        *,
        fragment: int,
        round: int,
        num_fragments: int,
        is_async: bool = False,
    ) -> CountedUpdates:
        """Return this with the roster of one more round."""
        by_island = dict(self.by_island)
        for entry in roster.counted:
            fragments = list(by_island.get(entry.island, (None,) * num_fragments))
            fragments[fragment] = CountedWork(
                round=round,
                inner_steps=entry.inner_steps,
                tokens=entry.tokens,
                incarnation=entry.incarnation,
            )
            by_island[entry.island] = tuple(fragments)
        if not is_async:
            return CountedUpdates(by_island, self.listed)
        listed = listed_updates(roster, fragment=fragment, round=round)
        return CountedUpdates(by_island, {**self.listed, **listed})


class ListedWindow(NamedTuple):
    """The window of an island in a roster that lists it. Later ones are greater."""

    round: int
    fragment: int
    window: int
    """Inner steps per window; 0: `sync_every`."""


@dataclass(frozen=True)
class Windows:
    """The inner steps per window of the islands, with dynamic local updates.

    That of an island is in the roster of the highest round that lists it, of several
    fragments the last. So it does not depend on the order in which rosters are read.
    """

    last: Mapping[str, ListedWindow] = field(default_factory=dict)

    def of(self, island: str) -> int:
        """Return the inner steps per window of an island; 0: `sync_every`."""
        listed = self.last.get(island)
        return listed.window if listed else 0

    def adding(
        self, windows: Mapping[str, int], *, fragment: int, round: int
    ) -> Windows:
        """Return this with the windows of the islands that one more roster lists."""
        listed = {
            island: ListedWindow(round, fragment, window)
            for island, window in windows.items()
        }
        later = {
            island: window
            for island, window in listed.items()
            if island not in self.last or window[:2] >= self.last[island][:2]
        }
        return Windows({**self.last, **later}) if later else self

    def without(self, island: str) -> Windows:
        """Return this without a name that is forgotten."""
        if island not in self.last:
            return self
        others = {name: last for name, last in self.last.items() if name != island}
        return Windows(others)


@dataclass(frozen=True, kw_only=True)
class TokenBucket:
    """A rate limiter as a value: a burst, then a steady rate."""

    burst: float
    per_s: float
    remaining: float
    at_s: float = 0.0
    """The time of `remaining`; it never goes back, so that no time counts twice."""

    @classmethod
    def full(cls, burst: float, *, per_s: float) -> TokenBucket:
        return cls(burst=burst, per_s=per_s, remaining=burst)

    def spent(self, now_s: float) -> TokenBucket | None:
        """Return the bucket after one more use, or None if it is empty."""
        remaining = self.remaining_at(now_s)
        if remaining < 1.0:
            return None
        at_s = max(self.at_s, now_s)
        return TokenBucket(
            burst=self.burst, per_s=self.per_s, remaining=remaining - 1.0, at_s=at_s
        )

    def remaining_at(self, now_s: float) -> float:
        """Return the number of uses left; a clock that went back refills nothing."""
        passed_s = max(0.0, now_s - self.at_s)
        return min(self.burst, self.remaining + passed_s * self.per_s)


JOINS = TokenBucket.full(1024, per_s=4.0)
"""New incarnations that a run accepts as a burst, and then per second."""


@dataclass(frozen=True, kw_only=True)
class Founding:
    """An island uploads the run's first weights, until its lease runs out."""

    island: str
    incarnation: int
    model: ModelSpec
    until_s: float


@dataclass(frozen=True, kw_only=True)
class Move:
    """The run moves to another place, or has moved."""

    target: str
    nonce: str
    """Unique to this move: data at the target with this nonce belongs to it."""

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
    windows: Windows = field(default_factory=Windows)
    """Empty without dynamic local updates."""

    ledger: RowLedger | None = None
    """Of a run that deals out rows, once it has weights."""

    last_round: int | None = None
    """In an asynchronous run the fragments end once each has committed all rounds
    before this one."""

    last_rounds: tuple[int, ...] | None = None
    """Of each fragment, once the end of an asynchronous run is decided."""

    is_paused: bool = False
    """By an operator: nothing closes."""

    saves: int = 0
    """How often an operator has asked islands to save, since the coordinator began."""

    move: Move | None = None
    """By an operator: only rounds close that hold work of islands that have left."""

    joins: TokenBucket = JOINS
    """Rate limit of new incarnations: each is a durable record."""

    trusts_names: bool = False
    """Rounds wait for every newcomer, however many names were idle before it."""

    is_observed: bool = False
    """Rosters are written elsewhere, and close its rounds: see `observer`."""

    @classmethod
    def begin(
        cls,
        run: str,
        settings: RunSettings,
        *,
        joins: TokenBucket = JOINS,
        trusts_names: bool = False,
        is_observed: bool = False,
    ) -> CoordinatorState:
        """Return the state of a run that no island has joined."""
        return cls(
            run=run,
            settings=settings,
            last_round=settings.run.end_rounds,
            joins=joins,
            trusts_names=trusts_names,
            is_observed=is_observed,
        )

    def with_round(self, round: Round) -> CoordinatorState:
        """Return the state with another open round of a fragment."""
        rounds, index = self.rounds, round.fragment
        return changed(self, rounds=(*rounds[:index], round, *rounds[index + 1 :]))

    def with_update(self, header: Header, now_s: float) -> CoordinatorState:
        """Return the state with an update; its island's arrival is learned."""
        round = self.rounds[header.fragment]
        state = self.with_round(round.stage(header, now_s))
        is_early = header.round != round.number or round.phase is not Phase.OPEN
        if is_early or round.is_async:  # which has no use for learned deadlines
            return state
        seconds = max(0.0, now_s - round.opened_s)
        learned = self.members.known[header.island].arrived(header.fragment, seconds)
        return changed(state, members=state.members.with_member(learned))

    def with_counted(
        self, roster: Roster, *, fragment: int, round: int
    ) -> CoordinatorState:
        """Return the state with the counted updates and windows of one more round."""
        counted = self.counted.adding(
            roster,
            fragment=fragment,
            round=round,
            num_fragments=len(self.rounds),
            is_async=self.rounds[fragment].is_async,
        )
        ledger = self.ledger
        if ledger is not None and not self.is_observed:
            ledger = ledger.settled(fragment, roster)
        state = changed(self, counted=counted, ledger=ledger)
        return state.with_windows(roster.windows, fragment=fragment, round=round)

    def with_windows(
        self, windows: Mapping[str, int], *, fragment: int, round: int
    ) -> CoordinatorState:
        """Return the state with the windows in a roster."""
        sync = self.settings.sync
        if not sync.dynamic_local_updates:
            return self
        valid = {
            island: window if window < sync.sync_every else 0
            for island, window in windows.items()
        }
        added = self.windows.adding(valid, fragment=fragment, round=round)
        state = changed(self, windows=added)
        for island in windows:
            factor = state.window_of(island) / self.window_of(island)
            state = state.with_slower(island, factor) if factor > 1.0 else state
        return state

    def with_slower(self, island: str, factor: float) -> CoordinatorState:
        """Return the state after the window of an island has grown by a factor.

        By its learned deadline it would be late. An island whose window has shrunk is
        early until its arrivals have taught that.
        """
        member = self.members.known.get(island)
        if member is None:
            return self
        arrivals = {
            fragment: learned.slower(factor)
            for fragment, learned in member.arrivals.items()
        }
        member = changed(member, arrivals=arrivals)
        return changed(self, members=self.members.with_member(member))

    def with_ledger(self) -> CoordinatorState:
        """Return the state of a founded run with an empty ledger, if it deals rows."""
        data = self.settings.data
        if not data.is_dealt:
            return self
        ledger = RowLedger(
            unit_rows=data.unit_rows,
            passes=data.passes,
            num_fragments=len(self.rounds),
        )
        return changed(self, ledger=ledger)

    def window_of(self, island: str) -> int:
        """Return the inner steps per window of an island."""
        return self.windows.of(island) or self.settings.sync.sync_every

    def round(self, fragment: int) -> Round:
        """Return the open round of a fragment.

        Raises:
            Refused: there is no such fragment.
        """
        require_fragment(fragment, len(self.rounds))
        return self.rounds[fragment]

    def round_of(self, header: Header) -> Round:
        """Return the open round of the fragment that a frame names.

        Raises:
            Refused: there is no such fragment, or the frame is of another run.
        """
        require_own(header, run=self.run, num_fragments=len(self.rounds))
        return self.rounds[header.fragment]

    def last_of(self, fragment: int) -> int | None:
        """Return the last round of a fragment, if it is decided."""
        if self.last_rounds is not None:
            return self.last_rounds[fragment]
        if self.settings.sync.mode == "async" and self.last_round:
            return None
        return self.last_round

    def never_opens(self, round: int, *, fragment: int) -> bool:
        """Return whether a round of a fragment is beyond its last one."""
        last = self.last_of(fragment)
        return last is not None and round > last

    def require_here(self) -> None:
        """Return unless the run has moved.

        Raises:
            RunMoved: it has; `target` is its new place.
        """
        if self.move is not None and self.move.is_over:
            raise RunMoved(
                f"Run {self.run!r} has moved to {self.move.target}. It continues "
                "there.",
                target=self.move.target,
            )

    def require_opens(self, round: int, *, fragment: int) -> None:
        """Return unless a round of a fragment is beyond its last one.

        Raises:
            RunEnded: it is.
        """
        if self.never_opens(round, fragment=fragment):
            raise run_ended(round, self.last_of(fragment))

    @property
    def has_started(self) -> bool:
        """True from the moment `start_islands` took part, though some have left."""
        # Computed for every message, and the first round mostly decides: no generator.
        for round in self.rounds:  # noqa: SIM110
            if round.phase is not Phase.WAITING:
                return True
        return False

    @property
    def is_held(self) -> bool:
        """Whether an operator keeps rounds from closing."""
        return self.is_paused or self.move is not None

    def position(self, now_s: float, *, island: str | None = None) -> Position:
        """Return the run's position by its live islands, with its requests to one."""
        step = self.members.look(now_s).median_step
        is_async = self.settings.sync.mode == "async"
        return Position(
            step=step if self.has_started else 0,
            rounds=tuple([round.number for round in self.rounds]),
            last_round=None if is_async and self.last_round else self.last_round,
            last_rounds=self.last_rounds,
            tokens=self.counted.tokens,
            wanted=self.wanted(island, now_s) if island else (),
            lost=self.asked_of(island, now_s) if island else (),
            saves=self.saves,
            decay_round=self.settings.run.decay_round,
            end_tokens=self.settings.run.end_tokens,
        )

    def lost_state(self, fragment: int, now_s: float) -> HeldRound | None:
        """Return the state that only islands hold, once all have reported theirs."""
        if not all_heard(self.members, now_s):
            return None
        return lost_state(self.rounds[fragment], self.members, now_s)

    def asked_of(self, island: str, now_s: float) -> tuple[int, ...]:
        """Return the fragments whose state this island must upload while it waits."""
        member = self.members.known[island]
        if not member.waits_for or not all_heard(self.members, now_s):
            return ()
        return tuple(
            round.fragment
            for round in self.rounds
            if (held_round := held_by(member, round.fragment))
            and held_round.round >= round.number
            and held_round == lost_state(round, self.members, now_s)
        )

    def is_stuck(self, now_s: float) -> bool:
        """Return whether every live island waits for a round, so that none will move.

        Islands that are out of phase can wait for each other's fragments. If one of
        them still trains, it will come to its next send point; if none does, only
        a requested update can close a round before a deadline.
        """
        live = self.members.live(now_s)
        can_close = not self.is_held and len(live) >= self.settings.run.quorum
        if not can_close:
            return False
        waits = {island: self.members.known[island].waits_for for island in live}
        published = {
            (round.fragment, round.number): round.staged
            for round in self.rounds
            if round.phase is Phase.OPEN
        }
        return all_blocked(waits, published) and not self._expects_somebody(now_s)

    def wanted(self, island: str, now_s: float) -> tuple[int, ...]:
        """Return the fragments that the run waits for this island to publish.

        That is a fragment whose outcome the island itself waits for, although its own
        update is in flight or lost. If the run is stuck it is every fragment, and below
        the quorum even those whose open round does not wait for it, a newcomer.
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

    def founding_of(self, island: str, incarnation: int) -> Founding:
        """Return the founding that this incarnation of an island has begun.

        Raises:
            FoundingLost: it has none, or it has expired.
        """
        founding = self.founding
        founder = founding and (founding.island, founding.incarnation)
        if founding is None or founder != (island, incarnation):
            raise FoundingLost(
                f"Island {island!r} is not founding this run. "
                "Join again to take its weights."
            )
        return founding


def require_own(header: Header, *, run: str, num_fragments: int) -> None:
    """Return if a frame is of this run, and of one of its fragments.

    Raises:
        Refused: it is not.
    """
    if header.run != run:
        raise Refused(
            f"The frame belongs to run {header.run!r}, and this is {run!r}. "
            "Join this run first."
        )
    require_fragment(header.fragment, num_fragments)


def require_fragment(fragment: int, num_fragments: int) -> None:
    """Return if a run with `num_fragments` has this fragment.

    Raises:
        Refused: it has not.
    """
    if not 0 <= fragment < num_fragments:
        raise Refused(
            f"Fragment {fragment} does not exist: the run has {num_fragments}. "
            "Take the settings from the run."
        )


def run_ended(round: int, last_round: int | None) -> RunEnded:
    """Return the error for a round beyond the last one."""
    return RunEnded(
        f"Round {round} will not open: the run ended with round {last_round}."
    )


T = TypeVar("T")
Key = tuple[int, int]
"""Fragment and round."""


def all_blocked(
    waits: Mapping[T, Key | None], published: Mapping[Key, Container[T]]
) -> bool:
    """Return whether everyone waits for a round, and has published for it.

    Then each one waits for an update of another, and none will come to its next send
    point.
    """
    return all(
        key is not None and name in published.get(key, ())
        for name, key in waits.items()
    )


def all_heard(members: Members, now_s: float) -> bool:
    """Return whether every live member has reported its holdings."""
    return not members.look(now_s).unreported


def lost_state(round: Round, members: Members, now_s: float) -> HeldRound | None:
    """Return the state that the run must receive before this round, if any."""
    held_rounds = [
        holding
        for name in members.live(now_s)
        if (holding := held_by(members.known[name], round.fragment))
        and holding.round >= round.number
    ]
    if not held_rounds:
        return None
    newest = max(holding.round for holding in held_rounds)
    votes = Counter(
        holding.digest for holding in held_rounds if holding.round == newest
    )
    max_votes = max(votes.values())
    return HeldRound(
        newest, min(digest for digest in votes if votes[digest] == max_votes)
    )


def held_by(member: Member, fragment: int) -> HeldRound | None:
    """Return the last round of a fragment that a member has reported."""
    return member.holds[fragment] if fragment < len(member.holds) else None
