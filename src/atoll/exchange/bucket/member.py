"""One incarnation of an island in a bucket: join, heartbeat, leave.

It takes a slot, names the uncounted updates of its earlier incarnations, and writes its
member document again with each heartbeat. The document carries no time: readers compare
it with the last one they have read, each by its own clock, so no clock of a writer can
shorten or stretch a lease. The last update of an island that left is counted by others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from atoll import wire
from atoll.errors import (
    AtollError,
    CorruptError,
    LeaseLost,
    NoSuchObject,
    RunMoved,
    Unreachable,
    UsageError,
)
from atoll.exchange.api.messages import MAX_FRAGMENTS
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import RESTORE
from atoll.exchange.bucket.keys import IncarnationKey, UpdateKey, incarnation_of
from atoll.exchange.bucket.own_past import OwnPastWriter
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.states import States
from atoll.exchange.bucket.updates import RECENT_LABELS
from atoll.protocol import Heartbeat, JoinRequest, Position, Stats
from atoll.protocol.island import CARRIED_ROUNDS
from atoll.protocol.membership import Member
from atoll.protocol.rounds import Round
from atoll.wire.roster import new_name_fault

WATCH_S = 1.0
"""Between two reads of a document that another process may write."""

_MAX_SLOTS = 65_536


class MemberEntry:
    """Takes one island into a run."""

    def __init__(
        self, reader: BucketReader, states: States, *, key: bytes, nonce: bytes
    ) -> None:
        self._reader, self._states = reader, states
        self._store, self._runtime = reader.store, reader.runtime
        self._earlier = EarlierIncarnations(reader)
        self._key, self._nonce = wire.blake3_digest(key), nonce
        self._returns = False

    def enter(self, request: JoinRequest) -> documents.MemberDocument:
        """Put the document of the island's next incarnation, and return it.

        Raises:
            ModelError: the island's model is not the run's.
            UsageError: a live island has the name, or the run is full.
            LeaseLost: the incarnation moved here with the run, and has a successor.
        """
        name, self._returns = request.island, request.returns
        if name is not None and (fault := new_name_fault(name, field="island")):
            raise UsageError(f"{fault}. Give this island another name.")
        request.require_bundle(self._reader.view.settings)
        if self._reader.read_founding():
            assert self._reader.founded is not None
            request.model.require_same(self._reader.founded.model)
            for fragment in range(len(self._reader.view.layout)):
                self._states.begin(fragment)
        self._reader.members.read()
        if name is not None and request.incarnation is not None:
            return self._resume(name, request.incarnation)
        document = self._take_name(name)
        self._require_room(document)
        return document

    def _resume(self, island: str, incarnation: int) -> documents.MemberDocument:
        """Put the document of an incarnation that moved here with its run."""
        moved = self._reader.view.documents.get(island)
        is_same = moved is not None and (
            (moved.beat.incarnation, moved.key, moved.nonce, moved.has_left)
            == (incarnation, self._key, self._nonce, False)
        )
        if moved is None or not is_same:
            raise LeaseLost(
                f"Incarnation {incarnation} of island {island!r} is no longer a member "
                "of the run: it has left, or a later incarnation has its name. "
                "Join again to continue."
            )
        document = replace(moved, beats=moved.beats + 1)
        key = keys.member(island, incarnation)
        self._store.put(key, documents.packed(documents.MEMBER, document, key))
        with self._reader.lock:
            self._reader.member_view.apply(document, self._runtime.now_s())
        return document

    def _take_name(self, name: str | None) -> documents.MemberDocument:
        island, slot = self._take_slot(name)
        min_incarnation = 1
        while True:
            document = self._next_document(island, slot, min_incarnation)
            incarnation = document.beat.incarnation
            key = keys.member(island, incarnation)
            if self._store.put_new(
                key, documents.packed(documents.MEMBER, document, key)
            ):
                with self._reader.lock:
                    self._reader.member_view.apply(document, self._runtime.now_s())
                return document
            # Another process has this incarnation, and a list may not show it yet; or
            # the object is foreign, and the next number is free.
            min_incarnation = incarnation + 1
            self._reader.members.read_incarnation(
                IncarnationKey(keys.slug(island), incarnation)
            )
            self._reader.members.read()
            if island in self._reader.view.documents:
                before = island
                island, slot = self._take_slot(name)
                min_incarnation = min_incarnation if island == before else 1

    def _take_slot(self, name: str | None) -> tuple[str, int]:
        """Return the name with its slot; if it is None, a name never used before."""
        members = self._reader.view.documents
        if name is not None and name in members:
            return name, members[name].slot
        used_slots = {document.slot for document in members.values()}
        for number in range(_MAX_SLOTS):
            island = name if name is not None else f"island-{number}"
            if number in used_slots or (name is None and island in members):
                continue
            if self._claim_slot(number, island):
                return island, number
        raise UsageError(
            f"The run has had {_MAX_SLOTS} islands of other names. Use those again."
        )

    def _claim_slot(self, number: int, island: str) -> bool:
        """Put an island's name into a slot; return whether it has the slot now."""
        key = keys.slot(number)
        document = documents.SlotDocument(run=self._reader.run, island=island)
        if not self._store.put_new(
            key, documents.packed(documents.SLOT, document, key)
        ):
            return False
        if self._store.traits.has_put_new:
            return True
        # In this store the last put wins: after a pause, both writers see the same.
        self._runtime.sleep(WATCH_S)
        return documents.fetch(self._store, documents.SLOT, key) == document

    def _next_document(
        self, island: str, slot: int, min_incarnation: int
    ) -> documents.MemberDocument:
        before = self._reader.view.state.members.known.get(island)
        if before is not None and before.key != self._key and not before.has_left:
            self._require_silent(before)
        incarnation = max(min_incarnation, before.incarnation + 1 if before else 1)
        if before is not None and before.has_left:
            self._earlier.republish_late_updates()
        # Rounds have waited for an island that resumes from a checkpoint.
        opened = () if before is not None and self._returns else self._opened()
        stands = self._earlier.standing(island, incarnation)
        step = self._reader.view.position(self._runtime.now_s()).step
        return documents.MemberDocument(
            run=self._reader.run,
            slot=slot,
            key=self._key,
            nonce=self._nonce,
            opened=opened,
            stands=stands,
            beats=0,
            has_left=False,
            beat=Heartbeat(island=island, incarnation=incarnation, step=step),
        )

    def _opened(self) -> tuple[int, ...]:
        view = self._reader.view
        rounds = tuple(round.number for round in view.state.rounds)
        return rounds if view.state.has_started else ()

    def _require_silent(self, before: Member) -> None:
        """Return if the other process's document does not change for a lease."""
        document = self._reader.view.documents[before.island]

        def has_changed() -> bool:
            return self._reader.view.documents[before.island] != document

        if self._watch(has_changed) and not self._has_left(before.island):
            raise UsageError(
                f"Island {before.island!r} is live in this run, and this is not its "
                "key. Give this island another name, or its key, or let that one leave."
            )

    def _has_left(self, island: str) -> bool:
        return self._reader.view.documents[island].has_left

    def _require_room(self, document: documents.MemberDocument) -> None:
        view = self._reader.view
        limit = view.settings.run.most_islands
        if view.settings.run.max_islands is None:
            limit = max(limit, len(view.state.counted.by_island))
        watched = dict(view.documents)

        def others() -> set[str]:
            """Return the islands with lower slots that have not proved silent."""
            live = set(view.live(self._runtime.now_s())) - {document.beat.island}
            return {name for name in live if view.documents[name].slot < document.slot}

        def is_sure() -> bool:
            changed = {
                name for name in others() if view.documents[name] != watched.get(name)
            }
            return len(changed) >= limit or len(others()) < limit

        self._watch(is_sure)
        if len(others()) >= limit:
            self._withdraw(document)
            raise UsageError(
                f"The run has {len(others())} islands, and max_islands={limit}. "
                "Wait for one to leave."
            )

    def _withdraw(self, document: documents.MemberDocument) -> None:
        departure = replace(document, beats=document.beats + 1, has_left=True)
        key = keys.member(document.beat.island, document.beat.incarnation)
        self._store.put(key, documents.packed(documents.MEMBER, departure, key))

    def _watch(self, is_done: Callable[[], bool]) -> bool:
        """Read members until `is_done`; return False if a lease passes before."""
        until_s = self._runtime.now_s() + self._reader.view.lease_s
        while not is_done():
            if self._runtime.now_s() > until_s:
                return False
            self._runtime.sleep(WATCH_S)
            self._reader.members.read()
        return True

    def is_founder(self, document: documents.MemberDocument) -> bool:
        """Return whether this member is to found the run; wait for another if not."""
        while not self._reader.read_founding():
            self._reader.members.read()
            live = self._reader.view.live(self._runtime.now_s())
            members = self._reader.view.documents
            if all(members[name].slot >= document.slot for name in live):
                return True
            self._runtime.sleep(WATCH_S)
        return False


