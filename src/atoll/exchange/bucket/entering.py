"""How an island becomes a member of a run in a bucket.

Rule 1: a life is a key that is put once. Who holds the key of a name takes its next
        incarnation at once; anybody else watches for a lease, and takes it only if its
        document does not change meanwhile.
Rule 2: the member with the lowest slot that is live founds the run; others wait.
Rule 3: what earlier lives have published for rounds that are open stands: the new life
        names it, so that everybody counts it or nobody does. What a farewell names and
        a closed round has left out is put into the open one before.
Rule 4: a life that came here with its run goes on under the key that the move has put.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll.errors import LeaseLost, UsageError
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import (
    MemberDocument,
    SlotDocument,
    fetch,
    packed,
)
from atoll.exchange.bucket.earlier import EarlierLives
from atoll.exchange.bucket.keys import Life
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.states import States
from atoll.protocol import Beat, JoinRequest
from atoll.protocol.membership import Member
from atoll.wire import blake3_digest
from atoll.wire.text import new_name_fault

WATCH_S = 1.0
"""Between two looks at a document that may be somebody's."""

_MOST_SLOTS = 65_536


class Entering:
    """Takes one island into a run; `member` is its document afterwards."""

    def __init__(
        self, lookout: Lookout, states: States, *, key: bytes, nonce: bytes
    ) -> None:
        self._lookout, self._states = lookout, states
        self._store, self._timing = lookout.store, lookout.timing
        self._earlier = EarlierLives(lookout)
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
        if name is not None and (fault := new_name_fault(name, what="island")):
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
            self._lookout.members.look_life(Life(keys.slug(island), least - 1))
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
            beat=Beat(island=island, incarnation=incarnation, step=step),
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
