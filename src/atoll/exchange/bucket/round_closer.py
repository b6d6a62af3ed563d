"""Closes rounds in a bucket, by a roster that is put once.

Rule 1: a decision uses objects that were read within the last seconds; an island that
        stood still reads again.
Rule 2: controls of operators are read before a round is closed.
Rule 3: if islands start from several states, the run's own is computed from the bucket.
Rule 4: an update of an island that has left, which its round did not list, is put into
        the open round, as the same island's departing update.

Rule 4 in detail. A roster may be written before an island publishes, and be put after
that island has left. No other island would count that work. So each island that reads
the next round puts it there: only an update that the leaving member's document names,
and that no roster since has listed. All of them put the same bytes, once. A new
incarnation of the island does this itself before it joins; after that nothing is put.

The same reads serve a run that leaves its bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atoll.errors import CorruptError, NoSuchObject, OutcomeLost
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys, means
from atoll.exchange.bucket.documents import (
    RESTORE,
    ControlDocument,
    MemberDocument,
    RosterDocument,
    Stand,
    packed,
    parse,
)
from atoll.exchange.bucket.keys import IncarnationKey
from atoll.exchange.bucket.move_in import FragmentProgress, UnclaimedUpdate
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.states import BASES, ROSTERS, States, counted_progress
from atoll.exchange.bucket.view import RunView
from atoll.protocol import HeldRound
from atoll.protocol.island import CARRIED_ROUNDS
from atoll.protocol.rounds import Round
from atoll.wire import (
    FrameKind,
    Header,
    Roster,
    Verdict,
    frame_bytes,
    header_length,
    pack,
    update_digest,
    verify_body,
)

FRESH_S = 5.0
"""A round is closed by what was seen no longer ago than this."""

log = logging.getLogger("atoll")


class RoundCloser:
    """Looks at open rounds, and closes those that are due, as one island."""

    def __init__(self, lookout: BucketReader, states: States) -> None:
        self._lookout, self._states = lookout, states
        self._store, self._timing = lookout.store, lookout.timing
        self._leftovers = LateUpdates(lookout)
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
                held = HeldRound(state.round, state.digest)
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
            if header.kind is FrameKind.DEPARTING
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


class LateUpdates:
    """Brings what was left in closed rounds into the open ones."""

    def __init__(self, lookout: BucketReader) -> None:
        self._lookout, self._store = lookout, lookout.store
        self._settled: set[tuple[str, Stand]] = set()
        self._brought: dict[tuple[str, Stand], int] = {}
        """Into which round: there it counts, or in none before the next."""

    def bring(self, fragment: int) -> None:
        """Put what the last rounds have left out into the open one. Safe to repeat."""
        with self._lookout.lock:
            number, left = self._lookout.sight.number(fragment), self.unseen(fragment)
        for island, stand in left:
            self._bring(island, stand, number)

    def unseen(self, fragment: int) -> list[tuple[str, Stand]]:
        """Return what the last rounds may have left out, and `bring` has not seen."""
        sight = self._lookout.sight
        number = sight.number(fragment)
        if sight.never_opens(number):
            return []
        return [
            each
            for each in self._lookout.known_updates.left_out(
                fragment, within=CARRIED_ROUNDS
            )
            if each not in self._settled and self._brought.get(each) != number
        ]

    def _bring(self, island: str, stand: Stand, number: int) -> None:
        try:
            header = (
                None if self._is_listed(island, stand) else self._left(island, stand)
            )
            if header is None or self._is_counted(header, number):
                self._settled.add((island, stand))
            else:
                self._put(header, number)
                self._brought[island, stand] = number
        except NoSuchObject:
            self._settled.add((island, stand))  # collected meanwhile
        except CorruptError as exc:
            self._settled.add((island, stand))
            self._lookout.tell(f"What {island!r} has left stays where it is: {exc}")

    def _is_listed(self, island: str, stand: Stand) -> bool:
        """Return whether the update's own round has listed it."""
        roster = self._lookout.known_roster(stand.fragment, stand.round).roster
        entry = roster.entry(island)
        return (
            entry is not None
            and entry.verdict is not Verdict.LATE
            and entry.incarnation == stand.incarnation
        )

    def _left(self, island: str, stand: Stand) -> Header | None:
        """Return what an island has left, if that can count."""
        life = IncarnationKey(keys.slug(island), stand.incarnation)
        header = self._lookout.updates.header(stand.fragment, stand.round, life)
        if header is None or header.refused or self._lookout.updates.objection(header):
            return None
        return header

    def _is_counted(self, header: Header, number: int) -> bool:
        """Return whether a later round has listed it, since somebody put it there."""
        for round in range(header.round + 1, number):
            roster = self._lookout.known_roster(header.fragment, round).roster
            entry = roster.entry(header.island)
            digest = update_digest(_moved(header, round))
            if entry is not None and entry.digest == digest:
                return True
        return False

    def _put(self, header: Header, number: int) -> None:
        fragment, island = header.fragment, header.island
        body = whole_update(self._lookout, header).body
        last = self._lookout.sight.documents[island].beat.incarnation
        moved = replace(_moved(header, number), incarnation=last)
        key = keys.update(fragment, number, island, last)
        if self._store.put_new(key, [pack(moved), body.data]):
            self._lookout.tell(
                f"Round {header.round} of fragment {fragment} was closed while "
                f"{island!r} left: its last update is put into round {number}."
            )
        standing, _ = self._lookout.read_update(key, frame_bytes(moved))
        if update_digest(standing) == update_digest(moved):
            self._lookout.updates.keep(moved)


