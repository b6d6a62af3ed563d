"""Reads the documents of members in a bucket, as seldom as can be. Puts nothing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from atoll.errors import NoSuchObject
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import MemberDocument, fetch
from atoll.exchange.bucket.keys import Life, life_of
from atoll.exchange.bucket.reading import Reading
from atoll.exchange.bucket.sight import BEATS_PER_LEASE
from atoll.protocol.plausible import latest_incarnation


class MemberReading:
    """Tells who takes part in a run. Any thread may call."""

    def __init__(self, reading: Reading) -> None:
        self._reading, self._known = reading, reading.members
        self._sight, self._lock = reading.sight, reading.lock
        self._store, self._timing = reading.store, reading.timing
        self._beat_s = reading.sight.lease_s / BEATS_PER_LEASE
        self._asked_after: dict[int, tuple[int, float]] = {}
        """In which round, and when, the missing islands of a fragment were read."""

    def look(self) -> None:
        """Read the documents of every island's latest life."""
        found: dict[str, list[int]] = {}
        for life in map(life_of, self._reading.listed(keys.MEMBERS)):
            if life is not None:
                found.setdefault(life.slug, []).append(life.incarnation)
        lives = [
            Life(slug, incarnation)
            for slug, claimed in found.items()
            if (incarnation := latest_incarnation(claimed))
        ]
        self._see_members(life for life in lives if not self._has_gone(life))

    def look_life(self, life: Life) -> None:
        """Read one document by its key: a list may be late."""
        self._see_members([life])

    def _has_gone(self, life: Life) -> bool:
        """Return whether a life says no more: after its farewell, or for a while."""
        with self._lock:
            name = self._known.name_of(life)
            has_left = name is not None and self._sight.documents[name].has_left
            return has_left or self._known.rests(life, self._timing.now_s())

    def _see_members(self, lives: Iterable[Life]) -> None:
        reads = [partial(self._member, life) for life in lives]
        for document in self._timing.together(reads):
            if document is not None:
                with self._lock:
                    self._known.see(document, self._timing.now_s())

    def _member(self, life: Life) -> MemberDocument | None:
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
                Life(keys.slug(name), members[name].incarnation)
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
