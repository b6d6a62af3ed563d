"""The outcome of a round that is closed: read from the bucket, or made from updates.

The owner of a shard puts its mean. A mean that is missing after a while is made by the
islands that wait for it, each in its turn, so that usually only one of them does.

A counted update that is gone or does not verify is damage, and its values are never
guessed: a reader uses the mean or a later state instead, if one exists. Otherwise it
requests another copy in its member document, and waits. The update's owner keeps its
bytes until it knows the outcome, and puts them again; an island that knows the outcome
of a round without shards puts the mean. A copy must have the digests that the roster
and the mean name, so it needs no trust.
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
from atoll.exchange.bucket.keys import UpdateKey
from atoll.exchange.bucket.large_objects import StateObjects
from atoll.exchange.bucket.means import Mean, Pieces, Unverified
from atoll.exchange.bucket.reader import BucketReader
from atoll.wire import Header, RosterEntry, frame_bytes, pack, update_digest

GRACE_S = 4.0
"""How long the owner of a shard may take before the next island makes it."""

FIRST_PAUSE_S, GROWTH, LONGEST_PAUSE_S = 0.05, 1.5, 1.0

REPAIR_PAUSE_S = 2.0
"""Between two attempts to read another copy of a damaged update."""

LONGEST_REPAIR_S = 900.0
"""How long to wait for another copy while a live island may have one."""


class Outcomes:
    """Finds and makes the agreed frames of closed rounds, for an island or observer."""

    def __init__(self, reader: BucketReader, island: str | None) -> None:
        self._reader, self.island = reader, island
        self._store, self._runtime = reader.store, reader.runtime
        self.own_updates: dict[tuple[int, int], Frame] = {}
        """Updates of this island whose bodies are still in memory."""

        self._objects = StateObjects(reader)
        self._last_means: dict[int, tuple[RosterDocument, Mean]] = {}
        """By fragment, the mean of the last round without shards, until every live
        island has applied it."""

        self._wants: dict[Want, None] = {}
        self._damage: dict[tuple[int, int], str] = {}
        """By fragment and round, the damage of its updates."""

        self.states_wanted: set[int] = set()
        """Fragments of which an island lacks a round that only a state can give."""

        self._repaired_s: dict[Want, float] = {}
        self._lock = threading.Lock()

    def frame(self, fragment: int, round: int) -> Frame:
        """Return the agreed frame of a closed round; without a body if that is gone."""
        document = self._document(fragment, round)
        view = self._reader.view
        layout, down = view.layout[fragment], view.terms(fragment).down
        try:
            header, body = means.agreed(document, self._means(document), layout, down)
        except NoSuchObject:  # a later state has all of it
            roster = document.roster
            return Frame(
                means.header_of(document, roster, layout, down), np.empty(0, np.uint8)
            )
        return Frame(header, body)

    def confirm(self, agreed: Header) -> None:
        """Forget the bytes of own updates whose outcome the island knows now.

        In an asynchronous run that is the outcome of the round that lists an update.
        """
        fragment = agreed.fragment
        if not self._reader.view.is_async:
            self.own_updates.pop((fragment, agreed.round), None)
            return
        assert agreed.roster is not None
        entry = agreed.roster.entry(self.island or "")
        if entry is not None:
            self.own_updates.pop((fragment, agreed.round - entry.age), None)

    def _document(self, fragment: int, round: int) -> RosterDocument:
        try:
            return self._reader.closed_roster(fragment, round)
        except NoSuchObject as exc:  # only the last rosters move with a run
            raise OutcomeLost(
                f"Round {round} of fragment {fragment} was over before the run moved "
                "here, and its outcome did not come along. Take the fragment's state."
            ) from exc

    def _means(self, document: RosterDocument) -> list[Mean]:
        if not document.roster.counted:
            return []
        layout = self._reader.view.layout[document.fragment]
        parts = means.shards(document, layout.elements)
        if not document.shards:
            mean = self._make(document, 0, parts[0])
            if self.island is not None:
                self._last_means[document.fragment] = document, mean
            return [mean]
        return self._gather(document, parts)

    def _gather(self, document: RosterDocument, parts: list[Pieces]) -> list[Mean]:
        """Return the means of all shards; make those that are this island's to make."""
        gathered: dict[int, Mean] = {}
        foreign: set[int] = set()
        begun_s, paused_s, pause_s = self._runtime.now_s(), 0.0, FIRST_PAUSE_S
        while True:
            waited_s = max(self._runtime.now_s() - begun_s, paused_s)
            # The closer of the next round has applied this one: its means exist, or
            # were collected since.
            is_past = self._reader.view.number(document.fragment) > document.round + 1
            for shard, pieces in enumerate(parts):
                is_due = self._turn(document, shard) * GRACE_S <= waited_s
                if shard not in gathered and (is_due or is_past or shard in foreign):
                    gathered[shard] = self._provide(document, shard, pieces)
            is_again = paused_s > 0.0
            foreign |= self._read_missing(document, parts, gathered, is_again=is_again)
            if len(gathered) == len(parts):
                return [gathered[shard] for shard in range(len(parts))]
            if foreign - gathered.keys():
                continue
            self._runtime.sleep(pause_s)
            paused_s += pause_s
            pause_s = min(GROWTH * pause_s, LONGEST_PAUSE_S)

    def _turn(self, document: RosterDocument, shard: int) -> int:
        """Return this island's turn to make a shard: 0 for its owner, then 1, 2, ..."""
        owners = document.shards
        if self.island not in owners:
            return len(owners)
        return (owners.index(self.island) - shard) % len(owners)

    def _provide(self, document: RosterDocument, shard: int, pieces: Pieces) -> Mean:
        """Return the mean of a shard, and put it for the other islands."""
        if self._turn(document, shard):
            existing, _ = self._read(document, shard, pieces)
            if existing is not None:
                return existing
        mean = self._make(document, shard, pieces)
        key = keys.mean(document.fragment, document.round, shard)
        if self.island is not None:
            self._store.put_new(key, means.packed_mean(mean, key))
        return mean

    def _read_missing(
        self,
        document: RosterDocument,
        parts: list[Pieces],
        gathered: dict[int, Mean],
        *,
        is_again: bool,
    ) -> set[int]:
        """Read the missing means that exist; return the shards with foreign objects.

        A repeated poll reads one mean, and the others once that exists: means are put
        at about the same time, and each poll of a missing one is a request.
        """
        missing = [shard for shard in range(len(parts)) if shard not in gathered]
        first = 1 if is_again else len(missing)
        foreign = self._read_all(document, parts, missing[:first], gathered)
        if gathered.keys() >= set(missing[:first]):
            foreign |= self._read_all(document, parts, missing[first:], gathered)
        return foreign

    def _read_all(
        self,
        document: RosterDocument,
        parts: list[Pieces],
        wanted: list[int],
        gathered: dict[int, Mean],
    ) -> set[int]:
        """Read these shards concurrently, as far as they exist."""
        reads = [partial(self._read, document, shard, parts[shard]) for shard in wanted]
        foreign = set()
        for shard, read in zip(wanted, self._runtime.gather(reads), strict=True):
            mean, is_foreign = read
            if mean is not None:
                gathered[shard] = mean
            if is_foreign:
                foreign.add(shard)
        return foreign

    def _read(
        self, document: RosterDocument, shard: int, pieces: Pieces
    ) -> tuple[Mean | None, bool]:
        """Return a mean if it exists, and whether the object is foreign."""
        key = keys.mean(document.fragment, document.round, shard)
        down = self._reader.view.terms(document.fragment).down
        try:
            data = self._store.get(key, 0, means.max_bytes(document, pieces, down))
        except NoSuchObject:
            return None, False
        try:
            mean = means.parse_mean(data, document, shard, pieces, down, key=key)
            return mean, False
        except CorruptError:
            # Foreign bytes cannot be replaced. Any island can make the mean, but not in
            # this thread of the pool: reads that wait for reads could take them all.
            return None, True

    def _make(self, document: RosterDocument, shard: int, pieces: Pieces) -> Mean:
        """Return the mean of a shard, made of the updates that the roster lists.

        Raises:
            NoSuchObject: they are gone or damaged, and a later state has the round.
            CorruptError: they are gone or damaged, and no island has another copy.
        """
        wants: tuple[Want, ...] = ()
        begun_s, paused_s = self._runtime.now_s(), 0.0
        try:
            while True:
                try:
                    return self._reduce(document, shard, pieces)
                except Unverified as exc:
                    damaged = exc.islands
                self._warn_of_damage(document, damaged)
                if (mean := self._read(document, shard, pieces)[0]) is not None:
                    return mean
                self._require_uncovered(document, damaged)
                waited_s = max(self._runtime.now_s() - begun_s, paused_s)
                self._require_hope(document, damaged, waited_s)
                wants = self._want(document, damaged, wants)
                self._runtime.sleep(REPAIR_PAUSE_S)
                paused_s += REPAIR_PAUSE_S
        finally:
            self._want(document, (), wants)

    def _reduce(self, document: RosterDocument, shard: int, pieces: Pieces) -> Mean:
        """Return the mean of a shard.

        Raises:
            Unverified: some updates are not what the roster lists.
            NoSuchObject: they have been removed, because a later state has the round.
        """
        view, counted = self._reader.view, document.roster.counted
        reads = [partial(self._part, document, entry, pieces) for entry in counted]
        parts = dict(
            zip(
                [entry.island for entry in counted],
                self._runtime.gather(reads),
                strict=True,
            )
        )
        missing = tuple(island for island, part in parts.items() if not part)
        if missing:
            self._require_uncovered(document, missing)
        empty = (None, np.empty(0, np.uint8))
        updates: dict[str, tuple[Header | None, np.ndarray]] = {
            island: part or empty for island, part in parts.items()
        }
        layout = view.layout[document.fragment]
        terms = view.terms(document.fragment)
        return means.mean_of(document, shard, pieces, updates, layout, terms)

    def _part(
        self, document: RosterDocument, entry: RosterEntry, pieces: Pieces
    ) -> tuple[Header | None, np.ndarray] | None:
        """Return the header of a counted update, and the bytes of some pieces.

        None: there is no object at its key.
        """
        up = self._reader.view.terms(document.fragment).up
        update = self.own_updates.get((document.fragment, document.round - entry.age))
        begin, end = pieces.span(up)
        if update is not None and update_digest(update.header) == entry.digest:
            return update.header, update.body[begin:end]
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
        """Return an update's header, or None, and its body if that was read."""
        name = _name_of(document, entry)
        cached = self._reader.updates.cached(document.fragment, name)
        # A cached body was not verified: a good copy may have been put since.
        is_damaged = (document.fragment, document.round) in self._damage
        if cached is not None and not is_damaged:
            return cached
        key = self._reader.view.key_of(document.fragment, name)
        try:
            return self._reader.updates.read(key, 2**62)
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
        key = self._reader.view.key_of(document.fragment, _name_of(document, entry))
        first = _head_bytes(header)
        data = self._store.get(key, first + begin, end - begin)
        return np.frombuffer(data, np.uint8)

    def _key(self, document: RosterDocument, island: str) -> str:
        entry = document.roster.entry(island)
        assert entry is not None
        return self._reader.view.key_of(document.fragment, _name_of(document, entry))

    def _warn_of_damage(
        self, document: RosterDocument, damaged: tuple[str, ...]
    ) -> None:
        """Record and log the updates that are gone or do not verify."""
        objects = [self._key(document, island) for island in damaged]
        fact = (
            f"{', '.join(objects)} {'is' if len(objects) == 1 else 'are'} gone or "
            f"damaged since round {document.round} of fragment {document.fragment} "
            "was closed with it"
        )
        self._damage[document.fragment, document.round] = fact
        self._reader.warn_once(f"{fact}; waiting for another copy.")

    def is_damaged(self, fragment: int, round: int) -> bool:
        """Return whether an update of a round was found gone or damaged."""
        return (fragment, round) in self._damage

    def unmade(self, fragment: int, round: int) -> CorruptError:
        """Return the error for a round of which neither mean nor state is available."""
        fact = self._damage.get(
            (fragment, round),
            f"Updates of round {round} of fragment {fragment} are gone from the bucket",
        )
        return CorruptError(
            f"{fact}, and no state that can be read has that round. {RESTORE} While "
            "islands train, their next state will contain it."
        )

    def _require_uncovered(
        self, document: RosterDocument, damaged: tuple[str, ...]
    ) -> None:
        """Return if no state has the round.

        Raises:
            NoSuchObject: one has it, and is to be used instead.
        """
        # An island that stood still may have read only the rosters before that state.
        self._reader.read_rosters(document.fragment)
        states = self._objects.rounds(document.fragment)
        last = self._reader.view.number(document.fragment) - 1
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
        patience_s = self._reader.view.lease_s
        if self.island is None:
            # An observer writes no document, so no island sees its request.
            patience_s = 0.0
        elif self._helpers(document, damaged):
            patience_s = LONGEST_REPAIR_S
        if waited_s >= patience_s:
            raise self.unmade(document.fragment, document.round)

    def _helpers(self, document: RosterDocument, damaged: tuple[str, ...]) -> list[str]:
        """Return the live islands that may have an update's bytes, or its round."""
        incarnations = {
            island: entry.incarnation
            for island in damaged
            if (entry := document.roster.entry(island)) is not None
        }
        with self._reader.lock:
            live = self._reader.view.live(self._runtime.now_s())
            members = self._reader.view.documents
            return [
                name
                for name in sorted(set(live) - {self.island or ""})
                if incarnations.get(name) == members[name].beat.incarnation
                or _holds(members[name], document.fragment, document.round)
            ]

    def _want(
        self,
        document: RosterDocument,
        damaged: tuple[str, ...],
        before: tuple[Want, ...],
    ) -> tuple[Want, ...]:
        """Request copies in the member document; return the requests."""
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
                    age=entry.age,
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
        """Put copies that other islands request, if they are in memory. Repeatable."""
        with self._reader.lock:
            documents = dict(self._reader.view.documents)
            live = set(self._reader.view.live(self._runtime.now_s()))
        live.discard(self.island or "")
        for name in sorted(live):
            for want in documents[name].wants:
                last_s = self._repaired_s.get(want)
                now_s = self._runtime.now_s()
                if last_s is None or now_s - last_s > self._reader.view.lease_s:
                    self._repair(want)
        for fragment, (document, _) in list(self._last_means.items()):
            if all(_holds(documents[name], fragment, document.round) for name in live):
                self._last_means.pop(fragment, None)

    def _repair(self, want: Want) -> None:
        fragment, round = want.fragment, want.round
        update = self.own_updates.get((fragment, want.label))
        last_mean = self._last_means.get(fragment)
        if update is not None and update.header.island == want.island:
            body = update.body.copy()
            if self.own_updates.get((fragment, want.label)) is not update:
                return  # its buffer may have been overwritten during the copy
            name = UpdateKey.of(want.label, want.island, want.incarnation)
            key = self._reader.view.key_of(fragment, name)
            if update.header.incarnation == want.incarnation:
                self._store.put(key, [pack(update.header), body.data])
                self._note_repair(want, key)
        elif last_mean is not None and last_mean[0].round == round:
            key = keys.mean(fragment, round, 0)
            self._store.put(key, means.packed_mean(last_mean[1], key))
            self._note_repair(want, key)
        else:
            self.states_wanted.add(fragment)

    def _note_repair(self, want: Want, key: str) -> None:
        self._repaired_s[want] = self._runtime.now_s()
        self._reader.warn_once(
            f"The update of {want.island!r} for round {want.round} of fragment "
            f"{want.fragment} was gone or damaged in the bucket: {key} is put there "
            "from this island's memory."
        )


def _name_of(document: RosterDocument, entry: RosterEntry) -> UpdateKey:
    """Return the update of an entry, as it is written in keys."""
    round = document.round - entry.age
    return UpdateKey.of(round, entry.island, entry.incarnation)


def _holds(document: MemberDocument, fragment: int, round: int) -> bool:
    """Return whether an island's document says that it has applied a round."""
    holds = document.beat.holds
    return fragment < len(holds) and holds[fragment].round >= round


def _head_bytes(header: Header) -> int:
    """Return how many bytes of an update's object come before its body."""
    return frame_bytes(header) - header.body_bytes
