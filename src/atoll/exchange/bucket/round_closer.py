"""Closes rounds in a bucket, by a roster that is put once.

Rule 1: any island that has published for a round may close it; the conditional put of
        the roster decides between several. Only such an island knows the base of the
        round, and its own work is in the roster. With `store.decider`, only the island
        of that name may.
Rule 2: a decision uses objects that were read within the last seconds; an island that
        stood still reads again.
Rule 3: controls of operators are read before a round is closed.
Rule 4: if islands start from several states, the run's own is computed from the bucket.
Rule 5: an update of an island that has left, which its round did not list, is put into
        the open round, as the same island's departing update.

Rule 5 in detail. A roster may be written before an island publishes, and be put after
that island has left. No other island would count that work. So each island that reads
the next round puts it there: only an update that the leaving member's document names,
and that no roster since has listed. All of them put the same bytes, once. A new
incarnation of the island does this itself before it joins; after that nothing is put.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from atoll.errors import CorruptError, NoSuchObject
from atoll.exchange.base import Frame
from atoll.exchange.bucket import documents, keys, means
from atoll.exchange.bucket.documents import (
    RESTORE,
    ControlDocument,
    RosterDocument,
    StandingUpdate,
    packed,
)
from atoll.exchange.bucket.keys import IncarnationKey
from atoll.exchange.bucket.reader import BucketReader
from atoll.exchange.bucket.states import States
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
"""A round is closed only by objects that were read no longer ago than this."""

log = logging.getLogger("atoll")


class RoundCloser:
    """Reads open rounds, and closes those that are due, as one island."""

    def __init__(self, reader: BucketReader, states: States) -> None:
        self._reader, self._states = reader, states
        self._store, self._timing = reader.store, reader.timing
        self._late_updates = LateUpdates(reader)
        self.island: str | None = None
        """Name of the closing island; None for read-only observers."""

    def settle(self, fragment: int) -> None:
        """Read the open round of a fragment, and close it if that is due."""
        # A slow first read has cached the objects: the second one is quick.
        is_fresh = self._read(fragment) or self._read(fragment)
        if not is_fresh or self._due(fragment) is None:
            return
        read_s = self._timing.now_s()
        # A stop or a pause since the last heartbeat: others may have applied it.
        self._reader.poll_controls()
        is_old = self._timing.now_s() - read_s > FRESH_S
        if (self._prove_base(fragment) or is_old) and not self._read(fragment):
            return
        document = self._due(fragment)
        if document is not None:
            self._close(document)

    def _prove_base(self, fragment: int) -> bool:
        """Compute the run's own base, if islands start from several states."""
        with self._reader.lock:
            is_disputed = self._reader.base_view.is_disputed(fragment)
        if is_disputed:
            log.warning(
                "islands start round %d of fragment %d from several states; "
                "the run's own is made from its bucket",
                self._reader.view.number(fragment),
                fragment,
            )
            state = self._states.read(fragment)
            with self._reader.lock:
                base = HeldRound(state.round, state.digest)
                self._reader.base_view.note_proven(fragment, base)
        return is_disputed

    def _due(self, fragment: int) -> RosterDocument | None:
        """Return the roster that this island may put now."""
        if self.island is None:
            return None
        with self._reader.lock:
            if self._late_updates.unseen(fragment):
                return None  # a farewell was read since: the next read brings it
            now_s = self._timing.now_s()
            due = self._reader.update_view.closable(fragment, self.island, now_s)
            return self._roster_document(*due) if due else None

    def _read(self, fragment: int) -> bool:
        """Read a round and its missing islands; False: the result is old by now.

        A request may be repeated for minutes, and a process may stand still: an update
        that was put meanwhile would be left out of the roster.
        """
        begun_s = self._timing.now_s()
        self._reader.read_round(fragment)
        if self.island is not None:
            self._reader.members.read_missing(fragment)
            self._reader.read_standing(fragment)
            self._late_updates.bring(fragment)
        return self._timing.now_s() - begun_s <= FRESH_S

    def _close(self, document: RosterDocument) -> None:
        """Put a roster; the first one that is put closes the round."""
        key = self._reader.roster_key(document.fragment, document.round)
        self._store.put_new(key, packed(documents.ROSTER, document, key))
        self._reader.read_rosters(document.fragment)
        with self._reader.lock:
            has_ended = self._reader.update_view.ended_by_tokens() is not None
        if has_ended:
            self._stop(self._reader.furthest_round())

    def _roster_document(self, round: Round, roster: Roster) -> RosterDocument:
        view = self._reader.view
        departing = frozenset(
            name
            for name, header in round.staged.items()
            if header.kind is FrameKind.DEPARTING
        )
        return RosterDocument(
            run=self._reader.run,
            fragment=round.fragment,
            round=round.number,
            epoch=view.state.epoch,
            base=round.base,
            outer=round.outer,
            shards=means.owners(roster, departing, view.terms(round.fragment).merge),
            roster=roster,
            before=view.heads[round.fragment].digest,
            controls=len(view.controls),
        )

    def _stop(self, last_round: int) -> None:
        """Put the control that ends the run, unless it ends as early already."""
        control = ControlDocument(
            run=self._reader.run, action="stop", values={}, last_round=last_round
        )
        self._reader.read_controls()
        current = self._reader.view.state.last_round
        if current is None or last_round < current:
            key = keys.control(len(self._reader.view.controls) + 1)
            self._store.put_new(key, packed(documents.CONTROL, control, key))
            self._reader.read_controls()