class EarlierIncarnations:
    """Finds the updates of an island's earlier incarnations that no round counted."""

    def __init__(self, reader: BucketReader) -> None:
        self._reader, self._late_updates = reader, LateUpdates(reader)
        self._store, self._runtime = reader.store, reader.runtime

    def republish_late_updates(self) -> None:
        """Put departing updates that closed rounds missed into the open rounds.

        Before the next incarnation joins: from then on, only updates that the next one
        names are accepted.
        """
        for fragment in range(len(self._reader.view.layout)):
            self._late_updates.republish(fragment)

    def standing(
        self, island: str, incarnation: int
    ) -> tuple[documents.StandingUpdate, ...]:
        """Return the updates of earlier incarnations for the open rounds and the next.

        Of several the latest: its incarnation did not name the others.
        """
        if incarnation == 1:
            return ()
        if self._reader.view.is_async:
            return self._arrivals(island, incarnation)
        rounds = [
            (round.fragment, number)
            for round in self._reader.view.state.rounds
            for number in (round.number, round.number + 1)
        ]
        reads = [
            partial(self._publisher, fragment, number, island, incarnation)
            for fragment, number in rounds
        ]
        return tuple(
            documents.StandingUpdate(
                fragment=fragment, round=number, incarnation=publisher
            )
            for (fragment, number), publisher in zip(
                rounds, self._runtime.gather(reads), strict=True
            )
            if publisher
        )

    def _publisher(
        self, fragment: int, round: int, island: str, incarnation: int
    ) -> int:
        """Return which earlier incarnation has published for a round; 0: none has.

        The update of the last one is read by its key, because a list may lag behind.
        An object that cannot be read as an update is ignored.
        """
        slug, has_update = keys.slug(island), self._reader.updates.has
        last = UpdateKey(round, IncarnationKey(slug, incarnation - 1))
        if has_update(fragment, last):
            return incarnation - 1
        items = self._store.items(keys.updates(fragment, round))
        published = [key for item in items if (key := incarnation_of(item.key))]
        return max(
            [
                key.incarnation
                for key in published
                if key.slug == slug
                and key.incarnation < incarnation
                and has_update(fragment, UpdateKey(round, key))
            ],
            default=0,
        )

    def _arrivals(
        self, island: str, incarnation: int
    ) -> tuple[documents.StandingUpdate, ...]:
        """Return the updates of earlier incarnations that no roster lists yet.

        A list may lag behind, so those that the last incarnation can have put are also
        looked for by their keys.
        """
        stands = []
        for round in self._reader.view.state.rounds:
            updates = self._listed_arrivals(round.fragment, island, incarnation)
            updates |= self._last_labels(round, island, incarnation - 1)
            order = sorted(updates, key=lambda update: update.publisher.incarnation)
            reads = [
                partial(self._reader.updates.has, round.fragment, update)
                for update in order
            ]
            stands += [
                documents.StandingUpdate(
                    fragment=round.fragment,
                    round=update.round,
                    incarnation=update.publisher.incarnation,
                )
                for update, exists in zip(
                    order, self._runtime.gather(reads), strict=True
                )
                if exists
            ]
        return tuple(stands[-MAX_FRAGMENTS:])

    def _listed_arrivals(
        self, fragment: int, island: str, incarnation: int
    ) -> set[UpdateKey]:
        slug, view = keys.slug(island), self._reader.view
        listed = map(keys.arrival_of, self._reader.list_keys(keys.arrivals(fragment)))
        return {
            update
            for update in listed
            if update is not None
            and update.publisher.slug == slug
            and update.publisher.incarnation < incarnation
            and not view.is_over(fragment, island, update)
        }

    def _last_labels(
        self, round: Round, island: str, incarnation: int
    ) -> set[UpdateKey]:
        """Return the last updates that an incarnation can have put."""
        number = round.number
        labels = range(max(1, number + 2 - RECENT_LABELS), number + 2)
        updates = [UpdateKey.of(label, island, incarnation) for label in labels]
        return {
            update
            for update in updates
            if not self._reader.view.is_over(round.fragment, island, update)
        }


