"""Reads a bucket, and tells a `Sight` what is there. Puts nothing.

Rule 1: the lock is held for a `Sight`, never for a request.
Rule 2: an object that cannot be read as what its key promises is nobody's: it is told
        once and passed over, unless the run cannot go on without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, Refused, UsageError
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    MemberDocument,
    RosterDocument,
    RunDocument,
    SettingsDocument,
    fetch,
)
from atoll.exchange.bucket.keys import Life, life_of
from atoll.exchange.bucket.means import DIRECT_ISLANDS
from atoll.exchange.bucket.sight import BEATS_PER_LEASE, LEASE_S, Sight
from atoll.exchange.bucket.timing import Timing
from atoll.store import Item, Store
from atoll.weights.verify import require_terms
from atoll.wire import Header, header_length, piece_count, unpack
from atoll.wire.layout import MAX_HEADER_BYTES

SMALL_BYTES = 2**20
"""An update of at most this size is read whole, with one request."""

_HEAD_BYTES = 16_384
"""What a header takes beside its pieces, and more."""

_UNKNOWN_BYTES = 2**62
"""The size of an update that no list has told: its header is read first."""

log = logging.getLogger("atoll")


class Lookout:
    """Keeps a `Sight` up to date. Any thread may call."""

    def __init__(
        self,
        store: Store,
        timing: Timing,
        settings: SettingsDocument,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self.store, self.timing = store, timing
        self.run = settings.run
        self.founded: RunDocument | None = None
        self.sight = Sight(settings.run, settings.settings, lease_s=lease_s)
        self.lock = threading.RLock()
        self._fingerprint = settings.fingerprint
        self._updates: dict[tuple[int, int], dict[Life, tuple[Header, np.ndarray]]] = {}
        self._strange: set[Item] = set()
        """What was read where updates are, and is none."""

        self._told: set[str] = set()
        self._beat_s = lease_s / BEATS_PER_LEASE
        self._asked_after: dict[int, tuple[int, float]] = {}
        """In which round, and when, the missing islands of a fragment were read."""

    @classmethod
    def open(
        cls, store: Store, timing: Timing, *, url: str, lease_s: float = LEASE_S
    ) -> Lookout:
        """Return the lookout on the run at a URL, which may wait for its founder.

        Raises:
            UsageError: nobody has made a run there.
            CorruptError: its settings are not those that it was made with.
        """
        try:
            settings = fetch(store, documents.SETTINGS, keys.SETTINGS)
        except NoSuchObject as exc:
            raise UsageError(
                f"There is no run at {url}. Make one first: "
                f"`atoll init {url} RUN.toml`."
            ) from exc
        require_unchanged(settings, settings.fingerprint)
        self = cls(store, timing, settings, lease_s=lease_s)
        self.look_founding()
        self.look_controls()
        return self

    def look_founding(self) -> bool:
        """Return whether the run has its first weights."""
        if self.founded is None:
            try:
                found = fetch(self.store, documents.RUN, keys.RUN, run=self.run)
            except NoSuchObject:
                return False
            if found.fingerprint != self._fingerprint:
                raise CorruptError(
                    f"{keys.SETTINGS} has fingerprint {self._fingerprint[:12]}, and "
                    f"the run was founded with {found.fingerprint[:12]}: somebody has "
                    "edited it. Put the old one back, or make another run."
                )
            with self.lock:
                self.founded = found
                self.sight.found(found.model, self.timing.now_s())
        return True

    def look_controls(self) -> None:
        """Read what operators have said since."""
        while True:
            key = keys.control(len(self.sight.controls) + 1)
            try:
                said = fetch(self.store, documents.CONTROL, key, run=self.run)
            except NoSuchObject:
                return
            with self.lock:
                if key == keys.control(len(self.sight.controls) + 1):
                    self.sight.see_control(said, self.timing.now_s())

    def heed_controls(self) -> None:
        """Read what operators have said since; what is nobody's word is passed over."""
        with suppress(NoSuchObject):
            self._tolerant(keys.CONTROL, self.look_controls)

    def look_members(self) -> None:
        """Read the documents of every island's latest life."""
        latest: dict[str, int] = {}
        for life in map(life_of, self._keys(keys.MEMBERS)):
            if life is not None:
                latest[life.slug] = max(life.incarnation, latest.get(life.slug, 0))
        lives = [Life(*each) for each in latest.items()]
        self._see_members(life for life in lives if not self._has_gone(life))

    def look_life(self, life: Life) -> None:
        """Read one document by its key: a list may be late."""
        self._see_members([life])

    def _has_gone(self, life: Life) -> bool:
        """Return whether a life says no more: after its farewell, or for a while."""
        with self.lock:
            name = self.sight.name_of(life)
            has_left = name is not None and self.sight.documents[name].has_left
            return has_left or self.sight.rests(life, self.timing.now_s())

    def _see_members(self, lives: Iterable[Life]) -> None:
        reads = [partial(self._member, life) for life in lives]
        for document in self.timing.together(reads):
            if document is not None:
                with self.lock:
                    self.sight.see_member(document, self.timing.now_s())

    def _member(self, life: Life) -> MemberDocument | None:
        key = f"{keys.MEMBERS}{life}"
        with suppress(NoSuchObject):
            document = self._tolerant(
                key, lambda: fetch(self.store, documents.MEMBER, key, run=self.run)
            )
            beat = document.beat if document else None
            if beat is None or keys.member(beat.island, beat.incarnation) != key:
                return None
            return document
        return None

    def look_missing(self, fragment: int) -> None:
        """Read the documents of who keeps a round open, once per heartbeat.

        And of who is about to be given up unseen, before that is done.
        """
        with self.lock:
            now_s = self.timing.now_s()
            names = self._missing(fragment, now_s) | self.sight.unwatched(now_s)
            members = self.sight.state.members.known
            lives = [
                Life(keys.slug(name), members[name].incarnation)
                for name in sorted(names)
            ]
        self._see_members(lives)

    def _missing(self, fragment: int, now_s: float) -> frozenset[str]:
        """Return whom a round waits for, if it is time to look after them again."""
        round = self.sight.state.rounds[fragment]
        missing = round.missing(self.sight.state.members, now_s)
        has_quorum = len(round.staged) >= self.sight.settings.run.quorum
        looked = self._asked_after.get(fragment, (0, 0.0))
        is_new = looked[0] != round.number or now_s >= looked[1] + self._beat_s
        if not (missing and has_quorum and is_new):
            return frozenset()
        self._asked_after[fragment] = (round.number, now_s)
        return missing

    def look_round(self, fragment: int) -> None:
        """Read what is new in the open round of a fragment."""
        with self.lock:
            number = self.sight.number(fragment)
        items = self.store.items(keys.round_prefix(fragment, number))
        if any(item.key == keys.roster(fragment, number) for item in items):
            self.follow(fragment)
            return
        prefix = keys.updates(fragment, number)
        self._see_updates(
            fragment, number, [item for item in items if item.key.startswith(prefix)]
        )

    def look_stands(self, fragment: int) -> None:
        """Read by their keys the updates that documents say stand in the open round."""
        with self.lock:
            number, lives = self.sight.number(fragment), self.sight.unread(fragment)
        if not lives:
            return
        prefix = keys.updates(fragment, number)
        items = [Item(f"{prefix}{life}", _UNKNOWN_BYTES) for life in lives]
        self._see_updates(fragment, number, items)
        with self.lock:
            if self.sight.number(fragment) == number:
                left = set(self.sight.unread(fragment)).intersection(lives)
                self.sight.see_nothing(fragment, left)

    def furthest(self) -> int:
        """Return the highest round that anybody has published for, as lists say now.

        Who leaves may have published for the round after the open one.
        """
        furthest = 0
        for fragment in range(len(self.sight.layout)):
            self.look_round(fragment)
            number = self.sight.number(fragment)
            published = [
                each
                for each in (number, number + 1)
                if any(map(life_of, self._keys(keys.updates(fragment, each))))
            ]
            furthest = max(furthest, number - 1, *published)
        return furthest

    def has_update(self, fragment: int, round: int, life: Life) -> bool:
        """Return whether a life has published for a round, by the update's key."""
        item = Item(f"{keys.updates(fragment, round)}{life}", _UNKNOWN_BYTES)
        return self._update(fragment, round, life, item) is not None

    def roster(self, fragment: int, round: int) -> RosterDocument:
        """Return the roster of a round.

        Raises:
            NoSuchObject: the round is not closed.
            CorruptError: something else is there, and nobody can say how it went.
        """
        key = keys.roster(fragment, round)
        found = fetch(self.store, documents.ROSTER, key, run=self.run)
        if (found.fragment, found.round) != (fragment, round):
            raise CorruptError(
                f"{key} holds the roster of round {found.round} of fragment "
                f"{found.fragment}. Restore the bucket from a copy."
            )
        return found

    def follow(self, fragment: int) -> None:
        """Read the rosters of a fragment, from its open round to the last closed."""
        while True:
            with self.lock:
                number = self.sight.number(fragment)
            try:
                found = self.roster(fragment, number)
            except NoSuchObject:
                return
            with self.lock:
                names = {entry.island for entry in found.roster.entries}
                are_strange = not names <= self.sight.documents.keys()
                if self.sight.number(fragment) == number:
                    self.sight.see_roster(found, self.timing.now_s())
            if are_strange:
                # Whoever does not know of them would not wait for them from now on.
                self.look_members()
            self._forget_updates(fragment, number - 1)

    def _forget_updates(self, fragment: int, before: int) -> None:
        for where in list(self._updates):
            if where[0] == fragment and where[1] < before:
                self._updates.pop(where, None)

    def _see_updates(self, fragment: int, round: int, items: list[Item]) -> None:
        known = self._updates.setdefault((fragment, round), {})
        fresh = [
            (life, item)
            for item in items
            if (life := life_of(item.key))
            and life not in known
            and item not in self._strange
        ]
        if not all(self.sight.knows(life) for life, _ in fresh):
            self.look_members()
        reads = [
            partial(self._update, fragment, round, life, item) for life, item in fresh
        ]
        for life, found in zip(
            [life for life, _ in fresh], self.timing.together(reads), strict=True
        ):
            if found is not None:
                known[life] = found
        for header, _ in list(known.values()):
            with self.lock:
                self.sight.see_update(
                    header, self.timing.now_s(), objection=self._objection(header)
                )

    def _update(
        self, fragment: int, round: int, life: Life, item: Item
    ) -> tuple[Header, np.ndarray] | None:
        """Return an update's header, and its body if that is small."""
        read = partial(self.read_update, item.key, item.size)
        try:
            found = self._tolerant(item.key, read)
        except NoSuchObject:
            return None  # collected since it was listed
        if found is None:
            self._strange.add(item)
            return None
        header = found[0]
        whose = (header.run, header.fragment, header.round, header.incarnation)
        is_its = whose == (self.run, fragment, round, life.incarnation)
        if not (
            is_its and header.kind.is_update and keys.slug(header.island) == life.slug
        ):
            self.tell(f"{item.key} holds the {header.name}, and is passed over.")
            self._strange.add(item)
            return None
        return found

    def read_update(self, key: str, size: int) -> tuple[Header, np.ndarray]:
        """Return the header of an update, and its body if it came along.

        Raises:
            NoSuchObject: there is none, or no more.
            CorruptError: it is no frame.
        """
        elements = max([layout.elements for layout in self.sight.layout])
        first = min(_HEAD_BYTES + 32 * piece_count(elements), MAX_HEADER_BYTES)
        # Of more islands nobody needs whole updates, nor has room for all of them.
        is_direct = len(self.sight.documents) <= DIRECT_ISLANDS
        if is_direct and size <= SMALL_BYTES:
            first = max(first, size)
        data = self.store.get(key, 0, first)
        length = header_length(data)
        header = unpack(data[:length])
        body = data[length:] if len(data) == size else memoryview(b"")
        return header, np.frombuffer(bytearray(body), np.uint8)

    def keep_update(self, header: Header) -> None:
        """Take note of an update that this island has put: nobody needs to read it."""
        life = Life(keys.slug(header.island), header.incarnation)
        known = self._updates.setdefault((header.fragment, header.round), {})
        known.setdefault(life, (header, np.empty(0, np.uint8)))
        with self.lock:
            self.sight.see_update(header, self.timing.now_s())

    def seen_update(
        self, fragment: int, round: int, life: Life
    ) -> tuple[Header, np.ndarray] | None:
        """Return what was read of an update, if it was."""
        return self._updates.get((fragment, round), {}).get(life)

    def _objection(self, header: Header) -> str:
        """Return why an update cannot count by the run's terms."""
        if header.refused:
            return ""
        layout = self.sight.layout[header.fragment]
        try:
            require_terms(header, layout, self.sight.terms(header.fragment))
        except Refused as exc:
            return f"terms: {exc}"[:400]
        return ""

    def _tolerant(
        self, key: str, read: Callable[[], documents.T]
    ) -> documents.T | None:
        try:
            return read()
        except CorruptError as exc:
            self.tell(f"{key} is passed over: {exc}")
            return None

    def tell(self, what: str) -> None:
        """Tell people something, once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s", what)

    def _keys(self, prefix: str) -> list[str]:
        return [item.key for item in self.store.items(prefix)]


def require_unchanged(document: SettingsDocument, fingerprint: str) -> None:
    """Return if settings are those that a run was made with."""
    if document.settings.fingerprint != fingerprint:
        raise CorruptError(
            f"{keys.SETTINGS} says fingerprint {fingerprint[:12]}, and its settings "
            f"have {document.settings.fingerprint[:12]}: somebody has edited them. "
            "Put the old ones back; what may change is changed by `atoll control`."
        )
