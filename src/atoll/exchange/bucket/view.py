"""One observer's view of a run in a bucket: members, updates, bases and controls.

Rule 1: every observer keeps a `CoordinatorState` of the objects that it has read, and
        asks it the questions of the coordinator's machine. Two observers may see
        things at different times; a decision (a roster, a control) is put once, and is
        the same for both.
Rule 2: a member has left when its document has not changed for a lease of the
        observer's own clock. No clock of a writer is ever read.
Rule 3: an update of an earlier incarnation counts only if its successor names it.
Rule 4: an island that joins a run that has begun is waited for from the next opening
        on.
Rule 5: controls of operators form one sequence, and are applied in its order.

Nothing here waits or reads: `BucketReader` does, and updates the view.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from atoll.errors import CorruptError, UsageError
from atoll.exchange.bucket.documents import (
    ControlDocument,
    CountedProgress,
    MemberDocument,
    RosterDocument,
    RosterHead,
    Stand,
)
from atoll.exchange.bucket.keys import IncarnationKey, slug
from atoll.protocol import HeldRound, ModelSpec, Position, Reception
from atoll.protocol.coordinator import roster_of
from atoll.protocol.coordinator_state import CoordinatorState, Move
from atoll.protocol.membership import EVICTED, CountedUpdates, Member, max_schedule_step
from atoll.protocol.messages import CountedWork
from atoll.protocol.operators import END_ROUNDS, end_by_tokens
from atoll.protocol.rounds import KNOWN_BASES, Phase, Round
from atoll.protocol.tables import changed
from atoll.settings import EPOCH_KEYS, RunSettings
from atoll.weights import Layout, Terms, lay_out, terms_of
from atoll.wire import FrameKind, Header, Roster, RosterEntry, Verdict
from atoll.wire.header import BASE_BYTES

LEASE_S = 30.0
"""How long nobody doubts an island whose document does not change."""

BEATS_PER_LEASE = 5
BEAT_S = LEASE_S / BEATS_PER_LEASE

UNKNOWN = bytes(BASE_BYTES)
"""The base of a round whose observer has not taken the one before."""


class RunView:
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

        self.moves = MoveControls()

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
            fragments[fragment] = CountedWork(
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


KEPT_ROSTERS = 8
"""Of each fragment, in memory; older ones are read again by who asks for them."""


class UpdateView:
    """What islands have published, what stands, and what is due."""

    def __init__(self, sight: RunView) -> None:
        self._sight = sight
        self._hollow: set[tuple[int, IncarnationKey]] = set()
        """What stands in open rounds by somebody's word, and is not there."""

        self._objections: dict[tuple[int, str], str] = {}

    def see(self, header: Header, now_s: float, *, objection: str = "") -> bool:
        """Stage an update for the open round; return whether it can count."""
        round = self._sight.state.rounds[header.fragment]
        if header.round != round.number or header.island in round.staged:
            return header.round == round.number
        if not self._may_speak(header):
            return False
        if objection:
            self._objections[header.fragment, header.island] = objection
        member = self._sight.state.members.known[header.island]
        seconds = max(0.0, now_s - round.opened_s)
        member = changed(
            member.arrived(header.fragment, seconds),
            lease_until_s=max(member.lease_until_s, now_s + self._sight.lease_s),
        )
        members = self._sight.state.members.with_member(member)
        self._sight.state = changed(self._sight.state, members=members)
        self._sight.put(round.stage(header, now_s))
        self._sight.settle(now_s)
        return True

    def _may_speak(self, header: Header) -> bool:
        document = self._sight.documents.get(header.island)
        if document is None:
            return False
        if header.incarnation == document.beat.incarnation:
            return True
        return any(
            (stand.fragment, stand.round, stand.incarnation)
            == (header.fragment, header.round, header.incarnation)
            for stand in document.stands
        )

    def speaking(self, headers: Iterable[Header]) -> list[Header]:
        """Return the updates of islands' last lives, and what those name."""
        return [header for header in headers if self._may_speak(header)]

    def unstage(self, island: str) -> None:
        """Forget what an earlier life has published, unless its successor names it."""
        for round in self._sight.state.rounds:
            standing = round.staged.get(island)
            if standing is not None and not self._may_speak(standing):
                others = {
                    name: header
                    for name, header in round.staged.items()
                    if name != island
                }
                self._objections.pop((round.fragment, island), None)
                self._sight.put(changed(round, staged=others))

    def standing(self, fragment: int, round: int) -> list[IncarnationKey]:
        """Return whose updates stand in a round by a document."""
        return [
            IncarnationKey(slug(name), stand.incarnation)
            for name, document in self._sight.documents.items()
            for stand in document.stands
            if (stand.fragment, stand.round) == (fragment, round)
        ]

    def unread(self, fragment: int) -> list[IncarnationKey]:
        """Return whose updates stand in the open round by a document, and are not seen.

        A list may be late, or older than the farewell of who left something.
        """
        round = self._sight.state.rounds[fragment]
        standing = self.standing(fragment, round.number)
        staged = {slug(name) for name in round.staged} if standing else set()
        return [
            life
            for life in standing
            if life.slug not in staged and (fragment, life) not in self._hollow
        ]

    def see_nothing(self, fragment: int, lives: Iterable[IncarnationKey]) -> None:
        """Take note that updates are not there, whoever says that they stand."""
        self._hollow.update((fragment, life) for life in lives)

    def left_out(self, fragment: int, *, within: int) -> list[tuple[str, Stand]]:
        """Return what farewells name in the last closed rounds, listed there or not."""
        number = self._sight.number(fragment)
        return [
            (name, stand)
            for name, document in self._sight.documents.items()
            if document.has_left
            for stand in document.stands
            if stand.fragment == fragment and number - within <= stand.round < number
        ]

    def see_roster(self, document: RosterDocument, now_s: float) -> None:
        """Take note that the open round of a fragment is closed; open the next.

        Raises:
            CorruptError: it is the roster of another round.
        """
        round = self._sight.state.rounds[document.fragment]
        if document.round != round.number:
            raise CorruptError(
                f"The roster of round {document.round} stands where that of round "
                f"{round.number} of fragment {document.fragment} must be. "
                "Restore the bucket from a copy."
            )
        self._sight.heads[document.fragment] = RosterHead(
            round=document.round,
            digest=document.digest,
            is_chained=bool(document.before),
        )
        self._sight.rosters[document.fragment, document.round] = document
        self._sight.rosters.pop(
            (document.fragment, document.round - KEPT_ROSTERS), None
        )
        self._forget(document.fragment)
        counted = self._sight.state.counted.adding(
            document.roster,
            fragment=document.fragment,
            round=document.round,
            num_fragments=len(self._sight.state.rounds),
        )
        self._sight.state = changed(self._sight.state, counted=counted)
        closing = changed(round, phase=Phase.CLOSING, roster=document.roster)
        opened = closing.commit(
            base=UNKNOWN,
            roster=document.roster,
            outer=self._sight.terms(document.fragment).outer,
            candidates=self._sight.candidates(
                document.fragment, round.number + 1, now_s
            ),
            now_s=now_s,
            last_round=self._sight.state.last_round,
        )
        bases = (*round.bases, document.base)[-KNOWN_BASES:]
        self._sight.put(changed(opened, bases=bases, staged={}))
        self._sight.settle(now_s)

    def closing(
        self, fragment: int, island: str, now_s: float
    ) -> tuple[Round, Roster] | None:
        """Return the round that `island` may close now, and its roster.

        Only who has published for it may: so it has taken the round before, knows the
        base, and has nothing to lose by the closing. If the run has a decider, nobody
        else may.
        """
        self._sight.settle(now_s)
        round = self._sight.state.rounds[fragment]
        may_close = (
            island in round.staged
            and self._sight.settings.store.decider in (None, island)
            and round.base != UNKNOWN
            and not self.unread(fragment)
            and not self._sight.state.is_held
        )
        if not may_close:
            return None
        if not round.can_close(self._sight.state.members, self._sight.settings, now_s):
            return None
        return round, self._judged(fragment, roster_of(self._sight.state, round, now_s))

    def ended_by_tokens(self) -> int | None:
        """Return the last round, if `end_tokens` make it earlier than it was."""
        state = self._sight.state
        last = end_by_tokens(state).last_round
        return None if last == state.last_round else last

    def _judged(self, fragment: int, roster: Roster) -> Roster:
        """Return the roster without what the run's terms do not allow."""
        return Roster(
            tuple(
                _objected(entry, self._objections.get((fragment, entry.island)))
                for entry in roster.entries
            )
        )

    def _forget(self, fragment: int) -> None:
        self._hollow = {each for each in self._hollow if each[0] != fragment}
        self._objections = {
            key: value for key, value in self._objections.items() if key[0] != fragment
        }


