"""Reads the ledger of rows of a run in a bucket, and claims rows for one island.

A claim is two requests: a get finds no next entry of the log, and a put makes one. Each
other island's entry since the last claim is one get more, once. Every `LEDGER_ENTRIES`
entries the writer of the last one puts the whole ledger, and removes the entries that
no reader needs that begins at one of the last ledgers: a reader that joins reads at
most twice as many.

Rule 1: an entry that cannot be read is reported once, and is void for all.
Rule 2: an entry that a roster names and that is gone is damage, unless it was removed
        with the entries before a ledger: a reader that stood still begins there again.
Rule 3: no silence makes rows free, because no clock decides here: an island that died
        holds its rows until an operator evicts it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from atoll.data import Ask, Claim, DataSpec
from atoll.data.spans import EMPTY, Spans, union
from atoll.errors import CorruptError, NoSuchObject, StoreDenied, UsageError
from atoll.exchange.bucket import claims, documents, keys
from atoll.exchange.bucket.claims import ClaimDocument, DepartedIsland, RowLog
from atoll.exchange.bucket.documents import RESTORE
from atoll.exchange.bucket.keys import UpdateKey
from atoll.protocol import events, rows
from atoll.protocol.island import CARRIED_ROUNDS
from atoll.wire import Verdict

if TYPE_CHECKING:
    from atoll.exchange.bucket.documents import MemberDocument, StandingUpdate
    from atoll.exchange.bucket.member import MemberLease
    from atoll.exchange.bucket.reader import BucketReader

LEDGER_ENTRIES = 64
"""Entries of the log between two ledgers."""

KEPT_LEDGERS = 2
"""A reader that has listed the older one may still be reading it."""

MAX_WAITING = 256
"""Rosters that wait in memory for the log to be read; later ones are read again."""

STALE_S = 600.0
"""Entries that are longer unread may have been removed."""

FRESH_S = 5.0
"""A put that took longer may have come after its entry was made and removed."""


AT_ONCE = 16
"""Entries that are read together by a reader that is as far behind."""

MISSING = ClaimDocument(
    run="", island="", incarnation=0, number=0, spans=EMPTY, released=(), rounds=()
)
"""No entry of the log."""


class RowReader:
    """Keeps the ledger of rows up to date with the bucket. Any thread may call."""

    def __init__(self, reader: BucketReader) -> None:
        self._reader, self._store, self._runtime = reader, reader.store, reader.runtime
        self.log: RowLog | None = None
        """None: the run has no weights, or the log was not read yet."""

        self._looked_s = 0.0
        """When the log was last read to its end."""

        self._decided_move = ""
        """The nonce of the last move that was given up."""

    @property
    def number(self) -> int:
        """The last entry that the ledger has, as a roster names it."""
        return self.log.number if self.log is not None else 0

    def is_current(self, fragment: int) -> bool:
        """Return whether the ledger has every roster of a fragment, and no other."""
        if self.log is None:
            return True
        return self.log.rounds[fragment] == self._reader.view.number(fragment) - 1

    def note_roster(self, document: documents.RosterDocument) -> None:
        """Take a roster that was read. Hold the reader's lock."""
        if self.log is None or self.log.num_waiting > MAX_WAITING:
            return
        self._add_roster(self.log, document)
        self._advance(self.log)

    def read(self) -> None:
        """Bring the ledger to the end of the log and to the rosters that were read.

        Raises:
            CorruptError: an entry or a roster is gone.
        """
        log = self.log or self._begin()
        if log is None:
            return
        if self._runtime.now_s() - self._looked_s > STALE_S:
            self._begin_later(log, log.next_entry)
        num_read = 0
        while self._read_entries(log, AT_ONCE if num_read >= AT_ONCE else 1):
            num_read += 1
        self._looked_s = self._runtime.now_s()
        while not self._catch_up(log):
            pass

    def _begin(self) -> RowLog | None:
        """Begin with the last ledger in the bucket, or with the first entry."""
        with self._reader.lock:
            empty = self._reader.view.state.ledger
        if empty is None:
            return None
        log = RowLog(empty)
        self._begin_later(log, 0)
        self._looked_s = self._runtime.now_s()
        with self._reader.lock:
            if self.log is None:
                self.log = log
            return self.log

    def _begin_later(self, log: RowLog, number: int) -> bool:
        """Begin with the last ledger in the bucket, if it has an entry or a later."""
        for last in sorted(self._ledgers(), reverse=True):
            if last < number:
                return False
            key = keys.ledger(last)
            with suppress(NoSuchObject):
                read = partial(
                    documents.fetch,
                    self._store,
                    claims.LEDGER,
                    key,
                    run=self._reader.run,
                )
                document = self._reader.ignore_corrupt(key, read)
                if document is not None and document.number == last:
                    restore = partial(self._restore, log, document)
                    if self._reader.ignore_corrupt(key, restore):
                        return True
        return False

    def _restore(self, log: RowLog, document: claims.LedgerDocument) -> bool:
        with self._reader.lock:
            log.restore(document)
        return True

    def _ledgers(self) -> list[int]:
        listed = self._reader.list_keys(keys.LEDGERS)
        numbers = (keys.number_of(key, keys.LEDGERS) for key in listed)
        return [number for number in numbers if number is not None]

    def _read_entries(self, log: RowLog, count: int) -> bool:
        """Read the next entries; return False if one of them does not exist."""
        with self._reader.lock:
            first = log.next_entry
        numbers = range(first, first + count)
        entries = self._runtime.gather([partial(self._entry, n) for n in numbers])
        for number, entry in zip(numbers, entries, strict=True):
            if entry is MISSING:
                return False
            with self._reader.lock:
                if log.next_entry == number:
                    log.add_entry(entry)
        return True

    def _entry(self, number: int) -> ClaimDocument | None:
        """Return an entry; `MISSING` if there is none, and None if it is damaged."""
        key = keys.claim(number)
        read = partial(
            documents.fetch, self._store, claims.CLAIM, key, run=self._reader.run
        )
        try:
            return self._reader.ignore_corrupt(key, read)
        except NoSuchObject:
            return MISSING

    def _catch_up(self, log: RowLog) -> bool:
        """Bring the ledger up; return False if more had to be read for that."""
        reader = self._reader
        for fragment in range(len(reader.view.layout)):
            self._read_rosters(log, fragment)
        with reader.lock:
            self._advance(log)
            awaited, entry = log.awaited_rounds, log.awaited_entry
        for fragment, round in awaited.items():
            reader.read_rosters(fragment)
            if reader.view.number(fragment) <= round:
                if reader.view.state.move is not None:
                    return True  # no roster is applied until the move is decided
                raise CorruptError(
                    f"{keys.roster(fragment, round)} is gone: "
                    f"{keys.claim(log.number + 1)} was written by an island that had "
                    f"read it. {RESTORE}"
                )
        if not awaited and entry > log.number:
            # The roster was read after the end of the log.
            is_found = self._read_entries(log, 1)
            if not is_found and not self._begin_later(log, log.next_entry):
                raise CorruptError(
                    f"{keys.claim(log.next_entry)} is gone: a roster was written by an "
                    f"island that had read {keys.claim(entry)}. {RESTORE}"
                )
            return False
        return not awaited

    def _read_rosters(self, log: RowLog, fragment: int) -> None:
        """Add the rosters of closed rounds that the ledger lacks."""
        with self._reader.lock:
            rounds = range(log.next_round(fragment), self._reader.view.number(fragment))
        reads = [
            partial(self._reader.closed_roster, fragment, round) for round in rounds
        ]
        try:
            read = self._runtime.gather(reads) if reads else []
        except NoSuchObject as exc:
            raise CorruptError(
                f"{exc.key} is gone, and the ledger of rows needs it. {RESTORE}"
            ) from exc
        with self._reader.lock:
            for document in read:
                self._add_roster(log, document)

    def _add_roster(self, log: RowLog, document: documents.RosterDocument) -> None:
        log.add_roster(
            document.fragment,
            document.round,
            claims=document.claims or 0,
            roster=document.roster,
        )

    def _advance(self, log: RowLog) -> None:
        log.advance()
        if self._reader.view.state.ledger is not log.ledger:
            seen = events.RowsSeen(log.ledger)
            self._reader.view.advance(seen, self._runtime.now_s())

    def wait_for_move(self) -> None:
        """Return when no move that has ended the log is in progress.

        Raises:
            RunMoved: the run is elsewhere.
        """
        if self.log is not None and self.log.move != self._decided_move:
            move = self.log.move
            self._reader.wait_while_moving()
            self._decided_move = move

    def end_log(self, nonce: str, *, island: str) -> None:
        """End the log for a move, unless that has been done."""
        self.read()
        while self.log is not None and self.log.move != nonce:
            entry = replace(
                MISSING,
                run=self._reader.run,
                island=island,
                incarnation=1,
                rounds=self.log.rounds,
                move=nonce,
            )
            if not self.put(entry, self.log.number + 1):
                self.read()

    def put(self, document: ClaimDocument, number: int) -> bool:
        """Put an entry of the log; False: the log has another one there, or had.

        Raises:
            UsageError: it is larger than a reader accepts.
        """
        log, key, begun_s = self.log, keys.claim(number), self._runtime.now_s()
        assert log is not None
        data = documents.packed(claims.CLAIM, document, key)
        if not self._store.put_new(key, data):
            return False
        is_slow = self._runtime.now_s() - begun_s > FRESH_S
        if is_slow and self._begin_later(log, number):
            return False  # the entry of that number was removed meanwhile
        with self._reader.lock:
            if log.next_entry == number:
                log.add_entry(document)
                self._advance(log)
        if number % LEDGER_ENTRIES == 0:
            self._keep_ledger(log)
        return True

    def _keep_ledger(self, log: RowLog) -> None:
        """Put the ledger for readers that begin, and remove what none of them reads."""
        with self._reader.lock:
            document = log.document(self._reader.run)
        key = keys.ledger(document.number)
        try:
            data = documents.packed(claims.LEDGER, document, key)
            self._store.put_new(key, data)
            self._collect()
        except (UsageError, StoreDenied) as exc:
            self._reader.warn_once(
                f"{key} is not written, or older claims cannot be removed, and "
                f"islands that join read more of them: {exc}"
            )

    def _collect(self) -> None:
        """Remove entries and ledgers before the older one of the kept ledgers."""
        listed = self._reader.list_keys(keys.CLAIMS)
        ledgers = sorted(
            number
            for key in listed
            if (number := keys.number_of(key, keys.LEDGERS)) is not None
        )
        if len(ledgers) < KEPT_LEDGERS:
            return
        first = ledgers[-KEPT_LEDGERS]
        old = [keys.ledger(number) for number in ledgers if number < first]
        old += [
            key
            for key in listed
            if (number := keys.number_of(key, keys.CLAIMS)) is not None
            and number <= first
        ]
        self._store.remove(old)