class LateUpdates:
    """Puts departing updates that closed rounds did not list into the open rounds."""

    def __init__(self, reader: BucketReader) -> None:
        self._reader, self._store = reader, reader.store
        self._settled: set[tuple[str, StandingUpdate]] = set()
        self._target_rounds: dict[tuple[str, StandingUpdate], int] = {}
        """The last round that each was put into: it counts there or in a later one."""

    def bring(self, fragment: int) -> None:
        """Put updates that the last rounds missed into the open one. Safe to repeat."""
        with self._reader.lock:
            number, unseen = self._reader.view.number(fragment), self.unseen(fragment)
        for island, update in unseen:
            self._bring(island, update, number)

    def unseen(self, fragment: int) -> list[tuple[str, StandingUpdate]]:
        """Return updates that the last rounds may have missed, new to `bring`."""
        view = self._reader.view
        number = view.number(fragment)
        if view.never_opens(number):
            return []
        return [
            update
            for update in self._reader.update_view.departing(
                fragment, within=CARRIED_ROUNDS
            )
            if update not in self._settled and self._target_rounds.get(update) != number
        ]

    def _bring(self, island: str, update: StandingUpdate, number: int) -> None:
        try:
            header = (
                None
                if self._is_listed(island, update)
                else self._valid_header(island, update)
            )
            if header is None or self._is_counted(header, number):
                self._settled.add((island, update))
            else:
                self._put(header, number)
                self._target_rounds[island, update] = number
        except NoSuchObject:
            self._settled.add((island, update))  # collected meanwhile
        except CorruptError as exc:
            self._settled.add((island, update))
            self._reader.warn_once(f"The last update of {island!r} is dropped: {exc}")

    def _is_listed(self, island: str, update: StandingUpdate) -> bool:
        """Return whether the update's own round has listed it."""
        roster = self._reader.closed_roster(update.fragment, update.round).roster
        entry = roster.entry(island)
        return (
            entry is not None
            and entry.verdict is not Verdict.LATE
            and entry.incarnation == update.incarnation
        )

    def _valid_header(self, island: str, update: StandingUpdate) -> Header | None:
        """Return the header of an update, if it can count."""
        incarnation = IncarnationKey(keys.slug(island), update.incarnation)
        updates = self._reader.updates
        header = updates.header(update.fragment, update.round, incarnation)
        if header is None or header.refused or updates.objection(header):
            return None
        return header

    def _is_counted(self, header: Header, number: int) -> bool:
        """Return whether a later round, into which an island put it, has listed it."""
        for round in range(header.round + 1, number):
            roster = self._reader.closed_roster(header.fragment, round).roster
            entry = roster.entry(header.island)
            digest = update_digest(_departing_in(header, round))
            if entry is not None and entry.digest == digest:
                return True
        return False

    def _put(self, header: Header, number: int) -> None:
        fragment, island = header.fragment, header.island
        body = read_full_update(self._reader, header).body
        incarnation = self._reader.view.documents[island].beat.incarnation
        moved = replace(_departing_in(header, number), incarnation=incarnation)
        key = keys.update(fragment, number, island, incarnation)
        if self._store.put_new(key, [pack(moved), body.data]):
            self._reader.warn_once(
                f"Round {header.round} of fragment {fragment} was closed while "
                f"{island!r} left: its last update is put into round {number}."
            )
        existing, _ = self._reader.updates.read(key, frame_bytes(moved))
        if update_digest(existing) == update_digest(moved):
            self._reader.updates.add(moved)


def _departing_in(header: Header, round: int) -> Header:
    return replace(header, kind=FrameKind.DEPARTING, round=round)


def read_full_update(reader: BucketReader, header: Header) -> Frame:
    """Return an update with its body.

    Raises:
        CorruptError: its bytes do not verify.
    """
    key = keys.update(header.fragment, header.round, header.island, header.incarnation)
    data = reader.store.get(key, 0, frame_bytes(header))
    try:
        body = np.frombuffer(bytearray(data[header_length(data) :]), np.uint8)
        verify_body(header, body)
    except CorruptError as exc:
        raise CorruptError(f"{key} is damaged: {exc} {RESTORE}") from exc
    return Frame(header, body)
