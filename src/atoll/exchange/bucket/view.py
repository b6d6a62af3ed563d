"""One observer's view of a run in a bucket: members, updates, bases and controls.

Rule 1: every observer keeps a `CoordinatorState` by the objects that it has read, which
        are events to the coordinator's machine. Two observers may read objects at
        different times; a decision (a roster, a control) is put once, and is the same
        for both.
Rule 2: a member counts as gone while its document has not changed for a lease of the
        observer's own clock. No clock of a writer is ever read: clocks of machines
        may differ by more than a lease; a wrong one would evict a live island, or keep
        a dead one.
Rule 3: an update of an earlier incarnation counts only if its successor names it.
Rule 4: an island that joins a run that has begun is waited for from the next opening
        on.
Rule 5: controls of operators form one sequence, and are applied in its order.

Nothing here waits or reads: `BucketReader` does, and updates the view.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from atoll.errors import CorruptError, UsageError
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import (
    ControlDocument,
    CountedProgress,
    MemberDocument,
    RosterDocument,
    RosterHead,
    StandingUpdate,
)
from atoll.exchange.bucket.keys import IncarnationKey, UpdateKey, slug
from atoll.protocol import HeldRound, ModelSpec, Position, Reception, events
from atoll.protocol.coordinator import advance, roster_of
from atoll.protocol.coordinator_state import CoordinatorState, Move
from atoll.protocol.membership import EVICTED, Member, max_schedule_step
from atoll.protocol.messages import CountedWork
from atoll.protocol.observer import UNKNOWN_BASE
from atoll.protocol.operators import is_to_end, last_by_tokens
from atoll.protocol.rounds import ListedUpdate, Round
from atoll.settings import EPOCH_KEYS, RunSettings
from atoll.weights import Layout, Terms, lay_out, terms_of
from atoll.wire import FrameKind, Header, OuterValues, Roster, RosterEntry, Verdict

NOTHING_LISTED: Mapping[str, ListedUpdate] = MappingProxyType({})

LEASE_S = 30.0
"""How long an island stays a member while its document does not change."""

BEATS_PER_LEASE = 5
BEAT_S = LEASE_S / BEATS_PER_LEASE


class RunView:
    """The run, and the open round of each fragment. Hold the reader's lock."""

    def __init__(
        self, run: str, settings: RunSettings, *, lease_s: float = LEASE_S
    ) -> None:
        self.lease_s = lease_s
        self.layout: Layout = ()
        self.state = CoordinatorState.begin(run, settings, is_observed=True)
        self.documents: dict[str, MemberDocument] = {}
        """The latest document of each island."""

        self.rosters: dict[tuple[int, int], RosterDocument] = {}
        """The last ones: most outcomes are read soon after their round."""

        self.heads: dict[int, RosterHead] = {}
        """The last roster of each fragment: the next one names its digest."""

        self.controls: list[ControlDocument] = []
        self.in_force: list[ControlDocument] = []
        """The controls, without void ones and those about moves."""

        self.moves = MoveControls()
        self.stop_number = 0
        """The number of the control that decided the end of an asynchronous run."""

    def advance(self, event: events.Event, now_s: float) -> None:
        """Apply an observed event, as the coordinator's machine does."""
        self.state, _ = advance(self.state, event, now_s)

    @property
    def settings(self) -> RunSettings:
        return self.state.settings

    @property
    def moved_to(self) -> str | None:
        """Address of the run, once it is elsewhere."""
        move = self.state.move
        return move.target if move is not None and move.is_over else None

    def set_model(self, model: ModelSpec, now_s: float, head: RosterHead) -> None:
        """Set the run's model, and open the first round of each fragment."""
        self.layout = lay_out(model, self.settings)
        self.heads = {index: head for index in range(len(self.layout))}
        outers = self.outers(self.settings)
        self.advance(events.FoundingSeen(model, outers), now_s)

    def outers(self, settings: RunSettings) -> tuple[OuterValues, ...]:
        """Return the outer values of each fragment by these settings."""
        return tuple(terms_of(fragment, settings).outer for fragment in self.layout)

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
        listed: Mapping[str, ListedUpdate] = NOTHING_LISTED,
    ) -> None:
        """Begin with the rounds after a state: the rosters before it are not read."""
        self.heads[fragment] = head
        works, windows = {}, {}
        for progress in counted:
            works[progress.island] = CountedWork(
                round=progress.round,
                inner_steps=progress.inner_steps,
                tokens=progress.tokens,
            )
            windows[progress.island] = progress.window
        seen = events.StateSeen(fragment, round, works, bases, windows, listed)
        self.advance(seen, now_s)

    def settle_end(self, document: RosterDocument, now_s: float) -> None:
        """Move the end of a fragment by a roster whose closer did not know of it."""
        if document.controls < self.stop_number:
            passed = events.EndPassed(document.fragment, document.round)
            self.advance(passed, now_s)

    def reception(self, header: Header) -> Reception:
        """Judge an update by its header; one beyond the last round is never wanted.

        Raises:
            Refused: another update stands for this island, or its round cannot be open.
        """
        if self.state.never_opens(header.round, fragment=header.fragment):
            return Reception.COMMITTED
        round = self.state.round_of(header)
        return round.receive(header, its_island="in step", listed=self.listed(header))

    @property
    def is_async(self) -> bool:
        """Whether an update counts in the round that is open when it is read."""
        return self.settings.sync.mode == "async"

    def key_of(self, fragment: int, update: UpdateKey) -> str:
        """Return the key at which an update is put."""
        if self.is_async:
            return keys.arrival(fragment, update)
        return f"{keys.updates(fragment, update.round)}{update.publisher}"

    def listed(self, header: Header) -> ListedUpdate | None:
        """Return the last update of the same island that a roster lists.

        Only for asynchronous runs.
        """
        return self.state.counted.listed.get((header.fragment, header.island))

    def is_over(self, fragment: int, island: str, update: UpdateKey) -> bool:
        """Return whether a roster of an asynchronous run lists an update, or a later.

        Those of an earlier incarnation are over with the first of the next: it joins
        when all of them are listed, except those that no roster can list.
        """
        last = self.state.counted.listed.get((fragment, island))
        order = (update.publisher.incarnation, update.round)
        return last is not None and (last.incarnation, last.label) >= order

    def stands(self, header: Header) -> bool:
        """Return whether no roster of an asynchronous run lists an update."""
        round = self.state.rounds[header.fragment]
        return round.stands(header, self.listed(header))

    def position(self, now_s: float, *, island: str | None = None) -> Position:
        """Return the run's position, with its requests to a member."""
        member = island if island in self.state.members.known else None
        return replace(self.state.position(now_s, island=member), lost=())

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