class StoreDealer:
    """Claims rows for one incarnation of an island. Implements `Dealer`."""

    def __init__(
        self,
        lease: MemberLease,
        *,
        close_all: Callable[[], None],
        end_with_data: Callable[[], None],
    ) -> None:
        """`close_all` closes rounds that are due while this island waits for rows."""
        self._lease, self._reader = lease, lease.reader
        self._runtime = lease.reader.runtime
        self._close_all, self._end_with_data = close_all, end_with_data

    @property
    def _rows(self) -> RowReader:
        """The ledger of the run.

        Raises:
            UsageError: the run deals out no rows.
        """
        if self._reader.rows is None:
            rows.require_ledger(self._reader.view.state)
        assert self._reader.rows is not None
        return self._reader.rows

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        """Describe the data of an island. Safe to repeat; else as `Dealer` says."""
        while True:
            self._lease.require()
            self._rows.read()
            self._rows.wait_for_move()
            with self._reader.lock:
                state = self._reader.view.state
                state.members.require(island, incarnation)
                ledger = rows.require_ledger(state)
                opened = ledger.opened(data)
                number = self._rows.number + 1
                document = replace(self._entry(island, incarnation), data=opened.data)
            if opened == ledger or self._rows.put(document, number):
                return opened.data

    def claim(self, ask: Ask) -> Claim:
        """Return turns that now belong to the island; else as `Dealer` says."""
        while True:
            self._lease.require()
            self._rows.read()
            self._rows.wait_for_move()
            with self._reader.lock:
                state = self._reader.view.state
                answer = rows.answer_to(state, ask)
                if answer is not None:
                    return answer
                number = self._rows.number + 1
                claim, document = self._decided(ask)
            if claim.spans or document.released:
                if self._rows.put(document, number) and claim.spans:
                    return claim
                continue
            if claim.is_over:
                self._end_with_data()
            else:
                self._close_all()
            return claim

    def enter(self, member: MemberDocument) -> None:
        """Keep the rows that the name of a new incarnation holds from being dealt.

        An island that has decided before that they become free is overtaken.
        """
        beat = member.beat
        while self._reader.rows is not None:
            self._rows.read()
            self._rows.wait_for_move()
            log = self._rows.log
            if log is None:
                return
            with self._reader.lock:
                is_known = log.incarnations.get(beat.island, 0) >= beat.incarnation
                has_claimed = log.ledger.last_claim(beat.island) > 0
                number = log.number + 1
                document = self._entry(beat.island, beat.incarnation)
            if is_known or not has_claimed or self._rows.put(document, number):
                return

    def held_rows(self, member: MemberDocument) -> bytes:
        """Return the packed turns that a new incarnation trains on.

        Those in updates of earlier incarnations that may still count are not among
        them.
        """
        view, island = self._reader.view, member.beat.island
        if self._reader.rows is None:
            return b""
        standing = [EMPTY] * len(view.layout)
        for update in member.stands:
            if self._may_count(island, update):
                spans = standing[update.fragment] | self._turns_of(island, update)
                standing[update.fragment] = spans
        with self._reader.lock:
            state = view.state
            if state.ledger is None:
                return b""
            staged = rows.standing(state, island)
            turns = [union(pair) for pair in zip(standing, staged, strict=True)]
            return state.ledger.to_train(island, turns).pack()

    def _turns_of(self, island: str, update: StandingUpdate) -> Spans:
        """Return the turns in an update; none if there is no such update."""
        name = UpdateKey.of(update.round, island, update.incarnation)
        header = self._reader.updates.header(update.fragment, name)
        if header is None:
            return EMPTY
        try:
            return Spans.unpack(header.progress.cursor)
        except CorruptError:
            return EMPTY

    def _decided(self, ask: Ask) -> tuple[Claim, ClaimDocument]:
        """Return the answer to a new claim, and the entry that makes it durable."""
        state, now_s = self._reader.view.state, self._runtime.now_s()
        departed = self._departed()
        names = [other.island for other in departed]
        claim = rows.chosen(state, ask, now_s, departed=names)
        document = replace(
            self._entry(ask.island, ask.incarnation),
            number=ask.number if claim.spans else 0,
            spans=claim.spans,
            released=departed,
        )
        return claim, document

    def _entry(self, island: str, incarnation: int) -> ClaimDocument:
        """Return an entry that changes nothing."""
        log = self._rows.log
        assert log is not None
        return ClaimDocument(
            run=self._reader.run,
            island=island,
            incarnation=incarnation,
            number=0,
            spans=EMPTY,
            released=(),
            rounds=log.rounds,
        )

    def _departed(self) -> tuple[DepartedIsland, ...]:
        """Return the islands whose rows become free now."""
        view, log = self._reader.view, self._rows.log
        assert log is not None
        departed = []
        for island in rows.departed(view.state):
            document = view.documents.get(island)
            if document is None:
                continue  # its document was not read yet, and it may be live
            incarnation = document.beat.incarnation
            if log.has_returned(island, incarnation):
                continue
            if not any(self._may_count(island, update) for update in document.stands):
                departed.append(DepartedIsland(island=island, incarnation=incarnation))
        return tuple(departed)

    def _may_count(self, island: str, update: StandingUpdate) -> bool:
        """Return whether a roster may still list an update that a document names.

        One that its round has missed is put into the next rounds.
        """
        view, fragment = self._reader.view, update.fragment
        number = view.number(fragment)
        if view.state.never_opens(number, fragment=fragment):
            return False
        if view.is_async:
            name = UpdateKey.of(update.round, island, update.incarnation)
            return not view.is_over(fragment, island, name)
        if update.round >= number:
            return True
        if number - update.round > CARRIED_ROUNDS:
            return False
        rosters = [
            view.rosters.get((fragment, round)) for round in range(update.round, number)
        ]
        entries = [roster.roster.entry(island) for roster in rosters if roster]
        is_listed = any(
            entry and entry.verdict is not Verdict.LATE for entry in entries
        )
        return None not in rosters and not is_listed
