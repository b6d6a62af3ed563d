"""The outcome of a round that is closed: read from the bucket, or made from updates.

Who owns a shard puts its mean; what is missing after a while is made by whoever waits
for it, in an order that keeps all but one from doing the same.

A counted update that is gone or does not verify is damage. Nobody guesses what it was:
a reader takes the mean or a later state instead, if one is there. Otherwise it asks for
another copy by its member document, and waits. The update's owner has its bytes until
it knows the outcome, and puts them again; an island that knows the outcome of a round
without shards puts the mean. Whatever is put must have the digests that the roster and
the mean name, so that a copy needs no trust.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, OutcomeLost
from atoll.exchange.base import Frame
from atoll.exchange.bucket import keys, means
from atoll.exchange.bucket.documents import (
    MAX_WANTS,
    RESTORE,
    MemberDocument,
    RosterDocument,
    Want,
)
from atoll.exchange.bucket.keys import IncarnationKey
from atoll.exchange.bucket.large_objects import StateObjects
from atoll.exchange.bucket.means import Mean, Pieces, Unverified
from atoll.exchange.bucket.reader import BucketReader
from atoll.wire import Header, RosterEntry, frame_bytes, pack, update_digest

GRACE_S = 4.0
"""How long the owner of a shard may take before the next island makes it."""

FIRST_PAUSE_S, GROWTH, LONGEST_PAUSE_S = 0.05, 1.5, 1.0

REPAIR_PAUSE_S = 2.0
"""Between two looks for another copy of a damaged update."""

LONGEST_REPAIR_S = 900.0
"""How long another copy is waited for while an island lives that may have one."""


class Outcomes:
    """Finds and makes the agreed frames of closed rounds, for one island or nobody."""

    def __init__(self, lookout: BucketReader, island: str | None) -> None:
        self._lookout, self.island = lookout, island
        self._store, self._timing = lookout.store, lookout.timing
        self.own: dict[tuple[int, int], Frame] = {}
        """Updates of this island whose bodies are still in memory."""

        self._objects = StateObjects(lookout)
        self._made: dict[int, tuple[RosterDocument, Mean]] = {}
        """By fragment, the mean of the last round that has no shards, until every live
        island has taken it."""

        self._wants: dict[Want, None] = {}
        self._damage: dict[tuple[int, int], str] = {}
        """By fragment and round, what was wrong with it."""

        self.states_wanted: set[int] = set()
        """Fragments of which somebody lacks a round that only a state can give."""

        self._repaired_s: dict[Want, float] = {}
        self._lock = threading.Lock()

    def frame(self, fragment: int, round: int) -> Frame:
        """Return the agreed frame of a closed round; without a body if that is gone."""
        document = self._document(fragment, round)
        sight = self._lookout.sight
        layout, down = sight.layout[fragment], sight.terms(fragment).down
        try:
            header, body = means.agreed(document, self._means(document), layout, down)
        except NoSuchObject:  # a later state has all of it
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
            mean = self._make(document, 0, parts[0])
            if self.island is not None:
                self._made[document.fragment] = document, mean
            return [mean]
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
        if self.island is not None:
            self._store.put_new(key, means.packed_mean(mean, key))
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
            mean = means.parse_mean(data, document, shard, pieces, down, key=key)
            return mean, False
        except CorruptError:
            # Foreign bytes cannot be replaced; the right ones can be made by anybody,
            # but not here: reads that wait for reads could take every thread.
            return None, True

    def _make(self, document: RosterDocument, shard: int, pieces: Pieces) -> Mean:
        """Return the mean of a shard, made of the updates that the roster lists.

        Raises:
            NoSuchObject: they are gone or damaged, and a later state has the round.
            CorruptError: they are gone or damaged, and nobody has another copy.
        """
        wants: tuple[Want, ...] = ()
        begun_s, paused_s = self._timing.now_s(), 0.0
        try:
            while True:
                try:
                    return self._reduce(document, shard, pieces)
                except Unverified as exc:
                    damaged = exc.islands
                self._tell_damage(document, damaged)
                if (mean := self._read(document, shard, pieces)[0]) is not None:
                    return mean
                self._require_uncovered(document, damaged)
                waited_s = max(self._timing.now_s() - begun_s, paused_s)
                self._require_hope(document, damaged, waited_s)
                wants = self._want(document, damaged, wants)
                self._timing.pause(REPAIR_PAUSE_S)
                paused_s += REPAIR_PAUSE_S
        finally:
            self._want(document, (), wants)

    def _reduce(self, document: RosterDocument, shard: int, pieces: Pieces) -> Mean:
        """Return the mean of a shard.

        Raises:
            Unverified: some updates are not what the roster lists.
            NoSuchObject: they have been removed, because a later state has the round.
        """
        sight, counted = self._lookout.sight, document.roster.counted
        reads = [partial(self._part, document, entry, pieces) for entry in counted]
        found = self._timing.together(reads)
        gone = [e.island for e, part in zip(counted, found, strict=True) if not part]
        if gone:
            self._require_uncovered(document, tuple(gone))
        nothing = (None, np.empty(0, np.uint8))
        updates: dict[str, tuple[Header | None, np.ndarray]] = {
            entry.island: part or nothing
            for entry, part in zip(counted, found, strict=True)
        }
        layout = sight.layout[document.fragment]
        terms = sight.terms(document.fragment)
        return means.mean_of(document, shard, pieces, updates, layout, terms)

    def _part(
        self, document: RosterDocument, entry: RosterEntry, pieces: Pieces
    ) -> tuple[Header | None, np.ndarray] | None:
        """Return the header of a counted update, and the bytes of some pieces.

        None: there is no object at its key.
        """
        up = self._lookout.sight.terms(document.fragment).up
        own = self.own.get((document.fragment, document.round))
        begin, end = pieces.span(up)
        if own is not None and update_digest(own.header) == entry.digest:
            return own.header, own.body[begin:end]
        try:
            header, body = self._head(document, entry)
            if header is None or update_digest(header) != entry.digest:
                return None, body
            if len(body) == header.body_bytes:
                return header, body[begin:end]
            return header, self._range(document, entry, header, begin, end)
        except NoSuchObject:
            return None

    def _head(
        self, document: RosterDocument, entry: RosterEntry
    ) -> tuple[Header | None, np.ndarray]:
        """Return what is known of an update, or its beginning; None if it is none."""
        life = IncarnationKey(keys.slug(entry.island), entry.incarnation)
        seen = self._lookout.seen_update(document.fragment, document.round, life)
        # A body that came along was not verified then: a copy may have come since.
        is_damaged = (document.fragment, document.round) in self._damage
        if seen is not None and not is_damaged:
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
        life = IncarnationKey(keys.slug(entry.island), entry.incarnation)
        key = f"{keys.updates(document.fragment, document.round)}{life}"
        first = _head_bytes(header)
        data = self._store.get(key, first + begin, end - begin)
        return np.frombuffer(data, np.uint8)

    def _key(self, document: RosterDocument, island: str) -> str:
        entry = document.roster.entry(island)
        assert entry is not None
        where = (document.fragment, document.round)
        return keys.update(*where, island, entry.incarnation)

    def _tell_damage(self, document: RosterDocument, damaged: tuple[str, ...]) -> None:
        """Name what is gone or does not verify, once."""
        objects = [self._key(document, island) for island in damaged]
        fact = (
            f"{', '.join(objects)} {'is' if len(objects) == 1 else 'are'} gone or "
            f"damaged since round {document.round} of fragment {document.fragment} "
            "was closed with it"
        )
        self._damage[document.fragment, document.round] = fact
        self._lookout.tell(f"{fact}; another copy is looked for.")

    def is_damaged(self, fragment: int, round: int) -> bool:
        """Return whether an update of a round was found gone or damaged."""
        return (fragment, round) in self._damage

    def unmade(self, fragment: int, round: int) -> CorruptError:
        """Return the error for a round of which neither mean nor state can be had."""
        fact = self._damage.get(
            (fragment, round),
            f"All below {keys.updates(fragment, round)} is gone from the bucket",
        )
        return CorruptError(
            f"{fact}, and no state that can be read has that round. {RESTORE} While "
            "islands train, their next state has it, too."
        )

    def _require_uncovered(
        self, document: RosterDocument, damaged: tuple[str, ...]
    ) -> None:
        """Return if no state has the round.

        Raises:
            NoSuchObject: one has, and is to be taken instead.
        """
        states = self._objects.rounds(document.fragment)
        last = self._lookout.sight.number(document.fragment) - 1
        if any(document.round <= round <= last for round in states):
            key = self._key(document, damaged[0])
            raise NoSuchObject(f"{key} is gone, and a state has its round.", key=key)

    def _require_hope(
        self, document: RosterDocument, damaged: tuple[str, ...], waited_s: float
    ) -> None:
        """Return while a live island may have another copy.

        Raises:
            CorruptError: no live island can have a copy, or the wait timed out.
        """
        patience_s = self._lookout.sight.lease_s
        if self.island is None:
            # An observer writes no document, so no island sees its request.
            patience_s = 0.0
        elif self._helpers(document, damaged):
            patience_s = LONGEST_REPAIR_S
        if waited_s >= patience_s:
            raise self.unmade(document.fragment, document.round)

    def _helpers(self, document: RosterDocument, damaged: tuple[str, ...]) -> list[str]:
        """Return the live islands that may have an update's bytes, or its round."""
        lives = {
            island: entry.incarnation
            for island in damaged
            if (entry := document.roster.entry(island)) is not None
        }
        with self._lookout.lock:
            live = self._lookout.sight.live(self._timing.now_s())
            known = self._lookout.sight.documents
            return [
                name
                for name in sorted(set(live) - {self.island or ""})
                if lives.get(name) == known[name].beat.incarnation
                or _holds(known[name], document.fragment, document.round)
            ]

    def _want(
        self,
        document: RosterDocument,
        damaged: tuple[str, ...],
        before: tuple[Want, ...],
    ) -> tuple[Want, ...]:
        """Let the member document ask for copies; return what it asks for."""
        wants = []
        for island in damaged:
            entry = document.roster.entry(island)
            assert entry is not None
            wants.append(
                Want(
                    fragment=document.fragment,
                    round=document.round,
                    island=island,
                    incarnation=entry.incarnation,
                )
            )
        with self._lock:
            for want in before:
                self._wants.pop(want, None)
            self._wants.update(dict.fromkeys(wants))
        return tuple(wants)

    def wants(self) -> tuple[Want, ...]:
        """Return the updates that this island needs another copy of."""
        with self._lock:
            return tuple(self._wants)[:MAX_WANTS]

    def repair(self) -> None:
        """Put again what others ask for, as far as it is in memory. Safe to repeat."""
        with self._lookout.lock:
            documents = dict(self._lookout.sight.documents)
            live = set(self._lookout.sight.live(self._timing.now_s()))
        live.discard(self.island or "")
        for name in sorted(live):
            for want in documents[name].wants:
                last_s = self._repaired_s.get(want)
                now_s = self._timing.now_s()
                if last_s is None or now_s - last_s > self._lookout.sight.lease_s:
                    self._repair(want)
        for fragment, (document, _) in list(self._made.items()):
            if all(_holds(documents[name], fragment, document.round) for name in live):
                self._made.pop(fragment, None)

    def _repair(self, want: Want) -> None:
        where = (want.fragment, want.round)
        own, made = self.own.get(where), self._made.get(want.fragment)
        if own is not None and own.header.island == want.island:
            body = own.body.copy()
            if self.own.get(where) is not own:
                return  # its bytes may have been overwritten meanwhile
            key = keys.update(*where, want.island, want.incarnation)
            if own.header.incarnation == want.incarnation:
                self._store.put(key, [pack(own.header), body.data])
                self._note_repair(want, key)
        elif made is not None and made[0].round == want.round:
            key = keys.mean(want.fragment, want.round, 0)
            self._store.put(key, means.packed_mean(made[1], key))
            self._note_repair(want, key)
        else:
            self.states_wanted.add(want.fragment)

    def _note_repair(self, want: Want, key: str) -> None:
        self._repaired_s[want] = self._timing.now_s()
        self._lookout.tell(
            f"The update of {want.island!r} for round {want.round} of fragment "
            f"{want.fragment} was gone or damaged in the bucket: {key} is put there "
            "from this island's memory."
        )


def _holds(document: MemberDocument, fragment: int, round: int) -> bool:
    """Return whether an island says that it has taken a round."""
    holds = document.beat.holds
    return fragment < len(holds) and holds[fragment].round >= round


def _head_bytes(header: Header) -> int:
    """Return how many bytes of an update's object come before its body."""
    return frame_bytes(header) - header.body_bytes