def _objected(entry: RosterEntry, reason: str | None) -> RosterEntry:
    if reason is None or entry.verdict is not Verdict.COUNTED:
        return entry
    return replace(entry, verdict=Verdict.REFUSED, reason=reason)


class MemberView:
    """Who takes part, as far as was read."""

    def __init__(self, sight: RunView, updates: UpdateView) -> None:
        self._sight, self._updates = sight, updates
        self._read_s: dict[str, float] = {}
        """When each one was last read, changed or not."""

        self._lives: dict[IncarnationKey, str] = {}
        self._latest: dict[str, int] = {}
        self._evicted: set[tuple[str, int]] = set()

    def see(self, document: MemberDocument, now_s: float) -> None:
        """Take note of a member's document; one that has not changed says nothing."""
        beat = document.beat
        before = self._sight.state.members.known.get(beat.island)
        if before is not None and beat.incarnation < before.incarnation:
            return
        read_s = self._read_s.get(beat.island, now_s)
        self._read_s[beat.island] = now_s
        if self._sight.documents.get(beat.island) == document:
            self._renew_unwatched(beat.island, read_s, now_s)
            return
        self._sight.documents[beat.island] = document
        self._lives[IncarnationKey(slug(beat.island), beat.incarnation)] = beat.island
        self._latest[slug(beat.island)] = beat.incarnation
        is_evicted = (beat.island, beat.incarnation) in self._evicted
        member = Member(
            island=beat.island,
            incarnation=beat.incarnation,
            slot=document.slot,
            key=document.key,
            nonce=document.nonce,
            lease_until_s=now_s + self._sight.lease_s,
            has_left=document.has_left or is_evicted,
            left_because=EVICTED if is_evicted else "",
            step=min(beat.step, self._last_step()),
            waits_for=beat.waits_for,
            holds=beat.holds,
            arrivals=before.arrivals if before else {},
        )
        members = self._sight.state.members.with_member(member)
        self._sight.state = changed(self._sight.state, members=members)
        self._updates.unstage(beat.island)
        self._sight.settle(now_s)

    def _last_step(self) -> int:
        """Return the schedule step that no island exceeds, as far as was read."""
        rounds = [round.number for round in self._sight.state.rounds]
        return max_schedule_step(rounds, self._sight.settings)

    def _renew_unwatched(self, island: str, read_s: float, now_s: float) -> None:
        """Begin a lease anew if nobody has watched most of it.

        An observer whose clock jumped, that stood still or could not read has seen no
        silence; a member that was gone when it was last read stays so.
        """
        member = self._sight.state.members.known[island]
        was_live = not member.has_left and read_s <= member.lease_until_s
        if was_live and now_s - read_s > self._sight.lease_s / 2:
            renewed = changed(member, lease_until_s=now_s + self._sight.lease_s)
            members = self._sight.state.members.with_member(renewed)
            self._sight.state = changed(self._sight.state, members=members)
            self._sight.settle(now_s)

    def unwatched(self, now_s: float) -> set[str]:
        """Return who would be gone, but was not read again when its lease was over.

        An observer that stood still, or could not read, has seen nobody fall silent.
        """
        return {
            name
            for name, member in self._sight.state.members.known.items()
            if not member.has_left
            and not member.is_live(now_s)
            and self._read_s.get(name, now_s) <= member.lease_until_s
        }

    def name_of(self, life: IncarnationKey) -> str | None:
        """Return whose life a key names; None: its document has not been read."""
        return self._lives.get(life)

    def knows(self, life: IncarnationKey) -> bool:
        """Return whether a document of this life has been read, or of a later one."""
        return self._latest.get(life.slug, -1) >= life.incarnation

    def rests(self, life: IncarnationKey, now_s: float) -> bool:
        """Return whether a life has been silent for so long that a look can wait.

        Who died without a farewell would be read for ever: between two looks a quarter
        of the silence passes, or two leases. An update would tell that it lives again.
        """
        name = self._lives.get(life)
        if name is None:
            return False
        member = self._sight.state.members.known[name]
        read_s = self._read_s.get(name, now_s)
        silent_s = now_s - (member.lease_until_s - self._sight.lease_s)
        pause_s = min(silent_s / 4, 2 * self._sight.lease_s)
        return member.lease_until_s < read_s and now_s - read_s < pause_s

    def evict(self, island: str, incarnation: int) -> None:
        self._evicted.add((island, incarnation))
        member = self._sight.state.members.known.get(island)
        if member is not None and member.incarnation == incarnation:
            members = self._sight.state.members.leave(member, because=EVICTED)
            self._sight.state = changed(self._sight.state, members=members)


