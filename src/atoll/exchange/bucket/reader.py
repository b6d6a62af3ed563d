"""Reads a run in a bucket into a `RunView`. Puts nothing.

Rule 1: the one lock of a run guards its `RunView`, and is never held during a request:
        requests take seconds, and heartbeats must not wait for them. So a value that
        was read may be old when it is applied: each method compares the round again.
Rule 2: an object that cannot be read as its key promises is reported once and ignored,
        unless the run cannot continue without it.
Rule 3: documents of members are read as seldom as possible. Of an update the header is
        read; a small update is read in full, with one request.
Rule 4: an object that an island has read and that is missing now is damage. Members
        write into their documents how far they have read, and those claims are taken
        before the request: so a late roster is never mistaken for a lost one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from atoll import wire
from atoll.errors import CorruptError, NoSuchObject, UsageError
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.dealer import RowReader
from atoll.exchange.bucket.documents import RESTORE
from atoll.exchange.bucket.keys import IncarnationKey, UpdateKey, incarnation_of
from atoll.exchange.bucket.updates import UpdateReader
from atoll.exchange.bucket.view import (
    BEATS_PER_LEASE,
    LEASE_S,
    BaseView,
    ControlView,
    MemberView,
    RunView,
    UpdateView,
)
from atoll.fields import JsonField
from atoll.protocol.membership import latest_incarnation
from atoll.runtime import Runtime
from atoll.store import Store

MOVE_POLL_S = 2.0
"""Between two reads of the controls while the run is being moved."""

log = logging.getLogger("atoll")


class BucketReader:
    """Keeps a `RunView` up to date. Any thread may call."""

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        settings: documents.SettingsDocument,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store, self.runtime = store, runtime
        self.run = settings.run
        self.founded: documents.RunDocument | None = None
        """The document that the run was founded with, once it was read."""

        self.lock = threading.RLock()
        self.view = RunView(settings.run, settings.settings, lease_s=lease_s)
        self.base_view, self.update_view = BaseView(self.view), UpdateView(self.view)
        self.member_view = MemberView(self.view, self.update_view)
        self.control_view = ControlView(self.view, self.member_view)
        self.members = MemberReader(self)
        self.updates = UpdateReader(self, self.members)
        self.rows = RowReader(self) if settings.settings.data.is_dealt else None
        """The ledger of rows; None: the run deals out none."""

        self._founding_head: documents.RosterHead | None = None
        self._fingerprint = settings.fingerprint
        self._warnings: set[str] = set()
        self.stops_for_moves = False
        """Whether no roster is applied while the run moves, as for an island."""

    @classmethod
    def open(
        cls, store: Store, runtime: Runtime, *, url: str, lease_s: float = LEASE_S
    ) -> BucketReader:
        """Return a reader of the run at a URL, which may still lack its weights.

        Raises:
            UsageError: there is no run at the URL.
            CorruptError: its settings are not those that it was made with.
        """
        settings = documents.fetch_settings(store, url=url)
        self = cls(store, runtime, settings, lease_s=lease_s)
        if not self.read_founding():
            self.require_never_founded()
        self.read_controls()
        return self

    @property
    def founding_head(self) -> documents.RosterHead:
        """The object that the first roster of each fragment follows: `run.json`."""
        assert self._founding_head is not None
        return self._founding_head

    def read_founding(self) -> bool:
        """Return whether the run has its first weights."""
        if self.founded is None:
            # Before the request: an island that claims it now has read it before.
            trace = self._reader_of_founding()
            try:
                read = documents.fetch_read(
                    self.store, documents.RUN, keys.RUN, run=self.run
                )
            except NoSuchObject:
                if trace is not None:
                    raise self._missing_founding(trace) from None
                return False
            document = read.document
            if document.fingerprint != self._fingerprint:
                raise CorruptError(
                    f"{keys.SETTINGS} has fingerprint {self._fingerprint}, and "
                    f"{keys.RUN} says that the run was founded with "
                    f"{document.fingerprint}: a user has edited one of them. Restore "
                    "that object from a copy or an earlier version of the bucket."
                )
            head = documents.RosterHead(
                round=0, digest=read.digest, is_chained=read.is_sealed
            )
            with self.lock:
                self.founded, self._founding_head = document, head
                self.view.set_model(document.model, self.runtime.now_s(), head)
        return True

    def require_never_founded(self) -> None:
        """Return if a run without `run.json` has never had one.

        Raises:
            CorruptError: it had one: a roster, a state or a member document proves it.
        """
        trace = self._reader_of_founding() or self._trace_of_founding()
        if trace is not None and not self.read_founding():
            raise self._missing_founding(trace)

    def _missing_founding(self, trace: str) -> CorruptError:
        return CorruptError(
            f"{keys.RUN} is gone, and the run had been founded: there is {trace}. "
            f"{RESTORE}"
        )

    def _reader_of_founding(self) -> str | None:
        """Return the key of a member document that names `run.json` or a roster."""
        with self.lock:
            for document in self.view.documents.values():
                if document.heads:
                    return keys.member(document.beat.island, document.beat.incarnation)
        return None

    def _trace_of_founding(self) -> str | None:
        """Return the key of an object that only a founded run has."""
        traces: list[tuple[str, JsonField[Any]]] = [
            (keys.roster(0, 1), documents.ROSTER)
        ]
        for key in self.list_keys(keys.states(0)):
            if key.endswith(f"/{keys.COMPLETE}"):
                traces.append((key, documents.STATE))
        for key, field in traces:
            # A foreign object at that key proves nothing about the run.
            with suppress(NoSuchObject, CorruptError):
                documents.fetch(self.store, field, key, run=self.run)
                return key
        return None

    def read_controls(self) -> None:
        """Read the controls that operators have put since the last call."""
        while True:
            number = len(self.view.controls) + 1
            key, readers = keys.control(number), self._control_readers(number)
            try:
                control = documents.fetch(
                    self.store, documents.CONTROL, key, run=self.run
                )
            except NoSuchObject as exc:
                if readers:
                    raise CorruptError(
                        f"{key} is gone: island {readers[0]!r} has read it. {RESTORE}"
                    ) from exc
                return
            with self.lock:
                if key == keys.control(len(self.view.controls) + 1):
                    self.control_view.apply(control, self.runtime.now_s())

    def _control_readers(self, number: int) -> list[str]:
        """Return the islands whose documents say that they read a control."""
        with self.lock:
            return sorted(
                name
                for name, document in self.view.documents.items()
                if document.controls >= number
            )

    def require_controls(self, count: int, *, named_by: str) -> None:
        """Return when as many controls are read as an object names.

        Raises:
            CorruptError: one of them is gone or damaged.
        """
        if len(self.view.controls) < count:
            self.read_controls()
        if (number := len(self.view.controls)) < count:
            raise CorruptError(
                f"{keys.control(number + 1)} is gone: {named_by} was written by an "
                f"island that had read it. {RESTORE}"
            )

    def poll_controls(self) -> None:
        """Read new controls; a damaged one is reported and ignored."""
        with suppress(NoSuchObject):
            self.ignore_corrupt(keys.CONTROL, self.read_controls)

    def require_here(self) -> None:
        """Return unless the run is known to be elsewhere.

        Raises:
            RunMoved: it is, and where.
        """
        self.view.state.require_here()

    def wait_while_moving(self) -> None:
        """Return when no move of the run is in progress, however long that takes.

        Raises:
            RunMoved: the run has reached its target.
        """
        self.poll_controls()
        while self.view.state.move is not None:
            self.require_here()
            self.runtime.sleep(MOVE_POLL_S)
            self.poll_controls()

    def ignore_corrupt(
        self, key: str, read: Callable[[], documents.T]
    ) -> documents.T | None:
        """Return the result of `read`; None, with one warning, for a corrupt object."""
        try:
            return read()
        except CorruptError as exc:
            self.warn_once(f"{key} is ignored: {exc}")
            return None

    def warn_once(self, message: str) -> None:
        """Log a warning, unless the same one was logged before."""
        if message not in self._warnings:
            self._warnings.add(message)
            log.warning("%s", message)

    def list_keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix. A list may lag behind puts."""
        return [item.key for item in self.store.items(prefix)]

    def read_round(self, fragment: int) -> None:
        """Read the new updates of a fragment's open round, or its roster."""
        if self.view.is_async:
            self._read_arrivals(fragment)
            return
        with self.lock:
            number = self.view.number(fragment)
        items = self.store.items(keys.round_prefix(fragment, number))
        if any(item.key == keys.roster(fragment, number) for item in items):
            self.read_rosters(fragment)
            if self.view.number(fragment) != number:
                return  # else the run moves, and the roster may not move with it
        prefix = keys.updates(fragment, number)
        self.updates.read_new(
            fragment,
            [
                (UpdateKey(number, publisher), item)
                for item in items
                if item.key.startswith(prefix)
                and (publisher := incarnation_of(item.key))
            ],
        )

    def _read_arrivals(self, fragment: int) -> None:
        """Read the rosters of a fragment, and the new updates that stand after them."""
        self.read_rosters(fragment)
        listed = self.store.items(keys.arrivals(fragment))
        self.updates.read_new(
            fragment,
            [
                (update, item)
                for item in listed
                if (update := keys.arrival_of(item.key))
                and not self.updates.is_over(fragment, update)
            ],
        )

    def read_standing(self, fragment: int) -> None:
        """Read by their keys the updates that documents name in the open round."""
        with self.lock:
            number, unread = (
                self.view.number(fragment),
                self.update_view.unread(fragment),
            )
        if not unread:
            return
        self.updates.read_named(fragment, unread)
        with self.lock:
            if self.view.number(fragment) == number:
                absent = set(self.update_view.unread(fragment)).intersection(unread)
                self.update_view.note_absent(fragment, absent)

    def departed_ahead(self, fragment: int) -> list[wire.Header]:
        """Return the departing updates for the round after the open one."""
        number = self.view.number(fragment) + 1
        incarnations = {
            incarnation
            for key in self.list_keys(keys.updates(fragment, number))
            if (incarnation := incarnation_of(key))
        }
        with self.lock:
            incarnations.update(self.update_view.standing(fragment, number))
        ahead = [UpdateKey(number, publisher) for publisher in sorted(incarnations)]
        self.updates.read_named(fragment, ahead)
        return self.update_view.accepted(
            header
            for header, _ in self.updates.by_round.get((fragment, number), {}).values()
            if header.kind is wire.FrameKind.DEPARTING
        )

    def furthest_round(self) -> int:
        """Return the highest round with an update of any island, by lists made now.

        An island that leaves may have published for the round after the open one.
        """
        furthest = 0
        for fragment in range(len(self.view.layout)):
            self.read_round(fragment)
            number = self.view.number(fragment)
            published = [
                round
                for round in (number, number + 1)
                if any(
                    map(incarnation_of, self.list_keys(keys.updates(fragment, round)))
                )
            ]
            furthest = max(furthest, number - 1, *published)
        return furthest

    def last_rounds(self) -> tuple[int, ...]:
        """Return the last round of each fragment if an asynchronous run ends now.

        That is the open one, unless no update stands and every island has left.
        """
        for fragment in range(len(self.view.layout)):
            self.read_round(fragment)
        with self.lock:
            documents = self.view.documents.values()
            is_left = all(document.has_left for document in documents)
            return tuple(
                round.number - (is_left and not round.staged)
                for round in self.view.state.rounds
            )

    def read_rosters(self, fragment: int) -> None:
        """Read the rosters of a fragment, from its open round to the last closed.

        Raises:
            CorruptError: a roster or a control is gone or damaged.
        """
        while True:
            with self.lock:
                number = self.view.number(fragment)
                # Before the request: an island that claims it now has read it before.
                readers = self._roster_readers(fragment, number)
            try:
                roster = self.roster(fragment, number)
            except NoSuchObject as exc:
                if readers:  # a second roster of the round could differ
                    name, head = readers[0]
                    raise CorruptError(
                        f"{keys.roster(fragment, number)} is gone: island {name!r} "
                        f"has read the roster of round {head.round}. {RESTORE}"
                    ) from exc
                return
            key = keys.roster(fragment, number)
            # After the roster: one that was put too late for a move is not applied, and
            # a control that its closer had applied is. A damaged control may be that
            # move, so it is raised here, and not ignored.
            self.read_controls()
            if self.stops_for_moves and self.view.state.move is not None:
                return
            self.require_controls(roster.controls, named_by=key)
            with self.lock:
                names = {entry.island for entry in roster.roster.entries}
                has_unknown = not names <= self.view.documents.keys()
                if self.view.number(fragment) == number:
                    self._require_next(roster, key)
                    self.update_view.apply_roster(roster, self.runtime.now_s())
                    if self.rows is not None:
                        self.rows.note_roster(roster)
            if has_unknown:
                # Rounds wait only for members whose documents were read.
                self.members.read()
            self.updates.forget(fragment, number - 1)

    def closed_roster(self, fragment: int, round: int) -> documents.RosterDocument:
        """Return the roster of a closed round, from memory or from the bucket."""
        roster = self.view.rosters.get((fragment, round))
        return roster if roster is not None else self.roster(fragment, round)

    def roster(self, fragment: int, round: int) -> documents.RosterDocument:
        """Return the roster of a round.

        Raises:
            NoSuchObject: the round is not closed.
            CorruptError: the object is no such roster, so its outcome is unknown.
            UsageError: a move of 0.1.0 froze the round.
        """
        key = keys.roster(fragment, round)
        roster = documents.fetch_roster(self.store, key, run=self.run)
        if (roster.fragment, roster.round) != (fragment, round):
            raise CorruptError(
                f"{key} holds the roster of round {roster.round} of fragment "
                f"{roster.fragment}. {RESTORE}"
            )
        if roster.move:
            self._refuse_frozen(key)
        if roster.roster.counted and bool(roster.outer.buffer) != self.view.is_async:
            has = "a share" if roster.outer.buffer else "no share"
            mode = self.view.settings.sync.mode
            raise CorruptError(
                f"{key} has {has} of a buffer, and the run has sync.mode={mode!r}. "
                f"{RESTORE}"
            )
        self._require_linked(roster, key)
        return roster

    def _refuse_frozen(self, key: str) -> NoReturn:
        """Refuse a round that 0.1.0 froze for a move, unless the run has moved.

        Raises:
            NoSuchObject: the run has moved, without this round.
            UsageError: it has not.
        """
        if self.view.moved_to is not None:
            raise NoSuchObject(f"{key} was frozen by a move.", key=key)
        raise UsageError(
            f"{key} was frozen by a move that began with atoll 0.1.0. Use that version "
            "to finish the move, or to continue the run if the move was given up. Or "
            "export the run's weights, and begin another run with them."
        )

    def _roster_readers(
        self, fragment: int, round: int
    ) -> list[tuple[str, documents.RosterHead]]:
        """Return the islands whose documents say that they read a round's roster."""
        return [
            (name, document.heads[fragment])
            for name, document in sorted(self.view.documents.items())
            if fragment < len(document.heads)
            and document.heads[fragment].round >= round
        ]

    def _require_next(self, roster: documents.RosterDocument, key: str) -> None:
        """Return if a roster follows the last one that was read.

        Raises:
            CorruptError: it belongs to another history of the run, or an island has
                read another one at its key.
        """
        documents.require_follows(roster, self.view.heads[roster.fragment], key=key)
        for name, read in self._roster_readers(roster.fragment, roster.round):
            if read.round == roster.round and read.digest != roster.digest:
                raise CorruptError(
                    f"{key} has digest {roster.digest.hex()}, and island {name!r} has "
                    f"read {read.digest.hex()} there. {RESTORE}"
                )

    def _require_linked(self, roster: documents.RosterDocument, key: str) -> None:
        """Return unless the roster after this one, or the last one, names another.

        Raises:
            CorruptError: one does.
        """
        after = self.view.rosters.get((roster.fragment, roster.round + 1))
        head = self.view.heads.get(roster.fragment)
        named = after.before if after is not None else b""
        if not named and head is not None and head.round == roster.round:
            named = head.digest
        if named and named != roster.digest:
            raise CorruptError(
                f"{key} has digest {roster.digest.hex()}, and the run continues from "
                f"{named.hex()}. {RESTORE}"
            )