def _order(header: Header) -> tuple[int, int]:
    """Return the place of an update among those of its island."""
    return header.incarnation, header.round


KEPT_ROSTERS = 8
"""Rosters of each fragment in memory; older ones are read again when needed."""


class UpdateView:
    """The updates of open rounds, and the rosters that are due."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._absent: set[tuple[int, UpdateKey]] = set()
        """By fragment, updates that a member document names, and that do not exist."""

        self._objections: dict[tuple[int, str], str] = {}

    def stage(self, header: Header, now_s: float, *, objection: str = "") -> bool:
        """Stage an update for the open round; return whether it can count."""
        round = self._view.state.rounds[header.fragment]
        staged = round.staged.get(header.island)
        if self._view.is_async:
            if not self._comes_first(header, staged):
                return False
        elif header.round != round.number or staged is not None:
            return header.round == round.number
        if not self._is_accepted(header):
            return False
        if staged is not None:
            self._drop(header.fragment, header.island, now_s)
        if objection:
            self._objections[header.fragment, header.island] = objection
        until_s = now_s + self._view.lease_s
        self._view.advance(events.UpdateSeen(header, until_s), now_s)
        return True

    def _comes_first(self, header: Header, staged: Header | None) -> bool:
        """Return whether an update of an asynchronous run is to be staged.

        Of several that stand, rosters list the earliest first: a list that lags behind
        may show them in another order.
        """
        number = self._view.number(header.fragment)
        if header.round > number or not self._view.stands(header):
            return False
        return staged is None or _order(header) < _order(staged)

    def _drop(self, fragment: int, island: str, now_s: float) -> None:
        self._objections.pop((fragment, island), None)
        self._view.advance(events.UpdateRevoked(fragment, island), now_s)

    def _is_accepted(self, header: Header) -> bool:
        document = self._view.documents.get(header.island)
        if document is None:
            return False
        if header.incarnation == document.beat.incarnation:
            return True
        return any(
            (update.fragment, update.round, update.incarnation)
            == (header.fragment, header.round, header.incarnation)
            for update in document.stands
        )

    def accepted(self, headers: Iterable[Header]) -> list[Header]:
        """Return the updates of latest incarnations, and those that they name."""
        return [header for header in headers if self._is_accepted(header)]

    def unstage(self, island: str, now_s: float) -> None:
        """Drop updates of an earlier incarnation that its successor does not name."""
        for round in self._view.state.rounds:
            header = round.staged.get(island)
            if header is not None and not self._is_accepted(header):
                self._drop(round.fragment, island, now_s)

    def standing(self, fragment: int, round: int) -> list[IncarnationKey]:
        """Return the publishers of updates that documents name in a round."""
        return [
            update.publisher
            for _, update in self._named(fragment)
            if update.round == round
        ]

    def _named(self, fragment: int) -> list[tuple[str, UpdateKey]]:
        """Return the updates that documents name in a fragment, with their islands."""
        return [
            (
                name,
                UpdateKey.of(update.round, name, update.incarnation),
            )
            for name, document in self._view.documents.items()
            for update in document.stands
            if update.fragment == fragment
        ]

    def unread(self, fragment: int) -> list[UpdateKey]:
        """Return updates of the open round that documents name, and that were not read.

        A list of the open round may lag behind, or be older than a farewell.
        """
        return [
            update
            for name, update in self._named(fragment)
            if (fragment, update) not in self._absent
            and self._is_unread(fragment, name, update)
        ]

    def _is_unread(self, fragment: int, name: str, update: UpdateKey) -> bool:
        round = self._view.state.rounds[fragment]
        staged = round.staged.get(name)
        if not self._view.is_async:
            return update.round == round.number and staged is None
        if update.round > round.number or self._view.is_over(fragment, name, update):
            return False
        order = (update.publisher.incarnation, update.round)
        return staged is None or order < _order(staged)

    def note_absent(self, fragment: int, updates: Iterable[UpdateKey]) -> None:
        """Record that updates do not exist, although documents name them."""
        self._absent.update((fragment, update) for update in updates)

    def departing(
        self, fragment: int, *, within: int
    ) -> list[tuple[str, StandingUpdate]]:
        """Return updates that farewells name in the last closed rounds.

        In an asynchronous run they stand, and need not be put into a later round.
        """
        if self._view.is_async:
            return []
        number = self._view.number(fragment)
        return [
            (name, update)
            for name, document in self._view.documents.items()
            if document.has_left
            for update in document.stands
            if update.fragment == fragment and number - within <= update.round < number
        ]

    def apply_roster(self, document: RosterDocument, now_s: float) -> None:
        """Close the open round of a fragment by its roster, and open the next.

        Raises:
            CorruptError: it is the roster of another round.
        """
        round = self._view.state.rounds[document.fragment]
        if document.round != round.number:
            raise CorruptError(
                f"The roster of round {document.round} is at the key of that of round "
                f"{round.number} of fragment {document.fragment} must be. "
                "Restore the bucket from a copy."
            )
        self._view.heads[document.fragment] = RosterHead(
            round=document.round,
            digest=document.digest,
            is_chained=bool(document.before),
        )
        self._view.rosters[document.fragment, document.round] = document
        self._view.rosters.pop((document.fragment, document.round - KEPT_ROSTERS), None)
        self._forget(document.fragment)
        self._view.settle_end(document, now_s)
        outer = self._view.terms(document.fragment).outer
        seen = events.RosterSeen(
            document.fragment, document.roster, document.base, outer
        )
        self._view.advance(seen, now_s)

    def closable(
        self, fragment: int, island: str, now_s: float, *, has_work: bool = True
    ) -> tuple[Round, Roster] | None:
        """Return the round that `island` may close now, and its roster.

        Only an island that has published for the round may close it: it has applied the
        round before, so it knows the base, and its own update is in the roster. If the
        run has a decider, no other island may. One without work to publish, which waits
        for rows (`has_work` False), may close a round that others have published for.
        """
        round = self._view.state.rounds[fragment]
        may_close = (
            (island in round.staged or not has_work)
            and self._view.settings.store.decider in (None, island)
            and round.base != UNKNOWN_BASE
            and not self.unread(fragment)
            and not self._view.state.is_held
        )
        if not may_close:
            return None
        if not round.can_close(self._view.state.members, self._view.settings, now_s):
            return None
        return round, self.roster_now(round, now_s)

    def is_to_end(self) -> bool:
        """Return whether the open rounds of an asynchronous run are to be its last."""
        return self._view.is_async and is_to_end(self._view.state)

    def ended_by_tokens(self) -> int | None:
        """Return the last round, if `end_tokens` make it earlier than it was."""
        return last_by_tokens(self._view.state)

    def roster_now(self, round: Round, now_s: float) -> Roster:
        """Return the roster of an open round if it closes now.

        Updates that break the run's terms are refused.
        """
        return Roster(
            tuple(
                _objected(entry, self._objections.get((round.fragment, entry.island)))
                for entry in roster_of(self._view.state, round, now_s).entries
            )
        )

    def _forget(self, fragment: int) -> None:
        if not self._view.is_async:
            self._absent = {update for update in self._absent if update[0] != fragment}
        self._objections = {
            key: value for key, value in self._objections.items() if key[0] != fragment
        }


def _objected(entry: RosterEntry, reason: str | None) -> RosterEntry:
    if reason is None or entry.verdict is not Verdict.COUNTED:
        return entry
    return replace(entry, verdict=Verdict.REFUSED, reason=reason)


class MemberView:
    """The members of the run, by the documents that were read."""

    def __init__(self, view: RunView, updates: UpdateView) -> None:
        self._view, self._updates = view, updates
        self._read_s: dict[str, float] = {}
        """When each document was last read, changed or not."""

        self._names: dict[IncarnationKey, str] = {}
        self._names_of_slugs: dict[str, str] = {}
        self._latest: dict[str, int] = {}
        self._evicted: set[tuple[str, int]] = set()

    def apply(self, document: MemberDocument, now_s: float) -> None:
        """Apply a member's document; only a changed one renews its lease."""
        beat = document.beat
        before = self._view.state.members.known.get(beat.island)
        if before is not None and beat.incarnation < before.incarnation:
            return
        read_s = self._read_s.get(beat.island, now_s)
        self._read_s[beat.island] = now_s
        if self._view.documents.get(beat.island) == document:
            self._renew_unwatched(beat.island, read_s, now_s)
            return
        self._view.documents[beat.island] = document
        self._names[IncarnationKey(slug(beat.island), beat.incarnation)] = beat.island
        self._names_of_slugs[slug(beat.island)] = beat.island
        self._latest[slug(beat.island)] = beat.incarnation
        is_evicted = (beat.island, beat.incarnation) in self._evicted
        member = Member(
            island=beat.island,
            incarnation=beat.incarnation,
            slot=document.slot,
            key=document.key,
            nonce=document.nonce,
            lease_until_s=now_s + self._view.lease_s,
            has_left=document.has_left or is_evicted,
            left_because=EVICTED if is_evicted else "",
            step=min(beat.step, self._last_step()),
            waits_for=beat.waits_for,
            holds=beat.holds,
            opened=document.opened,
            step_s=beat.step_s,
        )
        self._view.advance(events.MemberSeen(member), now_s)
        self._updates.unstage(beat.island, now_s)

    def _last_step(self) -> int:
        """Return the schedule step that no island exceeds, by rounds read so far."""
        rounds = [round.number for round in self._view.state.rounds]
        return max_schedule_step(rounds, self._view.settings)

    def _renew_unwatched(self, island: str, read_s: float, now_s: float) -> None:
        """Restart a lease if no read has watched most of it.

        An observer whose clock jumped, that stood still or could not read has observed
        no silence. A member whose lease had run out at the last read stays gone.
        """
        member = self._view.state.members.known[island]
        was_live = not member.has_left and read_s <= member.lease_until_s
        if was_live and now_s - read_s > self._view.lease_s / 2:
            renewed = replace(member, lease_until_s=now_s + self._view.lease_s)
            self._view.advance(events.MemberSeen(renewed), now_s)

    def unwatched(self, now_s: float) -> set[str]:
        """Return members whose lease ran out, and that were not read again since.

        An observer that stood still, or could not read, has observed no silence.
        """
        return {
            name
            for name, member in self._view.state.members.known.items()
            if not member.has_left
            and not member.is_live(now_s)
            and self._read_s.get(name, now_s) <= member.lease_until_s
        }

    def name_of(self, incarnation: IncarnationKey) -> str | None:
        """Return the island of an incarnation; None: its document was not read."""
        return self._names.get(incarnation)

    def name_of_slug(self, slug: str) -> str | None:
        """Return the island of a slug; None: no document of it was read."""
        return self._names_of_slugs.get(slug)

    def has_read(self, incarnation: IncarnationKey) -> bool:
        """Return whether a document of this or a later incarnation was read."""
        return self._latest.get(incarnation.slug, -1) >= incarnation.incarnation

    def is_dormant(self, incarnation: IncarnationKey, now_s: float) -> bool:
        """Return whether a silent incarnation need not be read yet.

        An island that died without a farewell would be read forever: between two reads
        a quarter of its silence passes, at most two leases. An update of it would show
        that it is live again.
        """
        name = self._names.get(incarnation)
        if name is None:
            return False
        member = self._view.state.members.known[name]
        read_s = self._read_s.get(name, now_s)
        silent_s = now_s - (member.lease_until_s - self._view.lease_s)
        pause_s = min(silent_s / 4, 2 * self._view.lease_s)
        return member.lease_until_s < read_s and now_s - read_s < pause_s

    def evict(self, island: str, incarnation: int, now_s: float) -> None:
        """Let an incarnation be gone, regardless of its document."""
        self._evicted.add((island, incarnation))
        member = self._view.state.members.known.get(island)
        if member is not None and member.incarnation == incarnation:
            evicted = replace(member, has_left=True, left_because=EVICTED)
            self._view.advance(events.MemberSeen(evicted), now_s)


