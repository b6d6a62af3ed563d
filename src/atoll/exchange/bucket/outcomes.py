"""The outcome of a round that is closed: read from the bucket, or made from updates.

Who owns a shard puts its mean; what is missing after a while is made by whoever waits
for it, in an order that keeps all but one from doing the same.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, OutcomeLost
from atoll.exchange.base import Frame
from atoll.exchange.bucket import keys, means
from atoll.exchange.bucket.documents import RosterDocument
from atoll.exchange.bucket.keys import Life
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.means import Mean, Pieces
from atoll.wire import Header, RosterEntry, frame_bytes, update_digest

GRACE_S = 4.0
"""How long the owner of a shard may take before the next island makes it."""

FIRST_PAUSE_S, GROWTH, LONGEST_PAUSE_S = 0.05, 1.5, 1.0


class Outcomes:
    """Finds and makes the agreed frames of closed rounds, for one island or nobody."""

    def __init__(self, lookout: Lookout, island: str | None) -> None:
        self._lookout, self.island = lookout, island
        self._store, self._timing = lookout.store, lookout.timing
        self.own: dict[tuple[int, int], Frame] = {}
        """Updates of this island whose bodies are still in memory."""

    def frame(self, fragment: int, round: int) -> Frame:
        """Return the agreed frame of a closed round; without a body if that is gone."""
        document = self._document(fragment, round)
        sight = self._lookout.sight
        layout, down = sight.layout[fragment], sight.terms(fragment).down
        try:
            header, body = means.agreed(document, self._means(document), layout, down)
        except NoSuchObject:  # collected: a later state has all of it
            roster = document.roster
            return Frame(
                means.header_of(document, roster, layout, down), np.empty(0, np.uint8)
            )
        return Frame(header, body)

    def _document(self, fragment: int, round: int) -> RosterDocument:
        known = self._lookout.sight.rosters.get((fragment, round))
        if known is not None:
            return known
        try:
            return self._lookout.roster(fragment, round)
        except NoSuchObject as exc:  # a run that came here brought its last ones only
            raise OutcomeLost(
                f"Round {round} of fragment {fragment} was over before the run came "
                "here, and its outcome did not come along. Take the fragment's state."
            ) from exc

    def _means(self, document: RosterDocument) -> list[Mean]:
        if not document.roster.counted:
            return []
        layout = self._lookout.sight.layout[document.fragment]
        parts = means.shards(document, layout.elements)
        if not document.shards:
            return [self._make(document, 0, parts[0])]
        return self._gather(document, parts)

    def _gather(self, document: RosterDocument, parts: list[Pieces]) -> list[Mean]:
        """Return the means of all shards; make those that are this island's to make."""
        found: dict[int, Mean] = {}
        foreign: set[int] = set()
        begun_s, paused_s, pause_s = self._timing.now_s(), 0.0, FIRST_PAUSE_S
        while True:
            waited_s = max(self._timing.now_s() - begun_s, paused_s)
            # Who closed the next round has taken this one: its means are there, or
            # have been collected since.
            is_past = self._lookout.sight.number(document.fragment) > document.round + 1
            for shard, pieces in enumerate(parts):
                is_due = self._turn(document, shard) * GRACE_S <= waited_s
                if shard not in found and (is_due or is_past or shard in foreign):
                    found[shard] = self._provide(document, shard, pieces)
            is_again = paused_s > 0.0
            foreign |= self._read_missing(document, parts, found, is_again=is_again)
            if len(found) == len(parts):
                return [found[shard] for shard in range(len(parts))]
            if foreign - found.keys():
                continue
            self._timing.pause(pause_s)
            paused_s += pause_s
            pause_s = min(GROWTH * pause_s, LONGEST_PAUSE_S)

    def _turn(self, document: RosterDocument, shard: int) -> int:
        """Return as how many'th this island would make a shard: its owner is first."""
        owners = document.shards
        if self.island not in owners:
            return len(owners)
        return (owners.index(self.island) - shard) % len(owners)

    def _provide(self, document: RosterDocument, shard: int, pieces: Pieces) -> Mean:
        """Return the mean of a shard, and put it where the others look for it."""
        if self._turn(document, shard):
            there, _ = self._read(document, shard, pieces)
            if there is not None:
                return there
        mean = self._make(document, shard, pieces)
        key = keys.mean(document.fragment, document.round, shard)
        self._store.put_new(key, means.packed_mean(mean))
        return mean

    def _read_missing(
        self,
        document: RosterDocument,
        parts: list[Pieces],
        found: dict[int, Mean],
        *,
        is_again: bool,
    ) -> set[int]:
        """Read what is there; return the shards at whose keys something else is.

        Who looks again asks for one, and for the others when it has come: means come
        at about the same time, and to wait for each of them has its price.
        """
        missing = [shard for shard in range(len(parts)) if shard not in found]
        first = 1 if is_again else len(missing)
        foreign = self._read_all(document, parts, missing[:first], found)
        if found.keys() >= set(missing[:first]):
            foreign |= self._read_all(document, parts, missing[first:], found)
        return foreign

    def _read_all(
        self,
        document: RosterDocument,
        parts: list[Pieces],
        wanted: list[int],
        found: dict[int, Mean],
    ) -> set[int]:
        """Read these shards at once, as far as they are there."""
        reads = [partial(self._read, document, each, parts[each]) for each in wanted]
        foreign = set()
        for shard, read in zip(wanted, self._timing.together(reads), strict=True):
            mean, is_foreign = read
            if mean is not None:
                found[shard] = mean
            if is_foreign:
                foreign.add(shard)
        return foreign

    def _read(
        self, document: RosterDocument, shard: int, pieces: Pieces
    ) -> tuple[Mean | None, bool]:
        """Return a mean if it is there, and whether something else is."""
        key = keys.mean(document.fragment, document.round, shard)
        down = self._lookout.sight.terms(document.fragment).down
        try:
            data = self._store.get(key, 0, means.most_bytes(document, pieces, down))
        except NoSuchObject:
            return None, False
        try:
            return means.parse_mean(data, document, shard, pieces, down), False
        except CorruptError:
            # Foreign bytes cannot be replaced; the right ones can be made by anybody,
            # but not here: reads that wait for reads could take every thread.
            return None, True

    def _make(self, document: RosterDocument, shard: int, pieces: Pieces) -> Mean:
        sight = self._lookout.sight
        counted = document.roster.counted
        reads = [partial(self._part, document, entry, pieces) for entry in counted]
        parts = self._timing.together(reads)
        updates = {
            entry.island: part for entry, part in zip(counted, parts, strict=True)
        }
        layout = sight.layout[document.fragment]
        terms = sight.terms(document.fragment)
        return means.mean_of(document, shard, pieces, updates, layout, terms)

    def _part(
        self, document: RosterDocument, entry: RosterEntry, pieces: Pieces
    ) -> tuple[Header | None, np.ndarray]:
        """Return the header of a counted update, and the bytes of some pieces."""
        up = self._lookout.sight.terms(document.fragment).up
        own = self.own.get((document.fragment, document.round))
        if own is not None and update_digest(own.header) == entry.digest:
            begin, end = pieces.span(up)
            return own.header, own.body[begin:end]
        header, body = self._head(document, entry)
        if header is None or update_digest(header) != entry.digest:
            return None, body
        begin, end = pieces.span(up)
        if len(body) == header.body_bytes:
            return header, body[begin:end]
        return header, self._range(document, entry, header, begin, end)

    def _head(
        self, document: RosterDocument, entry: RosterEntry
    ) -> tuple[Header | None, np.ndarray]:
        """Return what is known of an update, or its beginning; None if it is none."""
        life = Life(keys.slug(entry.island), entry.incarnation)
        seen = self._lookout.seen_update(document.fragment, document.round, life)
        if seen is not None:
            return seen
        key = f"{keys.updates(document.fragment, document.round)}{life}"
        try:
            return self._lookout.read_update(key, 2**62)
        except CorruptError:
            return None, np.empty(0, np.uint8)

    def _range(
        self,
        document: RosterDocument,
        entry: RosterEntry,
        header: Header,
        begin: int,
        end: int,
    ) -> np.ndarray:
        life = Life(keys.slug(entry.island), entry.incarnation)
        key = f"{keys.updates(document.fragment, document.round)}{life}"
        first = _head_bytes(header)
        data = self._store.get(key, first + begin, end - begin)
        return np.frombuffer(data, np.uint8)


def _head_bytes(header: Header) -> int:
    """Return how many bytes of an update's object come before its body."""
    return frame_bytes(header) - header.body_bytes
