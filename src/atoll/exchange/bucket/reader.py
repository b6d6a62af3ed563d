"""Reads members, updates and rosters in a bucket into a `RunView`. Puts nothing.

Documents of members are read as seldom as possible; of updates the header is read, and
small updates are read whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, Refused, UsageError
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.base_reader import BaseReader, require_unchanged
from atoll.exchange.bucket.documents import (
    RESTORE,
    MemberDocument,
    RosterDocument,
    RosterHead,
    RunDocument,
    fetch,
    fetch_roster,
)
from atoll.exchange.bucket.keys import IncarnationKey, incarnation_of
from atoll.exchange.bucket.means import DIRECT_ISLANDS
from atoll.exchange.bucket.runtime import Timing
from atoll.exchange.bucket.view import BEATS_PER_LEASE, LEASE_S
from atoll.protocol.membership import latest_incarnation
from atoll.store import Item, Store
from atoll.weights.verify import require_terms
from atoll.wire import (
    FrameKind,
    Header,
    frame_bytes,
    header_length,
    piece_count,
    unpack,
)
from atoll.wire.frame import MAX_HEADER_BYTES


class BucketReader:
    """Keeps a `RunView` up to date. Any thread may call."""

    def __init__(self, reading: BaseReader) -> None:
        self._reading, self.run = reading, reading.run
        self.store, self.timing = reading.store, reading.timing
        self.sight, self.lock, self.tell = reading.sight, reading.lock, reading.tell
        self.known_updates, self.known_members = reading.updates, reading.members
        self.known_bases = reading.bases
        self.look_founding, self.look_controls = (
            reading.look_founding,
            reading.look_controls,
        )
        self.heed_controls = reading.heed_controls
        self.require_unfounded = reading.require_unfounded
        self.require_here = reading.require_here
        self.require_staying = reading.require_staying
        self.members = MemberReader(reading)
        self.updates = UpdateReader(reading, self.members)
        self.look_members = self.members.look
        self.seen_update, self.read_update = self.updates.seen, self.updates.read
        self._thawed: dict[tuple[int, int], int] = {}
        """Rounds that a move had frozen, and the last such move that was given up."""

    @classmethod
    def open(
        cls, store: Store, timing: Timing, *, url: str, lease_s: float = LEASE_S
    ) -> BucketReader:
        """Return the lookout on the run at a URL, which may wait for its founder.

        Raises:
            UsageError: nobody has made a run there.
            CorruptError: its settings are not those that it was made with.
        """
        try:
            settings = fetch(store, documents.SETTINGS, keys.SETTINGS)
        except NoSuchObject as exc:
            require_no_remains(store, url=url)
            raise UsageError(
                f"There is no run at {url}. Make one first: "
                f"`atoll init {url} RUN.toml`."
            ) from exc
        except CorruptError as exc:
            raise CorruptError(
                f"{exc} What may change of a run's settings is changed by `atoll "
                "control`, and nothing by hand."
            ) from exc
        require_unchanged(settings, settings.fingerprint)
        self = cls(BaseReader(store, timing, settings, lease_s=lease_s))
        if not self.look_founding():
            self.require_unfounded()
        self.look_controls()
        return self

    @property
    def founded(self) -> RunDocument | None:
        """What the run was founded with, once that was read."""
        return self._reading.founded

    @property
    def founding_head(self) -> RosterHead:
        """What the first roster of each fragment names as the one before it."""
        head = self._reading.founding_head
        assert head is not None
        return head

    def look_round(self, fragment: int) -> None:
        """Read what is new in the open round of a fragment."""
        with self.lock:
            number = self.sight.number(fragment)
        items = self.store.items(keys.round_prefix(fragment, number))
        if any(item.key == keys.roster(fragment, number) for item in items):
            self.follow(fragment)
            if self.sight.number(fragment) != number:
                return  # else a move has frozen it, which may be given up
        prefix = keys.updates(fragment, number)
        self.updates.look(
            fragment, number, [item for item in items if item.key.startswith(prefix)]
        )

    def look_stands(self, fragment: int) -> None:
        """Read by their keys the updates that documents say stand in the open round."""
        with self.lock:
            number, lives = (
                self.sight.number(fragment),
                self.known_updates.unread(fragment),
            )
        if not lives:
            return
        prefix = keys.updates(fragment, number)
        items = [Item(f"{prefix}{life}", UNKNOWN_BYTES) for life in lives]
        self.updates.look(fragment, number, items)
        with self.lock:
            if self.sight.number(fragment) == number:
                left = set(self.known_updates.unread(fragment)).intersection(lives)
                self.known_updates.see_nothing(fragment, left)

    def ahead(self, fragment: int) -> list[Header]:
        """Return what departed for the round after the open one."""
        number = self.sight.number(fragment) + 1
        prefix = keys.updates(fragment, number)
        lives = {
            life
            for key in self._reading.listed(prefix)
            if (life := incarnation_of(key))
        }
        with self.lock:
            lives.update(self.known_updates.standing(fragment, number))
        items = [Item(f"{prefix}{life}", UNKNOWN_BYTES) for life in sorted(lives)]
        self.updates.look(fragment, number, items)
        found = [
            header for header, _ in self.updates.by_round[fragment, number].values()
        ]
        return self.known_updates.speaking(
            header for header in found if header.kind is FrameKind.DEPARTING
        )

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
                if any(
                    map(
                        incarnation_of,
                        self._reading.listed(keys.updates(fragment, each)),
                    )
                )
            ]
            furthest = max(furthest, number - 1, *published)
        return furthest

    def follow(self, fragment: int) -> None:
        """Read the rosters of a fragment, from its open round to the last closed."""
        while True:
            with self.lock:
                number = self.sight.number(fragment)
                # Before the roster is asked for: they had read it then.
                readers = self._readers(fragment, number)
            try:
                found = self.roster(fragment, number)
            except NoSuchObject as exc:
                self._require_open(self.roster_key(fragment, number), readers, exc)
                return
            key = self.roster_key(fragment, number)
            if found.epoch > self.sight.state.epoch:
                self.heed_controls()  # what was in force there is in force here
            self._reading.require_controls(found.controls, named_by=key)
            with self.lock:
                names = {entry.island for entry in found.roster.entries}
                are_strange = not names <= self.sight.documents.keys()
                if self.sight.number(fragment) == number:
                    self._require_next(found, key)
                    self.known_updates.see_roster(found, self.timing.now_s())
            if are_strange:
                # Whoever does not know of them would not wait for them from now on.
                self.look_members()
            self.updates.forget(fragment, number - 1)

    def known_roster(self, fragment: int, round: int) -> RosterDocument:
        """Return the roster of a closed round, as it was read or is read now."""
        found = self.sight.rosters.get((fragment, round))
        return found if found is not None else self.roster(fragment, round)

    def roster(self, fragment: int, round: int) -> RosterDocument:
        """Return the roster of a round.

        Raises:
            NoSuchObject: the round is not closed.
            CorruptError: something else is there, and nobody can say how it went.
        """
        while True:
            key = self.roster_key(fragment, round)
            found = fetch_roster(self.store, key, run=self.run)
            if (found.fragment, found.round) != (fragment, round):
                raise CorruptError(
                    f"{key} holds the roster of round {found.round} of fragment "
                    f"{found.fragment}. {RESTORE}"
                )
            if not found.move:
                self._require_linked(found, key)
                return found
            if not self._was_given_up(found.move, key):
                raise NoSuchObject(f"{key} holds the round for a move.", key=key)
            self._thawed[fragment, round] = found.move

    def roster_key(self, fragment: int, round: int) -> str:
        """Return where a round is closed, as far as is known."""
        if (move := self._thawed.get((fragment, round))) is not None:
            return keys.roster_after(fragment, round, move)
        return keys.roster(fragment, round)

    def _was_given_up(self, move: int, key: str) -> bool:
        """Return whether a move that a roster names was given up since."""
        moves = self.sight.moves
        if move not in moves.begun or moves.is_under_way(move):
            self.heed_controls()
        if move not in moves.begun:
            raise CorruptError(
                f"{key} names operators' word {move} as a move, and it is none. "
                f"{RESTORE}"
            )
        return move in moves.given_up

    def _readers(self, fragment: int, round: int) -> list[tuple[str, RosterHead]]:
        """Return the islands whose documents say that they read a round's roster."""
        return [
            (name, document.heads[fragment])
            for name, document in sorted(self.sight.documents.items())
            if fragment < len(document.heads)
            and document.heads[fragment].round >= round
        ]

    def _require_open(
        self,
        key: str,
        readers: list[tuple[str, RosterHead]],
        missing: NoSuchObject,
    ) -> None:
        """Return if no island has read the missing roster.

        Raises:
            CorruptError: it was there, and closing the round again would make another.
        """
        if readers:
            raise CorruptError(
                f"{key} is gone: island {readers[0][0]!r} has read the roster of round "
                f"{readers[0][1].round}. {RESTORE}"
            ) from missing

    def _require_next(self, found: RosterDocument, key: str) -> None:
        """Return if a roster follows the last one that was read.

        Raises:
            CorruptError: it belongs to another history of the run, or an island has
                read another one at its key.
        """
        head = self.sight.heads[found.fragment]
        is_next = found.before == head.digest
        if not is_next and not (found.before == b"" and not head.is_chained):
            where = keys.roster(found.fragment, head.round) if head.round else keys.RUN
            raise CorruptError(
                f"{key} follows an object with digest {found.before.hex() or 'none'}, "
                f"and {where}, which was read before it, has {head.digest.hex()}: one "
                f"of them was changed. {RESTORE}"
            )
        for name, theirs in self._readers(found.fragment, found.round):
            if theirs.round == found.round and theirs.digest != found.digest:
                raise CorruptError(
                    f"{key} has digest {found.digest.hex()}, and island {name!r} has "
                    f"read {theirs.digest.hex()} there. {RESTORE}"
                )

    def _require_linked(self, found: RosterDocument, key: str) -> None:
        """Return unless the roster after this one, or the last one, names another.

        Raises:
            CorruptError: one does.
        """
        after = self.sight.rosters.get((found.fragment, found.round + 1))
        head = self.sight.heads.get(found.fragment)
        named = after.before if after is not None else b""
        if not named and head is not None and head.round == found.round:
            named = head.digest
        if named and named != found.digest:
            raise CorruptError(
                f"{key} has digest {found.digest.hex()}, and the run goes on from "
                f"{named.hex()}. {RESTORE}"
            )


