"""One incarnation of an island in a bucket: join, heartbeat, leave.

It takes a slot, reads the uncounted updates of its earlier incarnations, and writes its
member document again with each heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from atoll.errors import (
    AtollError,
    CorruptError,
    LeaseLost,
    NoSuchObject,
    RunMoved,
    Unreachable,
    UsageError,
)
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    MemberDocument,
    SlotDocument,
    Stand,
    Want,
    fetch,
    packed,
)
from atoll.exchange.bucket.keys import IncarnationKey, incarnation_of
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.round_closer import LateUpdates
from atoll.exchange.bucket.states import States
from atoll.protocol import Heartbeat, JoinRequest, Position, Stats
from atoll.protocol.membership import Member
from atoll.wire import blake3_digest
from atoll.wire.roster import new_name_fault

WATCH_S = 1.0
"""Between two looks at a document that may be somebody's."""

_MOST_SLOTS = 65_536


class MemberEntry:
    """Takes one island into a run; `member` is its document afterwards."""

    def __init__(
        self, lookout: BucketReader, states: States, *, key: bytes, nonce: bytes
    ) -> None:
        self._lookout, self._states = lookout, states
        self._store, self._timing = lookout.store, lookout.timing
        self._earlier = EarlierIncarnations(lookout)
        self._key, self._nonce = blake3_digest(key), nonce
        self._returns = False

    def enter(self, request: JoinRequest) -> MemberDocument:
        """Put the document of the island's next life, and return it.

        Raises:
            ModelError: the island's model is not the run's.
            UsageError: the name is taken by a live island, or the run is full.
            LeaseLost: a life that came along with the run has a successor here.
        """
        name, self._returns = request.island, request.returns
        if name is not None and (fault := new_name_fault(name, field="island")):
            raise UsageError(f"{fault}. Give this island another name.")
        request.require_bundle(self._lookout.sight.settings)
        if self._lookout.look_founding():
            assert self._lookout.founded is not None
            request.model.require_same(self._lookout.founded.model)
            for fragment in range(len(self._lookout.sight.layout)):
                self._states.begin(fragment)
        self._lookout.look_members()
        if name is not None and request.incarnation is not None:
            return self._go_on(name, request.incarnation)
        document = self._take_name(name)
        self._require_room(document)
        return document

    def _go_on(self, island: str, incarnation: int) -> MemberDocument:
        """Put the document of a life that has come here with its run."""
        known = self._lookout.sight.documents.get(island)
        is_its = known is not None and (
            (known.beat.incarnation, known.key, known.nonce, known.has_left)
            == (incarnation, self._key, self._nonce, False)
        )
        if known is None or not is_its:
            raise LeaseLost(
                f"Incarnation {incarnation} of island {island!r} has no place in the "
                "run any more: it has left, or a later life has its name. "
                "Join again to go on."
            )
        document = replace(known, beats=known.beats + 1)
        key = keys.member(island, incarnation)
        self._store.put(key, packed(documents.MEMBER, document, key))
        with self._lookout.lock:
            self._lookout.known_members.see(document, self._timing.now_s())
        return document

    def _take_name(self, name: str | None) -> MemberDocument:
        island, slot = self._slot(name)
        least = 1
        while True:
            document = self._next_life(island, slot, least)
            key = keys.member(island, document.beat.incarnation)
            if self._store.put_new(key, packed(documents.MEMBER, document, key)):
                with self._lookout.lock:
                    self._lookout.known_members.see(document, self._timing.now_s())
                return document
            # Somebody has this life, whom a list may not show yet; or at its key is
            # something else, and the next one is free.
            least = document.beat.incarnation + 1
            self._lookout.members.look_life(
                IncarnationKey(keys.slug(island), least - 1)
            )
            self._lookout.look_members()
            if island in self._lookout.sight.documents:
                before = island
                island, slot = self._slot(name)
                least = least if island == before else 1

    def _slot(self, name: str | None) -> tuple[str, int]:
        """Return a name and its slot; without one, a name that nobody has had."""
        known = self._lookout.sight.documents
        if name is not None and name in known:
            return name, known[name].slot
        taken = {document.slot for document in known.values()}
        for number in range(_MOST_SLOTS):
            island = name if name is not None else f"island-{number}"
            if number in taken or (name is None and island in known):
                continue
            if self._has_taken(number, island):
                return island, number
        raise UsageError(
            f"The run has had {_MOST_SLOTS} islands of other names. Use those again."
        )

    def _has_taken(self, number: int, island: str) -> bool:
        """Return whether a slot is this island's from now on."""
        key, said = (
            keys.slot(number),
            SlotDocument(run=self._lookout.run, island=island),
        )
        if not self._store.put_new(key, packed(documents.SLOT, said, key)):
            return False
        if self._store.traits.has_put_new:
            return True
        # Here the last one stays: two that come together see the same one stay.
        self._timing.pause(WATCH_S)
        return fetch(self._store, documents.SLOT, key) == said

    def _next_life(self, island: str, slot: int, least: int) -> MemberDocument:
        before = self._lookout.sight.state.members.known.get(island)
        if before is not None and before.key != self._key and not before.has_left:
            self._require_silent(before)
        incarnation = max(least, before.incarnation + 1 if before else 1)
        if before is not None and before.has_left:
            self._earlier.bring()
        # Rounds have waited for one that goes on from a checkpoint.
        opened = () if before is not None and self._returns else self._opened()
        stands = self._earlier.stands(island, incarnation)
        step = self._lookout.sight.position(self._timing.now_s()).step
        return MemberDocument(
            run=self._lookout.run,
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
        sight = self._lookout.sight
        rounds = tuple(round.number for round in sight.state.rounds)
        return rounds if sight.has_begun else ()

    def _require_silent(self, before: Member) -> None:
        """Return if the document of another's life does not change for a lease."""
        document = self._lookout.sight.documents[before.island]

        def has_changed() -> bool:
            return self._lookout.sight.documents[before.island] != document

        if self._watch(has_changed) and not self._has_left(before.island):
            raise UsageError(
                f"Island {before.island!r} is live in this run, and this is not its "
                "key. Give this island another name, or its key, or let that one leave."
            )

    def _has_left(self, island: str) -> bool:
        return self._lookout.sight.documents[island].has_left

    def _require_room(self, document: MemberDocument) -> None:
        sight = self._lookout.sight
        limit = sight.settings.run.most_islands
        if sight.settings.run.max_islands is None:
            limit = max(limit, len(sight.state.counted.by_island))
        watched = dict(self._lookout.sight.documents)

        def others() -> set[str]:
            """Return who is before this island, and has not been seen to be silent."""
            now = self._lookout.sight
            live = set(now.live(self._timing.now_s())) - {document.beat.island}
            return {name for name in live if now.documents[name].slot < document.slot}

        def is_sure() -> bool:
            known = self._lookout.sight.documents
            seen = {name for name in others() if known[name] != watched.get(name)}
            return len(seen) >= limit or len(others()) < limit

        self._watch(is_sure)
        if len(others()) >= limit:
            self._withdraw(document)
            raise UsageError(
                f"The run has {len(others())} islands, and max_islands={limit}. "
                "Wait for one to leave."
            )

    def _withdraw(self, document: MemberDocument) -> None:
        gone = replace(document, beats=document.beats + 1, has_left=True)
        key = keys.member(document.beat.island, document.beat.incarnation)
        self._store.put(key, packed(documents.MEMBER, gone, key))

    def _watch(self, has_come: Callable[[], bool]) -> bool:
        """Look at members until something has come, for a lease at most."""
        until_s = self._timing.now_s() + self._lookout.sight.lease_s
        while not has_come():
            if self._timing.now_s() > until_s:
                return False
            self._timing.pause(WATCH_S)
            self._lookout.look_members()
        return True

    def is_founder(self, document: MemberDocument) -> bool:
        """Return whether this member is to found the run; wait for another if not."""
        while not self._lookout.look_founding():
            self._lookout.look_members()
            live = self._lookout.sight.live(self._timing.now_s())
            known = self._lookout.sight.documents
            if all(known[name].slot >= document.slot for name in live):
                return True
            self._timing.pause(WATCH_S)
        return False


class EarlierIncarnations:
    """Finds what they have published and no round has counted yet."""

    def __init__(self, lookout: BucketReader) -> None:
        self._lookout, self._leftovers = lookout, LateUpdates(lookout)
        self._store, self._timing = lookout.store, lookout.timing

    def bring(self) -> None:
        """Put what farewells name, and closed rounds have left out, into open ones.

        Once the next life has entered nobody may: it is the only one that is believed.
        """
        for fragment in range(len(self._lookout.sight.layout)):
            self._leftovers.bring(fragment)

    def stands(self, island: str, incarnation: int) -> tuple[Stand, ...]:
        """Return the updates of earlier lives for the open rounds, and those after.

        Of several the latest: it was put by a life that did not name the others.
        """
        if incarnation == 1:
            return ()
        wheres = [
            (round.fragment, number)
            for round in self._lookout.sight.state.rounds
            for number in (round.number, round.number + 1)
        ]
        finds = [partial(self._standing, *each, island, incarnation) for each in wheres]
        return tuple(
            Stand(fragment=fragment, round=number, incarnation=found)
            for (fragment, number), found in zip(
                wheres, self._timing.together(finds), strict=True
            )
            if found
        )

    def _standing(
        self, fragment: int, round: int, island: str, incarnation: int
    ) -> int:
        """Return which earlier life has published for a round; 0: none has.

        The last one's update is asked for by its key, because a list may be late.
        What cannot be read as an update speaks for nobody.
        """
        slug, has_update = keys.slug(island), self._lookout.updates.has
        if has_update(fragment, round, IncarnationKey(slug, incarnation - 1)):
            return incarnation - 1
        items = self._store.items(keys.updates(fragment, round))
        lives = [life for item in items if (life := incarnation_of(item.key))]
        return max(
            [
                life.incarnation
                for life in lives
                if life.slug == slug
                and life.incarnation < incarnation
                and has_update(fragment, round, life)
            ],
            default=0,
        )


_FAREWELL_LOOKS, _FAREWELL_S = 40, 0.05
"""How long a farewell waits for a heartbeat that is under way."""

log = logging.getLogger("atoll")


class MemberLease:
    """Keeps a member's document, and what its heartbeats have read of the others."""

    def __init__(self, lookout: BucketReader) -> None:
        self.lookout = lookout
        self._store, self._timing = lookout.store, lookout.timing
        self.stats: Callable[[], Stats] | None = None
        """What people are told of the island, asked for when it is sent."""

        self.moved: Callable[[RunMoved], None] | None = None
        """Told in the background that the run is elsewhere, for who follows it."""

        self.wants: Callable[[], tuple[Want, ...]] = tuple
        """Which updates this island needs another copy of, asked for likewise."""

        self.member: MemberDocument | None = None
        self.position = Position(step=0, rounds=())
        """Where the run was when this island last looked."""

        self._lost: LeaseLost | None = None
        self._is_beating = False

    @property
    def island(self) -> str | None:
        return self.member.beat.island if self.member else None

    def require(self) -> MemberDocument:
        """Return the document of a life that goes on.

        Raises:
            LeaseLost: a later life has the name, or this one has left.
        """
        if self._lost is not None:
            raise self._lost
        member = self.member
        assert member is not None
        if member.has_left:
            raise LeaseLost(
                f"Incarnation {member.beat.incarnation} of island "
                f"{member.beat.island!r} has left the run. Join again to go on."
            )
        return member

    def note(self, beat: Heartbeat) -> None:
        """Take note of where this island is, and of what it holds."""
        with self.lookout.lock:
            self.member = member = replace(self.require(), beat=beat)
            if beat.waits_for is not None:
                now_s = self._timing.now_s()
                self.lookout.known_members.see(member, now_s)
            for fragment, held in enumerate(beat.holds):
                self.lookout.known_bases.see_held(fragment, held)

    def look(self) -> Position:
        """Return where the run is, by what was read so far."""
        with self.lookout.lock:
            now_s = self._timing.now_s()
            self.position = self.lookout.sight.position(now_s, island=self.island)
        return self.position

    def beat_quietly(self) -> None:
        """Beat in the background."""
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
        except Exception:  # a life that says nothing any more would be given up
            log.exception("heartbeats fail")

    def beat(self) -> None:
        """Say that the island lives, and read what others and operators have said.

        Raises:
            LeaseLost: a later life has the name.
            RunMoved: the run is elsewhere.
        """
        member = self.member
        if member is None or member.has_left:
            return
        self.lookout.require_here()
        stats = self.stats() if self.stats is not None else member.beat.stats
        with self.lookout.lock:
            member = self.require()
            self.member = member = replace(
                member, beats=member.beats + 1, beat=replace(member.beat, stats=stats)
            )
        self._put_beat(member)
        self._read_others(member)
        self.lookout.require_here()
        with self.lookout.lock:
            self.lookout.sight.state.members.require(
                member.beat.island, member.beat.incarnation
            )
        self.look()

    def _read_others(self, member: MemberDocument) -> None:
        with suppress(NoSuchObject):
            self.lookout.heed_controls()
            self.lookout.look_members()
            waits_for = member.beat.waits_for
            if waits_for is not None:
                # Whether everybody waits is told by the others' open rounds: if so,
                # nobody moves until somebody is asked to. Its own is looked at by who
                # waits for it: to look twice at once would read all that is new twice.
                for round in self.lookout.sight.state.rounds:
                    if round.fragment != waits_for[0]:
                        self.lookout.look_round(round.fragment)

    def leave(self, left_behind: Callable[[MemberDocument], tuple[Stand, ...]]) -> bool:
        """Say farewell, with what is left behind; False: that was said before."""
        with self.lookout.lock:
            member = self.member
            if member is None or member.has_left:
                return False
            self.member = gone = replace(
                member,
                beats=member.beats + 1,
                has_left=True,
                beat=replace(member.beat, stats=self.stats() if self.stats else None),
                stands=left_behind(member),
            )
        for _ in range(_FAREWELL_LOOKS):
            if not self._is_beating:
                break
            self._timing.pause(_FAREWELL_S)  # a heartbeat would undo it
        self._put(gone)
        with self.lookout.lock:
            self.lookout.known_members.see(gone, self._timing.now_s())
        return True

    def _put_beat(self, member: MemberDocument) -> None:
        """Put a heartbeat; if the island has left meanwhile, its farewell again."""
        self._is_beating = True
        try:
            self._put(member)
            latest = self.member
            if latest is not None and latest.has_left:
                self._put(latest)
        finally:
            self._is_beating = False

    def _put(self, member: MemberDocument) -> None:
        key = keys.member(member.beat.island, member.beat.incarnation)
        with self.lookout.lock:
            sight = self.lookout.sight
            heads = tuple(head for _, head in sorted(sight.heads.items()))
            controls = len(sight.controls)
        said = replace(member, heads=heads, controls=controls, wants=self.wants())
        self._store.put(key, packed(documents.MEMBER, said, key))