class MemberReader:
    """Reads the documents of members. Any thread may call."""

    def __init__(self, reader: BucketReader) -> None:
        self._reader, self._store, self._runtime = reader, reader.store, reader.runtime
        self._view, self._lock = reader.view, reader.lock
        self._beat_s = reader.view.lease_s / BEATS_PER_LEASE
        self._last_reads: dict[int, tuple[int, float]] = {}
        """By fragment, round and time of the last read of its missing islands."""

    def read(self) -> None:
        """Read the document of every island's latest incarnation."""
        numbers: dict[str, list[int]] = {}
        for key in map(incarnation_of, self._reader.list_keys(keys.MEMBERS)):
            if key is not None:
                numbers.setdefault(key.slug, []).append(key.incarnation)
        latest = [
            IncarnationKey(slug, number)
            for slug, claimed in numbers.items()
            if (number := latest_incarnation(claimed))
        ]
        self._read_all(key for key in latest if not self._can_wait(key))

    def read_incarnation(self, incarnation: IncarnationKey) -> None:
        """Read one document by its key: a list may lag behind."""
        self._read_all([incarnation])

    def _can_wait(self, incarnation: IncarnationKey) -> bool:
        """Return whether an incarnation has left, or is dormant for a while."""
        with self._lock:
            members = self._reader.member_view
            name = members.name_of(incarnation)
            has_left = name is not None and self._view.documents[name].has_left
            return has_left or members.is_dormant(incarnation, self._runtime.now_s())

    def _read_all(self, incarnations: Iterable[IncarnationKey]) -> None:
        reads = [partial(self._document, incarnation) for incarnation in incarnations]
        for document in self._runtime.gather(reads):
            if document is not None:
                with self._lock:
                    self._reader.member_view.apply(document, self._runtime.now_s())

    def _document(self, incarnation: IncarnationKey) -> documents.MemberDocument | None:
        key = f"{keys.MEMBERS}{incarnation}"
        read = partial(
            documents.fetch, self._store, documents.MEMBER, key, run=self._reader.run
        )
        with suppress(NoSuchObject):
            document = self._reader.ignore_corrupt(key, read)
            beat = document.beat if document else None
            if beat is None or keys.member(beat.island, beat.incarnation) != key:
                return None
            return document
        return None

    def read_missing(self, fragment: int) -> None:
        """Read the documents of islands that keep a round open, once per heartbeat.

        Also those of islands whose lease ran out while no document was read: an island
        is given up only after a read that found it unchanged.
        """
        with self._lock:
            now_s = self._runtime.now_s()
            unwatched = self._reader.member_view.unwatched(now_s)
            names = self._missing(fragment, now_s) | unwatched
            members = self._view.state.members.known
            incarnations = [
                IncarnationKey(keys.slug(name), members[name].incarnation)
                for name in sorted(names)
            ]
        self._read_all(incarnations)

    def _missing(self, fragment: int, now_s: float) -> frozenset[str]:
        """Return the islands that a round waits for, if they are due to be read."""
        round = self._view.state.rounds[fragment]
        missing = round.missing(self._view.state.members, now_s)
        has_quorum = len(round.staged) >= self._view.settings.run.quorum
        last_round, last_s = self._last_reads.get(fragment, (0, 0.0))
        # The rounds of an asynchronous run follow each other within a grace.
        is_new = last_round != round.number and not self._view.is_async
        is_due = is_new or now_s >= last_s + self._beat_s
        if not (missing and has_quorum and is_due):
            return frozenset()
        self._last_reads[fragment] = (round.number, now_s)
        return missing