def require_no_remains(store: Store, *, url: str) -> None:
    """Return unless a run is there whose settings are gone.

    Raises:
        CorruptError: `run.json` is there without the settings.
    """
    try:
        store.get(keys.RUN, 0, 1)
    except NoSuchObject:
        return
    raise CorruptError(
        f"{keys.SETTINGS} is gone from {url}, and {keys.RUN} is there. If a run is on "
        f"its way there, let `atoll move` finish. Otherwise: {RESTORE}"
    )


class MemberReader:
    """Tells who takes part in a run. Any thread may call."""

    def __init__(self, reading: BaseReader) -> None:
        self._reading, self._known = reading, reading.members
        self._sight, self._lock = reading.sight, reading.lock
        self._store, self._timing = reading.store, reading.timing
        self._beat_s = reading.sight.lease_s / BEATS_PER_LEASE
        self._asked_after: dict[int, tuple[int, float]] = {}
        """In which round, and when, the missing islands of a fragment were read."""

    def look(self) -> None:
        """Read the documents of every island's latest life."""
        found: dict[str, list[int]] = {}
        for life in map(incarnation_of, self._reading.listed(keys.MEMBERS)):
            if life is not None:
                found.setdefault(life.slug, []).append(life.incarnation)
        lives = [
            IncarnationKey(slug, incarnation)
            for slug, claimed in found.items()
            if (incarnation := latest_incarnation(claimed))
        ]
        self._see_members(life for life in lives if not self._has_gone(life))

    def look_life(self, life: IncarnationKey) -> None:
        """Read one document by its key: a list may be late."""
        self._see_members([life])

    def _has_gone(self, life: IncarnationKey) -> bool:
        """Return whether a life says no more: after its farewell, or for a while."""
        with self._lock:
            name = self._known.name_of(life)
            has_left = name is not None and self._sight.documents[name].has_left
            return has_left or self._known.rests(life, self._timing.now_s())

    def _see_members(self, lives: Iterable[IncarnationKey]) -> None:
        reads = [partial(self._member, life) for life in lives]
        for document in self._timing.together(reads):
            if document is not None:
                with self._lock:
                    self._known.see(document, self._timing.now_s())

    def _member(self, life: IncarnationKey) -> MemberDocument | None:
        key = f"{keys.MEMBERS}{life}"
        with suppress(NoSuchObject):
            document = self._reading.tolerant(
                key,
                lambda: fetch(
                    self._store, documents.MEMBER, key, run=self._reading.run
                ),
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
        with self._lock:
            now_s = self._timing.now_s()
            names = self._missing(fragment, now_s) | self._known.unwatched(now_s)
            members = self._sight.state.members.known
            lives = [
                IncarnationKey(keys.slug(name), members[name].incarnation)
                for name in sorted(names)
            ]
        self._see_members(lives)

    def _missing(self, fragment: int, now_s: float) -> frozenset[str]:
        """Return whom a round waits for, if it is time to look after them again."""
        round = self._sight.state.rounds[fragment]
        missing = round.missing(self._sight.state.members, now_s)
        has_quorum = len(round.staged) >= self._sight.settings.run.quorum
        looked = self._asked_after.get(fragment, (0, 0.0))
        is_new = looked[0] != round.number or now_s >= looked[1] + self._beat_s
        if not (missing and has_quorum and is_new):
            return frozenset()
        self._asked_after[fragment] = (round.number, now_s)
        return missing


SMALL_BYTES = 2**20
"""An update of at most this size is read whole, with one request."""

UNKNOWN_BYTES = 2**62
"""The size of an update that no list has told: its header is read first."""

_HEAD_BYTES = 16_384
"""What a header takes beside its pieces, and more."""


class UpdateReader:
    """Tells what islands have published. Any thread may call."""

    def __init__(self, reading: BaseReader, members: MemberReader) -> None:
        self._reading, self._members = reading, members
        self._sight, self._lock = reading.sight, reading.lock
        self._store, self._timing = reading.store, reading.timing
        self.by_round: dict[
            tuple[int, int], dict[IncarnationKey, tuple[Header, np.ndarray]]
        ] = {}
        """What was read of each one, with its body if that is small."""

        self._strange: set[Item] = set()
        """What was read where updates are, and is none."""

    def has(self, fragment: int, round: int, life: IncarnationKey) -> bool:
        """Return whether a life has published for a round, by the update's key."""
        return self.header(fragment, round, life) is not None

    def header(self, fragment: int, round: int, life: IncarnationKey) -> Header | None:
        """Return what a life has published for a round, by the update's key."""
        item = Item(f"{keys.updates(fragment, round)}{life}", UNKNOWN_BYTES)
        found = self._found(fragment, round, life, item)
        return found[0] if found else None

    def read(self, key: str, size: int) -> tuple[Header, np.ndarray]:
        """Return the header of an update, and its body if it came along.

        Raises:
            NoSuchObject: there is none, or no more.
            CorruptError: it is no frame.
        """
        elements = max([layout.elements for layout in self._sight.layout])
        first = min(_HEAD_BYTES + 32 * piece_count(elements), MAX_HEADER_BYTES)
        # Of more islands nobody needs whole updates, nor has room for all of them.
        is_direct = len(self._sight.documents) <= DIRECT_ISLANDS
        if is_direct and size <= SMALL_BYTES:
            first = max(first, size)
        data = self._store.get(key, 0, first)
        length = header_length(data)
        header = unpack(data[:length])
        body = data[length:] if len(data) == size else memoryview(b"")
        return header, np.frombuffer(bytearray(body), np.uint8)

    def keep(self, header: Header) -> None:
        """Take note of an update that this island has put: nobody needs to read it."""
        life = IncarnationKey(keys.slug(header.island), header.incarnation)
        known = self.by_round.setdefault((header.fragment, header.round), {})
        known.setdefault(life, (header, np.empty(0, np.uint8)))
        with self._lock:
            self._reading.updates.see(header, self._timing.now_s())

    def seen(
        self, fragment: int, round: int, life: IncarnationKey
    ) -> tuple[Header, np.ndarray] | None:
        """Return what was read of an update, if it was."""
        return self.by_round.get((fragment, round), {}).get(life)

    def objection(self, header: Header) -> str:
        """Return why an update cannot count by the run's terms."""
        if header.refused:
            return ""
        layout = self._sight.layout[header.fragment]
        try:
            require_terms(header, layout, self._sight.terms(header.fragment))
        except Refused as exc:
            return f"terms: {exc}"[:400]
        return ""

    def look(self, fragment: int, round: int, items: list[Item]) -> None:
        """Read those of a round's updates that were not read before."""
        known = self.by_round.setdefault((fragment, round), {})
        fresh = [
            (life, item)
            for item in items
            if (life := incarnation_of(item.key))
            and life not in known
            and item not in self._strange
        ]
        if not all(self._reading.members.knows(life) for life, _ in fresh):
            self._members.look()
        reads = [
            partial(self._found, fragment, round, life, item) for life, item in fresh
        ]
        for life, found in zip(
            [life for life, _ in fresh], self._timing.together(reads), strict=True
        ):
            if found is not None:
                known[life] = found
        for header, _ in list(known.values()):
            with self._lock:
                self._reading.updates.see(
                    header, self._timing.now_s(), objection=self.objection(header)
                )

    def _found(
        self, fragment: int, round: int, life: IncarnationKey, item: Item
    ) -> tuple[Header, np.ndarray] | None:
        """Return an update's header, and its body if that is small."""
        read = partial(self.read, item.key, item.size)
        try:
            found = self._reading.tolerant(item.key, read)
        except NoSuchObject:
            return None  # collected since it was listed
        if found is None:
            self._strange.add(item)
            return None
        header = found[0]
        if item.size not in (UNKNOWN_BYTES, frame_bytes(header)):
            self._reading.tell(
                f"{item.key} has {item.size} bytes, and its header says "
                f"{frame_bytes(header)}: it is cut off, and is passed over."
            )
            self._strange.add(item)
            return None
        whose = (header.run, header.fragment, header.round, header.incarnation)
        is_its = whose == (self._reading.run, fragment, round, life.incarnation)
        if not (
            is_its and header.kind.is_update and keys.slug(header.island) == life.slug
        ):
            self._reading.tell(
                f"{item.key} holds the {header.name}, and is passed over."
            )
            self._strange.add(item)
            return None
        return found

    def forget(self, fragment: int, before: int) -> None:
        """Let go what was read of rounds that are over."""
        for where in list(self.by_round):
            if where[0] == fragment and where[1] < before:
                self.by_round.pop(where, None)