class LateUpdates:
    """Puts departing updates that closed rounds did not list into the open rounds.

    A roster may be written before an island publishes, and be put after that island has
    left. No other island would count that work. So each island that reads the next
    round puts it there, as the same island's departing update: only an update that the
    leaving member's document names, and that no roster since has listed. All of them
    put the same bytes, once. A new incarnation of the island does this itself before it
    joins; after that nothing is put.
    """

    def __init__(self, reader: BucketReader) -> None:
        self._reader, self._store = reader, reader.store
        self._settled: set[tuple[str, documents.StandingUpdate]] = set()
        self._target_rounds: dict[tuple[str, documents.StandingUpdate], int] = {}
        """The last round that each was put into: it counts there or in a later one."""

    def republish(self, fragment: int) -> None:
        """Put updates that the last rounds missed into the open one. Safe to repeat."""
        with self._reader.lock:
            number, unseen = self._reader.view.number(fragment), self.unseen(fragment)
        for island, update in unseen:
            self._republish(island, update, number)

    def unseen(self, fragment: int) -> list[tuple[str, documents.StandingUpdate]]:
        """Return updates that the last rounds may have missed, new to `republish`."""
        view = self._reader.view
        number = view.number(fragment)
        if view.state.never_opens(number, fragment=fragment):
            return []
        return [
            update
            for update in self._reader.update_view.departing(
                fragment, within=CARRIED_ROUNDS
            )
            if update not in self._settled and self._target_rounds.get(update) != number
        ]

    def _republish(
        self, island: str, update: documents.StandingUpdate, number: int
    ) -> None:
        try:
            header = (
                None
                if self._is_listed(island, update)
                else self._valid_header(island, update)
            )
            if header is None or self._is_counted(header, number):
                self._settled.add((island, update))
            else:
                self._put(header, number)
                self._target_rounds[island, update] = number
        except NoSuchObject:
            self._settled.add((island, update))  # collected meanwhile
        except CorruptError as exc:
            self._settled.add((island, update))
            self._reader.warn_once(f"The last update of {island!r} is dropped: {exc}")

    def _is_listed(self, island: str, update: documents.StandingUpdate) -> bool:
        """Return whether the update's own round has listed it."""
        roster = self._reader.closed_roster(update.fragment, update.round).roster
        entry = roster.entry(island)
        return (
            entry is not None
            and entry.verdict is not wire.Verdict.LATE
            and entry.incarnation == update.incarnation
        )

    def _valid_header(
        self, island: str, update: documents.StandingUpdate
    ) -> wire.Header | None:
        """Return the header of an update, if it can count."""
        incarnation = IncarnationKey(keys.slug(island), update.incarnation)
        updates = self._reader.updates
        name = UpdateKey(update.round, incarnation)
        header = updates.header(update.fragment, name)
        if header is None or header.refused or updates.objection(header):
            return None
        return header

    def _is_counted(self, header: wire.Header, number: int) -> bool:
        """Return whether a later round, into which an island put it, has listed it."""
        for round in range(header.round + 1, number):
            roster = self._reader.closed_roster(header.fragment, round).roster
            entry = roster.entry(header.island)
            digest = wire.update_digest(_departing_in(header, round))
            if entry is not None and entry.digest == digest:
                return True
        return False

    def _put(self, header: wire.Header, number: int) -> None:
        fragment, island = header.fragment, header.island
        body = read_full_update(self._reader, header).body
        incarnation = self._reader.view.documents[island].beat.incarnation
        moved = replace(_departing_in(header, number), incarnation=incarnation)
        key = keys.update(fragment, number, island, incarnation)
        if self._store.put_new(key, [wire.pack(moved), body.data]):
            self._reader.warn_once(
                f"Round {header.round} of fragment {fragment} was closed while "
                f"{island!r} left: its last update is put into round {number}."
            )
        existing, _ = self._reader.updates.read(key, wire.frame_bytes(moved))
        if wire.update_digest(existing) == wire.update_digest(moved):
            self._reader.updates.add(moved)