class BaseView:
    """The state that each open round starts from, and whether islands agree on it."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._proven: dict[int, int] = {}
        """By fragment, the round whose base was computed from the bucket."""

    def note_held(self, fragment: int, state: HeldRound, now_s: float) -> None:
        """Record the state that the open round of a fragment starts from."""
        if self._view.state.rounds[fragment].base == UNKNOWN_BASE:
            self._view.advance(events.BaseSeen(fragment, state), now_s)

    def is_disputed(self, fragment: int) -> bool:
        """Return whether an island started the open round from another state.

        A bit of one island's memory may have changed. If that island closed the round
        with its base, no other island could ever apply the outcome.
        """
        round = self._view.state.rounds[fragment]
        if round.base == UNKNOWN_BASE or self._proven.get(fragment) == round.number:
            return False
        named = [
            header.base
            for header in round.staged.values()
            if header.round == round.number
            and header.kind is not FrameKind.DEPARTING
            and not header.refused
        ]
        named += [
            document.beat.holds[fragment].digest
            for document in self._view.documents.values()
            if fragment < len(document.beat.holds)
            and document.beat.holds[fragment].round + 1 == round.number
        ]
        return any(base != round.base for base in named)

    def note_proven(self, fragment: int, state: HeldRound, now_s: float) -> None:
        """Record the state computed from the bucket, regardless of held states."""
        self._view.advance(events.BaseSeen(fragment, state), now_s)
        if state.round + 1 == self._view.number(fragment):
            self._proven[fragment] = state.round + 1


class ControlView:
    """Applies the controls of operators, in their order."""

    def __init__(self, view: RunView, members: MemberView) -> None:
        self._view, self._members = view, members

    def apply(self, document: ControlDocument, now_s: float) -> None:
        """Apply the next control."""
        self._view.controls.append(document)
        if self._view.moves.apply(len(self._view.controls), document):
            self._view.advance(events.MoveSeen(self._view.moves.move), now_s)
        elif self._apply(document, now_s):
            self._view.in_force.append(document)

    def _apply(self, document: ControlDocument, now_s: float) -> bool:
        """Apply a control; return False if it is void."""
        match document.action:
            case "set":
                return self._set(document, now_s)
            case "pause" | "resume":
                is_paused = document.action == "pause"
                self._view.advance(events.PauseRequested(is_paused), now_s)
            case "save":
                self._view.advance(events.SaveRequested(), now_s)
            case "stop" if document.last_rounds is not None:
                return self._end(document, now_s)
            case "stop":
                self._view.advance(events.StopSeen(document.last_round), now_s)
            case "evict" if document.island is not None:
                self._members.evict(document.island, document.incarnation, now_s)
        return True

    def _end(self, document: ControlDocument, now_s: float) -> bool:
        """Apply the end of an asynchronous run; it is void if there is one already."""
        before = self._view.state.last_rounds
        seen = events.StopSeen(None, document.last_rounds)
        self._view.advance(seen, now_s)
        is_decided = before is None and self._view.state.last_rounds is not None
        if is_decided:
            self._view.stop_number = len(self._view.controls)
        return is_decided

    def _set(self, document: ControlDocument, now_s: float) -> bool:
        if not EPOCH_KEYS.issuperset(document.values):
            return False  # a fixed setting is not changed by any document
        try:
            settings = self._view.settings.with_values(document.values)
        except UsageError:
            return False  # not put by Atoll, which checks values first
        outers = self._view.outers(settings)
        self._view.advance(events.SettingsSeen(document.values, outers), now_s)
        return True


ACTIONS = ("move", "moved", "stay")


class MoveControls:
    """The move of a run, by the controls that were read."""

    def __init__(self) -> None:
        self.move: Move | None = None
        """The move that is in progress, or over."""

        self.number = 0
        """Of the control by which it began, or by which the last move did."""

    def apply(self, number: int, document: ControlDocument) -> bool:
        """Apply a control; False: it is about another matter, and in force."""
        match document.action:
            case "move" if self.move is None and document.target is not None:
                self.move = Move(target=document.target, nonce=document.nonce)
                self.number = number
            case "moved" if self._is_in_progress:
                assert self.move is not None
                self.move = replace(self.move, is_over=True)
            case "stay" if self._is_in_progress:
                self.move = None
        return self.move is not None or document.action in ACTIONS

    def is_in_progress(self, number: int) -> bool:
        """Return whether a move is neither completed nor given up."""
        return number == self.number and self._is_in_progress

    @property
    def _is_in_progress(self) -> bool:
        return self.move is not None and not self.move.is_over
