"""How an island closes a round in a bucket: by a roster that is put once.

Rule 1: what decides was seen within the last seconds; who stood still looks again.
Rule 2: what operators have said is read before a round is closed.
Rule 3: if islands start from several states, the run's own is made from the bucket.
Rule 4: what who has gone left in a round that was closed without it is brought along.
"""

from __future__ import annotations

import logging

from atoll.exchange.bucket import documents, keys, means
from atoll.exchange.bucket.documents import ControlDocument, RosterDocument, packed
from atoll.exchange.bucket.leftovers import Leftovers
from atoll.exchange.bucket.lookout import Lookout
from atoll.exchange.bucket.states import States
from atoll.protocol import Holding
from atoll.protocol.rounds import Round
from atoll.wire import Kind, Roster

FRESH_S = 5.0
"""A round is closed by what was seen no longer ago than this."""

log = logging.getLogger("atoll")


class Closing:
    """Looks at open rounds, and closes those that are due, as one island."""

    def __init__(self, lookout: Lookout, states: States) -> None:
        self._lookout, self._states = lookout, states
        self._store, self._timing = lookout.store, lookout.timing
        self._leftovers = Leftovers(lookout)
        self.island: str | None = None
        """Who closes; nobody only looks."""

    def settle(self, fragment: int) -> None:
        """Look at the open round of a fragment, and close it if that is due."""
        # What took long was read once: a second look is quick.
        is_fresh = self._look(fragment) or self._look(fragment)
        if not is_fresh or self._due(fragment) is None:
            return
        looked_s = self._timing.now_s()
        # A stop or a pause since the last heartbeat: others may heed it already.
        self._lookout.heed_controls()
        is_old = self._timing.now_s() - looked_s > FRESH_S
        if (self._prove_base(fragment) or is_old) and not self._look(fragment):
            return
        document = self._due(fragment)
        if document is not None:
            self._close(document)

    def _prove_base(self, fragment: int) -> bool:
        """If islands start from several states, find out which is the run's."""
        with self._lookout.lock:
            is_disputed = self._lookout.known_bases.is_disputed(fragment)
        if is_disputed:
            log.warning(
                "islands start round %d of fragment %d from several states; "
                "the run's own is made from its bucket",
                self._lookout.sight.number(fragment),
                fragment,
            )
            state = self._states.read(fragment)
            with self._lookout.lock:
                held = Holding(state.round, state.digest)
                self._lookout.known_bases.see_proven(fragment, held)
        return is_disputed

    def _due(self, fragment: int) -> RosterDocument | None:
        """Return the roster that this island may put now."""
        if self.island is None:
            return None
        with self._lookout.lock:
            if self._leftovers.unseen(fragment):
                return None  # a farewell was read since: the next look brings it
            now_s = self._timing.now_s()
            due = self._lookout.known_updates.closing(fragment, self.island, now_s)
            return self._roster_document(*due) if due else None

    def _look(self, fragment: int) -> bool:
        """Look at a round and at who is missing; False: what was seen is old by now.

        A request may be repeated for minutes, and a process may stand still: what has
        come to be there meanwhile would be left out.
        """
        begun_s = self._timing.now_s()
        self._lookout.look_round(fragment)
        if self.island is not None:
            self._lookout.members.look_missing(fragment)
            self._lookout.look_stands(fragment)
            self._leftovers.bring(fragment)
        return self._timing.now_s() - begun_s <= FRESH_S

    def _close(self, document: RosterDocument) -> None:
        """Put a roster; whoever was first has closed the round."""
        key = self._lookout.roster_key(document.fragment, document.round)
        self._store.put_new(key, packed(documents.ROSTER, document, key))
        self._lookout.follow(document.fragment)
        with self._lookout.lock:
            has_ended = self._lookout.known_updates.ended_by_tokens() is not None
        if has_ended:
            self._stop(self._lookout.furthest())

    def _roster_document(self, round: Round, roster: Roster) -> RosterDocument:
        sight = self._lookout.sight
        departing = frozenset(
            name
            for name, header in round.staged.items()
            if header.kind is Kind.DEPARTING
        )
        return RosterDocument(
            run=self._lookout.run,
            fragment=round.fragment,
            round=round.number,
            epoch=sight.state.epoch,
            base=round.base,
            outer=round.outer,
            shards=means.owners(roster, departing, sight.terms(round.fragment).merge),
            roster=roster,
            before=sight.heads[round.fragment].digest,
            controls=len(sight.controls),
        )

    def _stop(self, last_round: int) -> None:
        """Put the control that ends the run, unless it ends as early already."""
        said = ControlDocument(
            run=self._lookout.run, action="stop", values={}, last_round=last_round
        )
        self._lookout.look_controls()
        last = self._lookout.sight.state.last_round
        if last is None or last_round < last:
            key = keys.control(len(self._lookout.sight.controls) + 1)
            self._store.put_new(key, packed(documents.CONTROL, said, key))
            self._lookout.look_controls()