def _departing_in(header: wire.Header, round: int) -> wire.Header:
    return replace(header, kind=wire.FrameKind.DEPARTING, round=round)


def read_full_update(reader: BucketReader, header: wire.Header) -> Frame:
    """Return an update with its body.

    Raises:
        CorruptError: its bytes do not verify.
    """
    key = keys.update(header.fragment, header.round, header.island, header.incarnation)
    data = reader.store.get(key, 0, wire.frame_bytes(header))
    try:
        body = np.frombuffer(bytearray(data[wire.header_length(data) :]), np.uint8)
        wire.verify_body(header, body)
    except CorruptError as exc:
        raise CorruptError(f"{key} is damaged: {exc} {RESTORE}") from exc
    return Frame(header, body)


_FAREWELL_POLLS, _FAREWELL_POLL_S = 40, 0.05
"""How long a departure waits for a heartbeat that is being put."""

log = logging.getLogger("atoll")


class MemberLease:
    """Writes a member's document, and keeps the position that its heartbeats found."""

    def __init__(self, reader: BucketReader) -> None:
        self.reader = reader
        self._store, self._runtime = reader.store, reader.runtime
        self.stats: Callable[[], Stats] | None = None
        """Returns the island's statistics for users; called for each heartbeat."""

        self.moved: Callable[[RunMoved], None] | None = None
        """Called in the background when the run is found to be elsewhere."""

        self.wants: Callable[[], tuple[documents.Want, ...]] = tuple
        """Returns the updates that this island needs another copy of."""

        self.past: OwnPastWriter | None = None
        """Keeps this island's past for people."""

        self.member: documents.MemberDocument | None = None
        self.position = Position(step=0, rounds=())
        """The run's position by the objects that were read so far."""

        self._lost: LeaseLost | None = None
        self._is_beating = False

    @property
    def island(self) -> str | None:
        return self.member.beat.island if self.member else None

    def require(self) -> documents.MemberDocument:
        """Return the document of an incarnation that is still a member.

        Raises:
            LeaseLost: a later incarnation has the name, or this one has left.
            RunMoved: the run is elsewhere.
        """
        self.reader.require_here()
        if self._lost is not None:
            raise self._lost
        member = self.member
        assert member is not None
        if member.has_left:
            raise LeaseLost(
                f"Incarnation {member.beat.incarnation} of island "
                f"{member.beat.island!r} has left the run. Join again to continue."
            )
        return member

    def note(self, beat: Heartbeat) -> None:
        """Record this island's step and the states that it holds."""
        with self.reader.lock:
            self.member = member = replace(self.require(), beat=beat)
            now_s = self._runtime.now_s()
            if beat.waits_for is not None:
                self.reader.member_view.apply(member, now_s)
            for fragment, state in enumerate(beat.holds):
                self.reader.base_view.note_held(fragment, state, now_s)
            rounds = self._open_rounds()
        if self.past is not None:
            self.past.saw(rounds)

    def update_position(self) -> Position:
        """Return the run's position, by the objects that were read so far."""
        with self.reader.lock:
            now_s = self._runtime.now_s()
            self.position = self.reader.view.position(now_s, island=self.island)
        return self.position

    def beat_in_background(self) -> None:
        """Beat, and log a failure instead of raising it."""
        try:
            self.beat()
        except LeaseLost as exc:
            self._lost = exc
        except RunMoved as exc:
            if self.moved is not None:
                self.moved(exc)
        except (CorruptError, NoSuchObject, Unreachable) as exc:
            if not (self.member and self.member.has_left):
                log.warning("a heartbeat has failed: %s", exc)
        except AtollError as exc:
            log.error("heartbeats fail: %s", exc)
        except Exception:  # without heartbeats the others would give this island up
            log.exception("heartbeats fail")

    def beat(self) -> None:
        """Put a heartbeat, and read new controls and the other members.

        Raises:
            LeaseLost: a later incarnation has the name.
            RunMoved: the run is elsewhere.
        """
        member = self.member
        if member is None or member.has_left:
            return
        stats = self.stats() if self.stats is not None else member.beat.stats
        with self.reader.lock:
            member = self.require()
            self.member = member = replace(
                member, beats=member.beats + 1, beat=replace(member.beat, stats=stats)
            )
        self._put_beat(member)
        self._read_others(member)
        self._note_past(member)
        self.reader.require_here()
        with self.reader.lock:
            self.reader.view.state.members.require(
                member.beat.island, member.beat.incarnation
            )
        self.update_position()

    def _note_past(self, member: documents.MemberDocument) -> None:
        if self.past is not None and member.beat.stats is not None:
            with self.reader.lock:
                rounds = self._open_rounds()
            self.past.note(member, member.beat.stats, rounds)

    def _open_rounds(self) -> list[int]:
        return [round.number for round in self.reader.view.state.rounds]

    def _read_others(self, member: documents.MemberDocument) -> None:
        with suppress(NoSuchObject):
            self.reader.poll_controls()
            self.reader.members.read()
            waits_for = member.beat.waits_for
            if waits_for is not None:
                # If every island waits, each for another fragment, the run is stuck
                # until one of them moves: the other open rounds show that. The waiting
                # thread polls this island's own; two polls would read objects twice.
                for round in self.reader.view.state.rounds:
                    if round.fragment != waits_for[0]:
                        self.reader.read_round(round.fragment)

    def leave(
        self,
        standing: Callable[
            [documents.MemberDocument], tuple[documents.StandingUpdate, ...]
        ],
    ) -> bool:
        """Put a departure that names standing updates; False: it was put before."""
        with self.reader.lock:
            member = self.member
            if member is None or member.has_left:
                return False
            self.member = departure = replace(
                member,
                beats=member.beats + 1,
                has_left=True,
                beat=replace(member.beat, stats=self.stats() if self.stats else None),
                stands=standing(member),
            )
        for _ in range(_FAREWELL_POLLS):
            if not self._is_beating:
                break
            self._runtime.sleep(_FAREWELL_POLL_S)  # a heartbeat would overwrite it
        self._put(departure)
        self._note_past(departure)
        with self.reader.lock:
            self.reader.member_view.apply(departure, self._runtime.now_s())
        return True

    def _put_beat(self, member: documents.MemberDocument) -> None:
        """Put a heartbeat; if the island has left meanwhile, its departure again."""
        self._is_beating = True
        try:
            self._put(member)
            latest = self.member
            if latest is not None and latest.has_left:
                self._put(latest)
        finally:
            self._is_beating = False

    def _put(self, member: documents.MemberDocument) -> None:
        key = keys.member(member.beat.island, member.beat.incarnation)
        with self.reader.lock:
            view = self.reader.view
            heads = tuple(head for _, head in sorted(view.heads.items()))
            controls = len(view.controls)
        document = replace(member, heads=heads, controls=controls, wants=self.wants())
        self._store.put(key, documents.packed(documents.MEMBER, document, key))
