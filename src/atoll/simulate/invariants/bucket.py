"""Checks a bucket: every roster is judged as it is decided and as it is put.

The referee reads the rosters as they are put, computes the mean of the updates that
they count from the bucket itself, and makes the outer step. Every island must get the
same bits.

A roster is also checked when its closer decides it, against the closer's view at that
moment. A process can be frozen for any time before its roster is sent, and updates that
arrive meanwhile are not in the roster. That loses no work: a live island learns that
its update was late, and carries it; an update of an island that has left is brought
into the next round; and a later incarnation finds the updates of the earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from atoll.data import Ask, Claim, DataSpec, RowCounts, RowLedger, Spans
from atoll.exchange import Frame, Outcome
from atoll.exchange.bucket import (
    BucketReader,
    StoreExchange,
    documents,
    keys,
    means,
)
from atoll.exchange.bucket.claims import CLAIM, ClaimDocument, RowLog
from atoll.exchange.bucket.documents import (
    MemberDocument,
    RosterDocument,
    RunDocument,
    StandingUpdate,
    parse,
)
from atoll.exchange.bucket.exchange import FRESH_S
from atoll.exchange.bucket.keys import IncarnationKey, UpdateKey
from atoll.exchange.bucket.means import Pieces
from atoll.protocol import Reception
from atoll.protocol.island import CARRIED_ROUNDS
from atoll.retry import STORE_OUTAGE
from atoll.settings import RunSettings
from atoll.simulate.hosts import SimRuntime
from atoll.simulate.invariants import claims
from atoll.simulate.invariants.watch import InvariantWatch, WatchedPorts
from atoll.simulate.process import SimProcess
from atoll.simulate.store import REQUEST_S, Bucket
from atoll.simulate.storms import STORE
from atoll.simulate.story import CommitTrace
from atoll.simulate.world import SimWorld, StoreTroubles
from atoll.store import Data, Item, Store, StoreTraits
from atoll.weights import FragmentState, Layout, terms_of
from atoll.wire import (
    Header,
    Roster,
    RosterEntry,
    header_length,
    piece_count,
    unpack,
    update_digest,
)

ROSTER = re.compile(r"rounds/(\d+)/(\d+)/roster")
UPDATE = re.compile(r"rounds/(\d+)/(\d+)/up/")

LONGEST_LAG_S = 5.0
"""Upper bound of the delay of a list in a storm."""


class BucketReferee:
    """Reads decisions from rosters in a bucket. Implements `Referee`."""

    def __init__(
        self,
        world: SimWorld,
        bucket: Bucket,
        settings: RunSettings,
        layout: Layout,
        watch: InvariantWatch,
    ) -> None:
        self._world, self._bucket, self._watch = world, bucket, watch
        self._settings, self._layout = settings, layout
        self._states: list[FragmentState] = []
        self._members: dict[str, MemberDocument] = {}
        self._last_round = settings.run.end_rounds
        self._last_rounds: list[int] | None = None
        """Of each fragment, once the end of an asynchronous run is decided."""

        self._stop_number = 0
        """The number of the control that has decided it."""

        self._rows = (
            LogAccount(settings, watch, num_fragments=len(layout))
            if settings.data.is_dealt
            else None
        )
        self.closers = CloserCheck(world, bucket, watch)
        bucket.on_put = self._put

    @property
    def opened(self) -> tuple[int, ...]:
        return tuple([state.round + 1 for state in self._states])

    @property
    def has_started(self) -> bool:
        is_enough = len(self._members) >= self._settings.run.start_islands
        return bool(self._states) and is_enough

    @property
    def is_ending(self) -> bool:
        return any(
            state.round + 1 == last
            for state, last in zip(self._states, self._lasts, strict=True)
        )

    @property
    def has_ended(self) -> bool:
        return all(
            last is not None and state.round >= last
            for state, last in zip(self._states, self._lasts, strict=True)
        ) and bool(self._states)

    @property
    def _lasts(self) -> list[int | None]:
        """The last round of each fragment, as far as it is decided."""
        if self._last_rounds is not None:
            return list(self._last_rounds)
        last = None if self._settings.sync.is_async else self._last_round
        return [last] * len(self._states)

    @property
    def digests(self) -> list[bytes]:
        return [state.digest for state in self._states]

    @property
    def rows(self) -> RowCounts | None:
        return self._rows.counts if self._rows is not None else None

    def look(self) -> None:
        self.closers.look()

    def judge(self) -> None:
        """Do nothing: a bucket has no deadlines to check."""

    def conclude(self) -> None:
        """Check at the end that every round has its roster, and every row a state."""
        if self._rows is not None:
            self._rows.conclude()
        for fragment, state in enumerate(self._states):
            rounds = range(1, state.round + 1)
            missing = [
                round
                for round in rounds
                if self._bucket.original(keys.roster(fragment, round)) is None
            ]
            if missing:
                self._watch.report(
                    claims.ROUNDS_IN_ORDER,
                    STORE,
                    f"fragment {fragment} lacks the rosters of rounds {missing}",
                )

    def _put(self, key: str, content: bytes) -> None:
        """Read an object that was put."""
        if ROSTER.fullmatch(key):
            self._roster_put(parse(documents.ROSTER, content, key=key))
        elif UPDATE.match(key):
            self._update_put(content)
        elif key.startswith(keys.MEMBERS):
            self._member_put(parse(documents.MEMBER, content, key=key))
        elif self._rows is not None and keys.number_of(key, keys.CLAIMS) is not None:
            self._rows.claimed(key, parse(CLAIM, content, key=key))
        elif key == keys.RUN:
            self._run_put(parse(documents.RUN, content, key=key))
        elif key.startswith(keys.CONTROL):
            control = parse(documents.CONTROL, content, key=key)
            if control.action == "stop" and control.last_rounds is None:
                self._last_round = control.last_round
            elif control.action == "stop" and self._last_rounds is None:
                self._stop_number = int(key.removeprefix(keys.CONTROL))
                # Rosters that were put before it did not know of it.
                self._last_rounds = [
                    max(last, state.round + 1)
                    for last, state in zip(
                        control.last_rounds or (), self._states, strict=True
                    )
                ]

    def _member_put(self, document: MemberDocument) -> None:
        beat = document.beat
        before = self._members.get(beat.island)
        if before is not None and before.beat.incarnation > beat.incarnation:
            return
        self._members[beat.island] = document
        detail = f"incarnation {beat.incarnation}"
        if before is None or before.beat.incarnation < beat.incarnation:
            self._world.scheduler.emit(beat.island, "join", detail)
        elif document.has_left and not before.has_left:
            self._world.scheduler.emit(beat.island, "leave", detail)

    def _run_put(self, document: RunDocument) -> None:
        for fragment in range(len(self._layout)):
            key = keys.founding(document.founding, fragment)
            data = self._bucket.original(key)
            assert data is not None
            length = header_length(data)
            header, body = unpack(data[:length]), bytearray(data[length:])
            body_bytes = np.frombuffer(body, np.uint8)
            self._states.append(FragmentState.from_frame(header, body_bytes))
            self._watch.opened_s[fragment] = self._world.scheduler.now_s
        self._watch.rounds.founded(self._states)
        count = len(self._states)
        detail = f"{count} fragment{'s' * (count != 1)}"
        self._world.scheduler.emit(STORE, "found", detail)

    def _roster_put(self, document: RosterDocument) -> None:
        """Check a roster that was put, and apply it."""
        state = self._states[document.fragment]
        if document.round != state.round + 1:
            self._watch.report(
                claims.ROUNDS_IN_ORDER,
                STORE,
                f"round {document.round} of fragment {document.fragment} was closed "
                f"after round {state.round}",
            )
            return
        if document.base != state.digest:
            self._watch.report(
                claims.SAME_STATE,
                STORE,
                f"round {document.round} of fragment {document.fragment} was closed "
                f"on {document.base.hex()[:12]}, others hold {state.digest.hex()[:12]}",
            )
            return
        header, body = self._agreed(document)
        state.apply(header, body)
        self._note_end(document)
        self._excuse(document)
        now_s = self._world.scheduler.now_s
        commit = claims.CommittedRound(header, body.tobytes(), state.digest, now_s)
        if self._rows is not None:
            self._rows.closing(document)
        self._watch.committed(commit)
        if self._rows is not None:
            self._rows.closed(document)
        trace = CommitTrace.of(document.fragment, document.round, document.roster)
        self._world.scheduler.emit(STORE, "commit", str(trace))

    def _note_end(self, document: RosterDocument) -> None:
        """Note the last round of a fragment, which its closer must know as such."""
        fragment = document.fragment
        if self._last_rounds is None or document.round != self._last_rounds[fragment]:
            return
        if document.controls < self._stop_number:
            self._last_rounds[fragment] += 1
        else:
            self._watch.rounds.ends(fragment, document.round)

    def _update_put(self, content: bytes) -> None:
        """Note an update that another island has brought into a later round."""
        history, length = self._watch.history, header_length(content)
        header, body = (
            unpack(content[:length]),
            np.frombuffer(content, np.uint8)[length:],
        )
        if update_digest(header) in history.updates:
            return  # put by its own island
        for round in range(header.round - CARRIED_ROUNDS, header.round):
            digest_before = update_digest(replace(header, round=round))
            if (
                digest_before in history.updates
                and digest_before not in history.origins
            ):
                history.bring_forward(header, body, history.updates[digest_before])

    def _excuse(self, document: RosterDocument) -> None:
        """Note the departing updates that the closer of a round may have missed.

        In an asynchronous run the next round lists them, unless there is none.
        """
        decided_s = self.closers.decided_s(document)
        prefix = keys.updates(document.fragment, document.round)
        if self._settings.sync.is_async:
            if document.round != self._lasts[document.fragment]:
                return
            prefix = keys.arrivals(document.fragment)
        for key in self._bucket.objects:
            data = self._bucket.original(key)
            if key.startswith(prefix) and data is not None:
                since_s = decided_s - self._bucket.changed_s[key]
                if since_s < FRESH_S + LONGEST_LAG_S:
                    digest = update_digest(unpack(data[: header_length(data)]))
                    self._watch.history.excused.add(digest)

    def _agreed(self, document: RosterDocument) -> tuple[Header, np.ndarray]:
        """Return the agreed frame of a round, from the updates in the bucket."""
        layout = self._layout[document.fragment]
        terms = terms_of(layout, self._settings)
        if not document.roster.counted:
            return means.agreed(document, [], layout, terms.down)
        updates = {
            entry.island: self._update(document, entry)
            for entry in document.roster.counted
        }
        pieces = Pieces(0, piece_count(layout.elements), layout.elements)
        mean = means.mean_of(document, 0, pieces, updates, layout, terms)
        return means.agreed(document, [mean], layout, terms.down)

    def _update(
        self, document: RosterDocument, entry: RosterEntry
    ) -> tuple[Header | None, np.ndarray]:
        """Return a counted update, which must exist before its roster."""
        position = (document.fragment, document.round)
        key = key_of(document, entry, is_async=self._settings.sync.is_async)
        data = self._bucket.original(key)
        header = unpack(data[: header_length(data)]) if data else None
        if data is None or header is None or update_digest(header) != entry.digest:
            self._watch.report(
                claims.COUNTED_ONCE,
                entry.island,
                f"round {position[1]} of fragment {position[0]} counts an "
                f"update that is not at {key}",
            )
            return None, np.empty(0, np.uint8)
        return header, np.frombuffer(data, np.uint8)[header_length(data) :]


class LogAccount:
    """The ledger of rows by all entries and rosters, in the order of their puts."""

    def __init__(
        self, settings: RunSettings, watch: InvariantWatch, *, num_fragments: int
    ) -> None:
        self._watch = watch
        section = settings.data
        self._log = RowLog(
            RowLedger(
                unit_rows=section.unit_rows,
                passes=section.passes,
                num_fragments=num_fragments,
            )
        )
        self._holdings: list[Mapping[str, Spans]] = [{}]
        """By entry, the rows of each island after it."""

    @property
    def counts(self) -> RowCounts:
        """How many rows are in each state."""
        return self._log.ledger.counts

    def claimed(self, key: str, document: ClaimDocument) -> None:
        """Take the next entry of the log."""
        log = self._log
        if keys.number_of(key, keys.CLAIMS) != log.next_entry:
            detail = f"{key} is put, and the log has {log.next_entry - 1} entries"
            self._watch.report(claims.ROWS_HELD, document.island, detail)
            return
        log.add_entry(document)
        log.advance()
        self._holdings.append(log.ledger.holdings)

    def closing(self, document: RosterDocument) -> None:
        """Show the holdings that the closer of a round has read."""
        self._watch.rows.hold(self._holdings[document.claims or 0])

    def closed(self, document: RosterDocument) -> None:
        """Take a roster, and compare the ledger with the account of rosters."""
        log = self._log
        log.add_roster(
            document.fragment,
            document.round,
            claims=document.claims or 0,
            roster=document.roster,
        )
        log.advance()
        self._watch.rows.judge(log.ledger)

    def conclude(self) -> None:
        """Check that every row is trained or named."""
        self._watch.rows.hold(self._log.ledger.holdings)
        self._watch.rows.ended_in_bucket()
        self._watch.rows.conclude(self._log.ledger)


LOOK_S = 1.5
"""Time from the poll of a round to the decision to close it, without faults."""

CALM_S = REQUEST_S + STORE_OUTAGE.longest_s
"""Longest time for which a request may still be retried after the last fault."""


class CloserCheck:
    """Checks the decisions of islands that close rounds."""

    def __init__(self, world: SimWorld, bucket: Bucket, watch: InvariantWatch) -> None:
        self._world, self._bucket, self._watch = world, bucket, watch
        self._disturbed_s = 0.0
        self._decided_s: dict[tuple[int, int, bytes], float] = {}

    def look(self) -> None:
        """Note the time of faults that make requests slow or lists late."""
        network, troubles = self._world.network, self._bucket.troubles
        is_rough = network._conditions or network._partitions
        if is_rough or troubles.outages or troubles.list_lags:
            self._disturbed_s = self._world.scheduler.now_s

    def decided_s(self, document: RosterDocument) -> float:
        """Return when an island first decided this roster."""
        return self._decided_s.get(_roster_key(document), 0.0)

    def decided(
        self, process: SimProcess, document: RosterDocument, reader: BucketReader
    ) -> None:
        """Check a roster against the view of the island that has decided it."""
        now_s = self._world.scheduler.now_s
        self._decided_s.setdefault(_roster_key(document), now_s)
        for entry in document.roster.entries:
            if entry.digest and not _may_count(reader, document, entry):
                self._watch.report(
                    claims.ZOMBIES_CHANGE_NOTHING,
                    process.name,
                    f"closes {_name(document)} with incarnation {entry.incarnation} of "
                    f"{entry.island}, knows a later one, and that does not name the "
                    "update",
                )
        self._require_leftovers(process, document, reader)
        if now_s > self._disturbed_s + CALM_S and not process.slowdowns:
            self._require_all(process, document, reader)

    def _require_leftovers(
        self, process: SimProcess, document: RosterDocument, reader: BucketReader
    ) -> None:
        """Report departing updates that the closer knows of and does not list."""
        listed = {entry.island for entry in document.roster.entries if entry.digest}
        leftovers = reader.update_view.departing(
            document.fragment, within=CARRIED_ROUNDS
        )
        for island, stand in leftovers:
            if island not in listed and self._is_uncounted(island, stand):
                self._watch.report(
                    claims.NOTHING_LEFT_OUT,
                    process.name,
                    f"closes {_name(document)} without the departing update of "
                    f"{island} for round {stand.round}, which it knows of",
                )

    def _is_uncounted(self, island: str, stand: StandingUpdate) -> bool:
        position = (stand.fragment, stand.round)
        data = self._bucket.original(keys.update(*position, island, stand.incarnation))
        header = unpack(data[: header_length(data)]) if data else None
        if header is None or header.refused:
            return False
        history = self._watch.history
        update, commit = (
            history.updates[update_digest(header)],
            history.commits.get(position),
        )
        is_listed = commit is not None and any(
            entry.digest == update.digest for entry in _entries(commit.header.roster)
        )
        return not is_listed and history.counting(update) is None

    def _require_all(
        self, process: SimProcess, document: RosterDocument, reader: BucketReader
    ) -> None:
        """Report an update that a poll before the decision would have found."""
        listed = {entry.island for entry in document.roster.entries if entry.digest}
        before_s = self._world.scheduler.now_s - LOOK_S
        for name, member in reader.view.documents.items():
            put_s = self._published_s(document, member, reader)
            if name in listed or put_s is None or put_s > before_s:
                continue
            self._watch.report(
                claims.NOTHING_LEFT_OUT,
                process.name,
                f"closes {_name(document)} without {name}, whose update exists "
                f"since {put_s:.3f} s",
            )

    def _published_s(
        self, document: RosterDocument, member: MemberDocument, reader: BucketReader
    ) -> float | None:
        """Return when an island has put an update that the roster could list."""
        island, incarnation = member.beat.island, member.beat.incarnation
        if not reader.view.is_async:
            prefix = keys.updates(document.fragment, document.round)
            key = f"{prefix}{IncarnationKey(keys.slug(island), incarnation)}"
            return self._bucket.changed_s.get(key)
        first = keys.arrival(document.fragment, UpdateKey.of(0, island, incarnation))
        standing = [
            put_s
            for key, put_s in self._bucket.changed_s.items()
            if key.startswith(first[:-1])
            and (update := keys.arrival_of(key))
            and update.round <= document.round
            and not reader.view.is_over(document.fragment, island, update)
            and key in self._bucket.objects
        ]
        return min(standing, default=None)


def key_of(document: RosterDocument, entry: RosterEntry, *, is_async: bool) -> str:
    """Return the key of an update that a roster lists."""
    if not is_async:
        position = (document.fragment, document.round)
        return keys.update(*position, entry.island, entry.incarnation)
    label = document.round - entry.age
    update = UpdateKey.of(label, entry.island, entry.incarnation)
    return keys.arrival(document.fragment, update)


def _roster_key(document: RosterDocument) -> tuple[int, int, bytes]:
    return document.fragment, document.round, document.roster.packed


def _name(document: RosterDocument) -> str:
    return f"round {document.round} of fragment {document.fragment}"


def _entries(roster: Roster | None) -> tuple[RosterEntry, ...]:
    return roster.entries if roster is not None else ()


def _may_count(
    reader: BucketReader, document: RosterDocument, entry: RosterEntry
) -> bool:
    """Return whether the entry is of the last incarnation, or named by that one."""
    member = reader.view.documents.get(entry.island)
    return member is not None and (
        member.beat.incarnation == entry.incarnation
        or any(
            (stand.fragment, stand.round, stand.incarnation)
            == (document.fragment, document.round - entry.age, entry.incarnation)
            for stand in member.stands
        )
    )


class WatchedStore:
    """A store that checks and delays rosters. Implements `Store`."""

    def __init__(
        self,
        inner: Store,
        referee: BucketReferee,
        process: SimProcess,
        troubles: StoreTroubles,
    ) -> None:
        self._inner, self._referee, self._process = inner, referee, process
        self._troubles = troubles
        self.reader: BucketReader | None = None

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        if ROSTER.fullmatch(key) and self.reader is not None:
            document = parse(documents.ROSTER, b"".join(parts), key=key)
            self._referee.closers.decided(self._process, document, self.reader)
            self._delay_roster()
        return self._inner.put_new(key, parts)

    def _delay_roster(self) -> None:
        """Sleep between a decision and its put, while a fault requires it."""
        if self._troubles.roster_lags:
            self._process.scheduler.sleep(max(self._troubles.roster_lags))

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._inner.put(key, parts)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return self._inner.get(key, first, size)

    def items(self, prefix: str) -> list[Item]:
        return self._inner.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._inner.remove(keys)


class WatchedExchange:
    """An exchange that reports updates and outcomes. Implements `Exchange`."""

    def __init__(
        self, inner: StoreExchange, runtime: SimRuntime, ports: WatchedPorts
    ) -> None:
        self._inner, self._runtime = inner, runtime
        self._incarnation, self._learn = ports.incarnation, ports.learn
        self.join = inner.join
        self.heartbeat = inner.heartbeat

    def publish(self, frame: Frame) -> Reception:
        if not frame.header.kind.is_update:
            return self._inner.publish(frame)
        self._incarnation.published(frame)
        reception = self._inner.publish(frame)
        self._incarnation.acknowledged(frame, reception)
        return reception

    def outcome(
        self, fragment: int, round: int, *, wait_s: float, has_body: bool = True
    ) -> Outcome | None:
        outcome = self._inner.outcome(fragment, round, wait_s=wait_s, has_body=has_body)
        if outcome is not None:
            self._learn(outcome)
        return outcome

    def state(self, fragment: int) -> Frame:
        frame = self._inner.state(fragment)
        self._learn(frame)
        return frame

    def open_data(self, island: str, incarnation: int, data: DataSpec) -> DataSpec:
        return self._inner.open_data(island, incarnation, data)

    def claim(self, ask: Ask) -> Claim:
        return self._inner.claim(ask)

    def leave(self, island: str, incarnation: int) -> None:
        try:
            self._inner.leave(island, incarnation)
        finally:
            self._runtime.close()