class BaseView:
    """Which state each open round starts from, and whether islands agree about it."""

    def __init__(self, sight: RunView) -> None:
        self._sight = sight
        self._proven: dict[int, int] = {}
        """The round of each fragment whose base was made from what is in the bucket."""

    def see_held(self, fragment: int, held: HeldRound) -> None:
        """Take note of the state that the open round of a fragment starts from."""
        round = self._sight.state.rounds[fragment]
        if held.round + 1 == round.number and round.base == UNKNOWN:
            self._sight.put(changed(round, base=held.digest))

    def is_disputed(self, fragment: int) -> bool:
        """Return whether somebody started the open round from another state.

        A bit of one island's memory may have changed. If that island closed the round
        with its base, nobody else could ever take the outcome.
        """
        round = self._sight.state.rounds[fragment]
        if round.base == UNKNOWN or self._proven.get(fragment) == round.number:
            return False
        named = [
            header.base
            for header in round.staged.values()
            if header.kind is not FrameKind.DEPARTING and not header.refused
        ]
        named += [
            document.beat.holds[fragment].digest
            for document in self._sight.documents.values()
            if fragment < len(document.beat.holds)
            and document.beat.holds[fragment].round + 1 == round.number
        ]
        return any(base != round.base for base in named)

    def see_proven(self, fragment: int, held: HeldRound) -> None:
        """Take note of the state that the bucket gives, whatever islands hold."""
        round = self._sight.state.rounds[fragment]
        if held.round + 1 == round.number:
            self._proven[fragment] = round.number
            self._sight.put(changed(round, base=held.digest))