def _moved(header: Header, round: int) -> Header:
    return replace(header, kind=FrameKind.DEPARTING, round=round)


_SLOT_BYTES = 4096


def look_everybody(lookout: BucketReader) -> None:
    """Read the latest life of everybody by its key: a list may be late."""
    lookout.look_members()
    slots = {name: each.slot for name, each in lookout.sight.documents.items()}
    slot = 0
    while slot <= max(slots.values(), default=-1) + 1:  # there may be gaps
        try:
            slots.setdefault(_name_in(lookout, keys.slot(slot)), slot)
        except NoSuchObject:
            pass
        except CorruptError as exc:
            lookout.tell(str(exc))
        slot += 1
    for name in slots:
        _look_lives(lookout, name)


def _name_in(lookout: BucketReader, key: str) -> str:
    """Return which island has a slot.

    Raises:
        NoSuchObject: none has.
        CorruptError: the object is damaged.
    """
    data = bytes(lookout.store.get(key, 0, _SLOT_BYTES))
    if data.startswith(b"{"):
        return parse(documents.SLOT, data, key=key, run=lookout.run).island
    try:
        return data.decode()  # of 0.1.0: the name alone
    except UnicodeDecodeError as exc:
        raise CorruptError(f"{key} holds no island's name. {RESTORE}") from exc


def _look_lives(lookout: BucketReader, name: str) -> None:
    """Read the lives of an island that come after the last known one."""
    while True:
        known = lookout.sight.documents.get(name)
        after = known.beat.incarnation + 1 if known else 1
        lookout.members.look_life(IncarnationKey(keys.slug(name), after))
        if lookout.sight.documents.get(name) is known:
            return


def progress(sight: RunView, fragment: int) -> FragmentProgress:
    """Return what a fragment's state does not say itself."""
    state = sight.state
    round = state.rounds[fragment]
    return FragmentProgress(
        round=round.number - 1,
        counted=counted_progress(state.counted, fragment),
        bases=round.bases[-BASES:],
    )


def last_rosters(lookout: BucketReader, fragment: int) -> Iterator[RosterDocument]:
    """Yield the last rosters of a fragment, for who has not taken their outcomes."""
    number = lookout.sight.number(fragment)
    for round in range(max(1, number - ROSTERS), number):
        try:
            roster = lookout.known_roster(fragment, round)
            # Where they go they are chained anew.
            yield replace(roster, before=b"", controls=0, digest=b"")
        except NoSuchObject:
            continue  # from before the run came here


def members(sight: RunView) -> tuple[MemberDocument, ...]:
    """Return the last life of everybody; who was evicted has left."""
    known = sight.state.members.known
    return tuple(
        replace(document, has_left=known[name].has_left)
        for name, document in sorted(sight.documents.items())
    )


def standing(lookout: BucketReader, fragment: int) -> dict[UnclaimedUpdate, Header]:
    """Return what stands in the open round, and what departed ahead of it."""
    staged = lookout.sight.state.rounds[fragment].staged.values()
    return {
        UnclaimedUpdate(
            fragment=fragment, round=header.round, island=header.island
        ): header
        for header in [*staged, *lookout.ahead(fragment)]
        if not (header.refused or lookout.updates.objection(header))
    }


def agreed(outcomes: Outcomes, fragment: int, round: int) -> Frame:
    """Return what a round came to.

    Raises:
        OutcomeLost: its means are not kept any more.
    """
    frame = outcomes.frame(fragment, round)
    if not frame.header.is_sealed:
        raise OutcomeLost(
            f"The means of round {round} of fragment {fragment} have been removed. "
            "The state has all of it."
        )
    verify_body(frame.header, frame.body)
    return frame


def whole_update(lookout: BucketReader, header: Header) -> Frame:
    """Return an update with its body.

    Raises:
        CorruptError: its bytes do not verify.
    """
    where = (header.fragment, header.round)
    key = keys.update(*where, header.island, header.incarnation)
    data = lookout.store.get(key, 0, frame_bytes(header))
    try:
        body = np.frombuffer(bytearray(data[header_length(data) :]), np.uint8)
        verify_body(header, body)
    except CorruptError as exc:
        raise CorruptError(f"{key} is damaged: {exc} {RESTORE}") from exc
    return Frame(header, body)
