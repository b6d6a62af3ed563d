"""What an observer of a bucket knows of a run, by its own clock.

Rule 1: everybody keeps a `CoordinatorState` of what it has read, and asks it what the
        coordinator's machine is asked. Two observers may see things at other times;
        what decides (a roster, a control) is put once, and the same for both.
Rule 2: a member is gone when its document has not changed for a lease of the
        observer's own clock. No clock of a writer is ever read.
Rule 3: an update of an earlier life counts only if its successor names it.
Rule 4: an island that joins a run that has begun is waited for from the next opening
        on.

Nothing here waits or reads: `Lookout` does, and tells. What is known of updates, of
members and of operators' words has a file each, and changes the `Sight` that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from atoll.exchange.bucket.documents import (
    ControlDocument,
    CountedProgress,
    MemberDocument,
    RosterDocument,
    RosterHead,
)
from atoll.exchange.bucket.moves import Moves
from atoll.protocol import ModelSpec, Position, Reception
from atoll.protocol.counted import Counted, CountedUpdates
from atoll.protocol.rounds import Phase, Round
from atoll.protocol.run_state import CoordinatorState
from atoll.protocol.values import changed
from atoll.settings import RunSettings
from atoll.weights import Layout, Terms, lay_out, terms_of
from atoll.wire import Header
from atoll.wire.header import BASE_BYTES

LEASE_S = 30.0
"""How long nobody doubts an island whose document does not change."""

BEATS_PER_LEASE = 5
BEAT_S = LEASE_S / BEATS_PER_LEASE

UNKNOWN = bytes(BASE_BYTES)
"""The base of a round whose observer has not taken the one before."""


class Sight:
    """The run, and the open round of each fragment. Not for several threads at once."""

    def __init__(
        self, run: str, settings: RunSettings, *, lease_s: float = LEASE_S
    ) -> None:
        self.lease_s = lease_s
        self.layout: Layout = ()
        self.state = CoordinatorState(
            run=run, settings=settings, last_round=settings.run.end_rounds
        )
        self.documents: dict[str, MemberDocument] = {}
        """The latest life of each island."""

        self.has_begun = False
        """Since `start_islands` took part, though some have left."""

        self.rosters: dict[tuple[int, int], RosterDocument] = {}
        """The last ones: outcomes are asked for soon after."""

        self.heads: dict[int, RosterHead] = {}
        """The last roster of each fragment: the next one names its digest."""

        self.controls: list[ControlDocument] = []
        self.in_force: list[ControlDocument] = []
        """Without what was void, or about moves."""

        self.moves = Moves()

    @property
    def settings(self) -> RunSettings:
        return self.state.settings

    @property
    def moved_to(self) -> str | None:
        """Where the run is, once it is elsewhere."""
        move = self.state.move
        return move.target if move is not None and move.is_over else None

    def found(self, model: ModelSpec, now_s: float, head: RosterHead) -> None:
        """Take the run's model: its rounds are there from now on."""
        self.layout = lay_out(model, self.settings)
        self.heads = {index: head for index in range(len(self.layout))}
        rounds = tuple(
            Round(
                fragment=index,
                number=1,
                phase=Phase.WAITING,
                base=UNKNOWN,
                bases=(),
                outer=self.terms(index).outer,
                opened_s=now_s,
            )
            for index in range(len(self.layout))
        )
        self.state = changed(self.state, model=model, rounds=rounds)
        self.settle(now_s)

    def terms(self, fragment: int) -> Terms:
        return terms_of(self.layout[fragment], self.settings)

    def number(self, fragment: int) -> int:
        """Return the open round of a fragment."""
        return self.state.rounds[fragment].number

    def begin_after(
        self,
        fragment: int,
        round: int,
        counted: Iterable[CountedProgress],
        bases: tuple[bytes, ...],
        now_s: float,
        *,
        head: RosterHead,
    ) -> None:
        """Begin with the rounds after a state: the rosters before it are not read."""
        self.heads[fragment] = head
        before = self.state.rounds[fragment]
        opened = changed(before, number=round + 1, bases=bases, opened_s=now_s)
        by_island = dict(self.state.counted.by_island)
        for each in counted:
            fragments = list(
                by_island.get(each.island, (None,) * len(self.state.rounds))
            )
            fragments[fragment] = Counted(
                round=each.round, inner_steps=each.inner_steps, tokens=each.tokens
            )
            by_island[each.island] = tuple(fragments)
        self.state = changed(self.state, counted=CountedUpdates(by_island))
        self.put(opened)
        self.settle(now_s)

    def reception(self, header: Header) -> Reception | None:
        """Return what becomes of an update by its round; None: it may be put."""
        round = self.state.rounds[header.fragment]
        last = self.state.last_round
        if header.round < round.number or (last is not None and header.round > last):
            return Reception.COMMITTED
        return None

    def never_opens(self, round: int) -> bool:
        return self.state.last_round is not None and round > self.state.last_round

    def position(self, now_s: float, *, island: str | None = None) -> Position:
        """Return where the run is, and what it wants of an island."""
        known = island if island in self.state.members.known else None
        return replace(self.state.position(now_s, island=known), lost=())

    def live(self, now_s: float) -> Collection[str]:
        return self.state.members.live(now_s)

    def is_doubtful(self, fragment: int, round: int, digest: bytes) -> bool:
        """Return whether others hold another state of a fragment after a round."""
        closed = self.rosters.get((fragment, round + 1))
        others = {
            document.beat.holds[fragment].digest
            for document in self.documents.values()
            if fragment < len(document.beat.holds)
            and document.beat.holds[fragment].round == round
        }
        return bool(others - {digest}) or (closed is not None and closed.base != digest)

    def candidates(self, fragment: int, round: int, now_s: float) -> frozenset[str]:
        """Return who is waited for in a round."""
        return frozenset(
            name
            for name in self.state.members.live(now_s)
            if _opened(self.documents[name], fragment) < round
        )

    def settle(self, now_s: float) -> None:
        """Bring up to date what the clock and newcomers change in open rounds."""
        self._outlast()
        live, rounds = self.state.members.live(now_s), []
        taking_part = live.union(*(round.staged for round in self.state.rounds))
        self.has_begun = (
            self.has_begun
            or any(round.number > 1 for round in self.state.rounds)
            or len(taking_part) >= self.settings.run.start_islands
        )
        for round in self.state.rounds:
            phase = Phase.OPEN if self.has_begun else Phase.WAITING
            opened_s = round.opened_s
            if phase is Phase.OPEN and round.phase is Phase.WAITING:
                opened_s = now_s
            if self.never_opens(round.number):
                phase = Phase.ENDED
            candidates = self.candidates(round.fragment, round.number, now_s)
            outer = round.outer if round.staged else self.terms(round.fragment).outer
            rounds.append(
                changed(
                    round,
                    phase=phase,
                    opened_s=opened_s,
                    candidates=candidates,
                    outer=outer,
                )
            )
        self.state = changed(self.state, rounds=tuple(rounds))

    def _outlast(self) -> None:
        """Let the run end with a round that was closed beyond its last one.

        A stop may be said while a roster is on its way. That roster stands, and so the
        stop is for its round: every fragment can end with the same one.
        """
        last = self.state.last_round
        closed = max((round.number - 1 for round in self.state.rounds), default=0)
        if last is not None and last < closed:
            self.state = changed(self.state, last_round=closed)

    def put(self, round: Round) -> None:
        """Take a round in the place of the fragment's open one."""
        at, rounds = round.fragment, self.state.rounds
        self.state = changed(
            self.state, rounds=(*rounds[:at], round, *rounds[at + 1 :])
        )


def _opened(document: MemberDocument, fragment: int) -> int:
    """Return the round that was open when an island joined; 0 before the first."""
    return document.opened[fragment] if fragment < len(document.opened) else 0