class ControlView:
    """Heeds what operators have said, word for word."""

    def __init__(self, sight: RunView, members: MemberView) -> None:
        self._sight, self._members = sight, members

    def see(self, document: ControlDocument, now_s: float) -> None:
        """Take note of what an operator has said."""
        self._sight.controls.append(document)
        if self._sight.moves.see(len(self._sight.controls), document):
            self._sight.state = changed(self._sight.state, move=self._sight.moves.move)
        elif self._heed(document):
            self._sight.in_force.append(document)
        self._sight.settle(now_s)

    def _heed(self, document: ControlDocument) -> bool:
        """Do what an operator has said; False: that is impossible."""
        match document.action:
            case "set":
                return self._set(document)
            case "pause" | "resume":
                is_paused = document.action == "pause"
                self._sight.state = changed(self._sight.state, is_paused=is_paused)
            case "save":
                self._sight.state = changed(
                    self._sight.state, saves=self._sight.state.saves + 1
                )
            case "stop":
                self._sight.state = changed(
                    self._sight.state, last_round=document.last_round
                )
            case "evict" if document.island is not None:
                self._members.evict(document.island, document.incarnation)
        return True

    def _set(self, document: ControlDocument) -> bool:
        if not EPOCH_KEYS.issuperset(document.values):
            return False  # what can never change is not changed by any document
        try:
            settings = self._sight.settings.with_values(document.values)
        except UsageError:
            return False  # whoever put it there was not Atoll
        last = self._sight.state.last_round
        if END_ROUNDS in document.values:
            last = settings.run.end_rounds
        self._sight.state = changed(
            self._sight.state,
            settings=settings,
            epoch=self._sight.state.epoch + 1,
            last_round=last,
        )
        return True


ACTIONS = ("move", "moved", "stay")


class MoveControls:
    """Reads the words, one after the other."""

    def __init__(self) -> None:
        self.move: Move | None = None
        """The one that is under way, or over."""

        self.number = 0
        """Of the word by which it began, or the last one did."""

        self.begun: set[int] = set()
        self.given_up: set[int] = set()

    def see(self, number: int, document: ControlDocument) -> bool:
        """Take note of a word; False: it is about something else, and in force."""
        match document.action:
            case "move" if self.move is None and document.target is not None:
                self.move = Move(target=document.target, nonce=document.nonce)
                self.number = number
                self.begun.add(number)
            case "moved" if self._is_under_way:
                assert self.move is not None
                self.move = changed(self.move, is_over=True)
            case "stay" if self._is_under_way:
                self.given_up.add(self.number)
                self.move = None
        return self.move is not None or document.action in ACTIONS

    def is_under_way(self, number: int) -> bool:
        """Return whether it is not decided yet where a move has led."""
        return number == self.number and self._is_under_way

    @property
    def _is_under_way(self) -> bool:
        return self.move is not None and not self.move.is_over
