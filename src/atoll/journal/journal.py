"""The durable record of a run: its settings, its members and its outcomes.

Rule 1: the log is the commit point. The files that a record names are durable before
        the record is, and a record that is not durable did not happen.
Rule 2: a method that raises has changed nothing that this journal will ever say; a
        crash before the next success may still bring the record back, whole.
Rule 3: bytes on the disk are judged like bytes from a stranger.

On the disk: `log/<segment>` and `log/<segment>.end`, `means/<fragment>/<round>` and
`bodies/<number>` (the bodies of outcomes), `states/<fragment>/<round>`,
`constants/<digest>`, `departing/<fragment>/<round>-<digest of the island's name>`, and
`receipts.key`.

One thread writes. Beside it `prepare`, `draft`, `compact` and `seal` may run in others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from atoll.disk import (
    Disk,
    DiskSpace,
)
from atoll.errors import CorruptError, DiskError, UsageError
from atoll.journal import records
from atoll.journal.constants import FOLDER as CONSTANTS
from atoll.journal.constants import ConstantFiles
from atoll.journal.encoding import decode, encode
from atoll.journal.files import (
    FOLDERS,
    SHARED,
    STATES,
    U8,
    Body,
    BodyFiles,
    DepartingFiles,
    Drafts,
    Framed,
    StoredBody,
    departing_name,
    files_ahead,
    is_large,
    key_of,
    load_receipt_key,
    over_files,
    require_not_founded,
    state_name,
    stored_frame,
    views_of,
)
from atoll.journal.files import NAME as RECEIPT_KEY
from atoll.journal.log import FOLDER as LOG
from atoll.journal.log import (
    CutTail,
    RecordLog,
)
from atoll.journal.replay import (
    RecordedRun,
)
from atoll.journal.snapshots import (
    JournaledAnchors,
    Snapshots,
)
from atoll.protocol import ModelSpec
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, Roster, pack, update_digest

RECENT = 2
"""Outcomes of each fragment that are kept in memory, without their bodies: every
island asks for them."""

Note = (
    records.JoinedRecord
    | records.LeftRecord
    | records.EpochRecord
    | records.PauseRecord
    | records.MoveRecord
    | records.CountedRecord
    | records.WindowRecord
    | records.ConstantRecord
    | records.DataRecord
    | records.ClaimRecord
    | records.ReleasedRecord
    | records.LedgerRecord
    | records.HoldingRecord
    | records.EndSetRecord
    | records.EndedRecord
)
"""A record that stands for itself: no file of the journal's own goes with it."""


class Journal:
    """One run's journal. Get it by `create` or `open`."""

    def __init__(self, disk: Disk, log: RecordLog) -> None:
        self._disk, self._log = disk, log
        self.room = DiskSpace(disk.free_bytes)
        """Disk space for other uses, beyond the reserve for commits."""

        self._drafts = Drafts(disk)
        self._bodies = BodyFiles(disk, self._drafts)
        self._departing = DepartingFiles(disk, self._drafts, self.room)
        self.room.reclaimers.append(self._collect_departed)
        self._recent: dict[tuple[int, int], records.AgreedRecord] = {}
        self._reports: list[str] = []
        """Files that are later than the log, or missing beside it, in words."""

        self._prepared: (
            tuple[Header, records.BodyLocation | None, str | None] | None
        ) = None
        self.recorded = RecordedRun(self._roster)
        self._snapshots = Snapshots(disk, self.recorded, self._bodies, self._agreed)
        self.past = JournaledAnchors(
            disk, self.recorded, self._bodies, self._read_agreed
        )
        """Rounds that are over, while compaction has left them."""

        self.constants = ConstantFiles(disk, self.recorded, self.note, self.room)
        """The stored constants of the run's model."""

        self.receipt_key = load_receipt_key(disk)
        """Key of the receipts for committed rounds. It never leaves the coordinator."""

        self._read_back()

    @classmethod
    def create(cls, disk: Disk, created: records.CreatedRecord) -> Journal:
        """Begin the journal of a new run; it is durable on return.

        Raises:
            UsageError: there is a journal on the disk.
            CorruptError: there is one without its log.
        """
        _require_log_or_nothing(disk)
        if not disk.names(LOG):
            load_receipt_key(disk)  # before the log: a run that exists has its key
        journal = cls(disk, RecordLog.create(disk, encode(created)))
        with suppress(DiskError):  # the owner tries again
            journal.seal()
        return journal

    @classmethod
    def open(cls, disk: Disk) -> Journal:
        """Return the journal on a disk, with everything that was promised.

        Unfinished writes of a crash are cut off or removed, and `cut` describes them;
        `damage` describes other faults that the journal can tolerate.

        Raises:
            UsageError: there is none.
            CorruptError: something promised is damaged or missing; nothing is removed.
        """
        _require_log_or_nothing(disk)
        has_key = bool(disk.names(RECEIPT_KEY))
        journal = cls(disk, RecordLog.open(disk))
        if not has_key and not journal._log.was_first_version:
            journal._reports.append(
                f"{RECEIPT_KEY} is missing, and another key was made: islands cannot "
                "prove earlier rounds. Restore it from a copy."
            )
        if not journal.recorded.fragments:
            require_not_founded(disk)
        journal._snapshots.check(journal._bodies.open(journal.recorded.fragments))
        journal._sweep()
        with suppress(DiskError):  # the owner tries again
            journal.seal()
        journal.constants.open()
        if journal.recorded.fragments:
            journal._bodies.prepare()
        return journal

    @property
    def damage(self) -> list[str]:
        """Tolerated faults, in sentences."""
        return [
            *self._log.damage,
            *self._reports,
            *self._snapshots.damage,
            *self.constants.damage,
        ]

    @property
    def reports(self) -> list[str]:
        """The cut-off tail and the damage, in sentences."""
        return [*([str(self.cut)] if self.cut else []), *self.damage]

    @property
    def cut(self) -> CutTail | None:
        """The torn tail of an interrupted append, found when the log was opened."""
        return self._log.cut

    def append(self, record: Note) -> None:
        """Add a record; it is durable when `sync` has returned.

        Raises:
            UsageError: it cannot follow the records of the journal.
            DiskError: nothing was added; safe to repeat.
        """
        if not isinstance(record, Note):
            raise UsageError(
                f"{type(record).__name__} has its own files. Call found, "
                "arrive, passed, commit, stage or recover."
            )
        self.recorded.require(record)
        self.recorded.apply(record, self._log.append(encode(record)))

    def note(self, record: Note) -> None:
        """Add a record that is durable when this returns.

        Raises:
            UsageError: it cannot follow the records of the journal.
            DiskError: nothing was added; safe to repeat.
        """
        self.recorded.require(record)
        self._log.heal()
        self._record(record)

    def sync(self) -> None:
        """Return when everything appended is durable. Safe to repeat after an error."""
        self._log.sync()

    def seal(self) -> None:
        """Write down in a second place how far the log is durable. Safe to repeat.

        Afterwards opening can tell a log that lost durable records from one with an
        interrupted append.

        Raises:
            DiskError: nothing has changed; safe to repeat.
        """
        self._log.seal()

    def found(self, model: ModelSpec, states: Sequence[Framed]) -> None:
        """Give the run its first weights: a state frame of round 0 per fragment.

        Raises:
            UsageError: the run has weights, or the frames are not those.
            DiskError: the run has none; safe to repeat.
        """
        for index, (header, body) in enumerate(states):
            self._require_frame(header, body, FrameKind.STATE)
            if (header.fragment, header.round) != (index, 0):
                raise UsageError(
                    f"The {header.name} cannot found fragment {index}: give one state "
                    "of round 0 per fragment, in order."
                )
        record = records.FoundedRecord(
            model=model, digests=tuple(h.base for h, _ in states)
        )
        self.recorded.require(record)
        self._log.heal()
        self._bodies.prepare()
        names = [state_name(index, 0) for index in range(len(states))]
        for name, (header, body) in zip(names, states, strict=True):
            self._drafts.write(name, header, body)
        self._record(record, *names)

    def arrive(self, model: ModelSpec, states: Iterable[Framed]) -> None:
        """Give the run the weights that it has elsewhere: a state frame per fragment.

        The caller has verified them; one at a time is in memory.

        Raises:
            UsageError: the run has weights, or a frame is not the next fragment's.
            DiskError: the run has none; begin on another disk.
        """
        self.recorded.require_no_weights()
        self._log.heal()
        self._bodies.prepare()
        headers: list[Header] = []
        for index, (header, body) in enumerate(states):
            self._require_frame(header, body, FrameKind.STATE)
            if header.fragment != index:
                raise UsageError(
                    f"The {header.name} is not of fragment {index}: give one state "
                    "per fragment, in order."
                )
            self._drafts.write(state_name(index, header.round), header, body)
            headers.append(header)
        record = records.ArrivedRecord(
            model=model,
            rounds=tuple(header.round for header in headers),
            digests=tuple(header.base for header in headers),
        )
        names = [state_name(header.fragment, header.round) for header in headers]
        self._record(record, *names)

    def passed(
        self, fragment: int, *, bases: Sequence[bytes], outcomes: Sequence[Framed]
    ) -> None:
        """Keep what a fragment went through before the run came here by `arrive`.

        `bases` are the digests of the states before that one, oldest first; `outcomes`
        are the agreed frames of up to two of the last rounds, in order.

        Raises:
            UsageError: they do not lead to the fragment's state.
            DiskError: nothing is kept; safe to repeat.
        """
        for header, body in outcomes:
            self._require_frame(header, body, FrameKind.AGREED)
        self._log.heal()
        stored = [self._bodies.keep(header, body) for header, body in outcomes]
        record = records.PassedRecord(
            fragment=fragment,
            bases=tuple(bases),
            outcomes=tuple(records.AgreedRecord.of(header) for header, _ in outcomes),
            locations=tuple(location for location, _ in stored),
        )
        self.recorded.require(record)
        self._record(record, *[draft for _, draft in stored if draft])

    def prepare(self, agreed: Header, body: Body) -> None:
        """Make the body of an outcome durable, ahead of its `commit`.

        May run beside all calls but `commit`, in one thread at a time. A small body
        costs nothing to wait for, and stays for `commit`.

        Raises:
            DiskError: nothing is prepared; safe to repeat.
        """
        if is_large(agreed):
            self._prepared = (agreed, *self._bodies.keep(agreed, body))

    def commit(
        self, agreed: Header, body: Body, *, digest_after: bytes, epoch: int
    ) -> None:
        """Make the outcome of a round durable: it counts when this returns.

        Raises:
            UsageError: it is not the fragment's next round on its present state.
            DiskError: nothing is committed; safe to repeat.
        """
        self._require_frame(agreed, body, FrameKind.AGREED)
        record = records.CommittedRecord(
            agreed=records.AgreedRecord.of(agreed),
            digest_after=digest_after,
            epoch=epoch,
            location=records.BodyLocation() if agreed.elements else None,
        )
        self.recorded.require(record)
        # A withdrawn record of this round must not outlive the body that it names.
        self._log.heal()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is agreed:
            _, location, draft = prepared
        else:
            location, draft = self._bodies.keep(agreed, body)
        self._record(replace(record, location=location), *([draft] if draft else []))
        self._keep((agreed.fragment, agreed.round), record.agreed)

    def draft(self, header: Header, body: U8) -> None:
        """Have a file of a departing update before its `stage`, which is then short.

        May run concurrently with all other calls, in any thread. A draft that is never
        staged is removed when its round is over.

        Raises:
            UsageError: it is no departing update of this run.
            DiskError: nothing was written; safe to repeat.
        """
        self._require_frame(header, body, FrameKind.DEPARTING)
        if not self.recorded.is_over(header):
            self._departing.draft(header, body)

    def stage(self, header: Header, body: U8) -> None:
        """Make a departing update durable until its round is over. Safe to repeat.

        Raises:
            UsageError: the round is over, or another update stands for the island.
            DiskError: nothing is staged; safe to repeat.
        """
        self._require_frame(header, body, FrameKind.DEPARTING)
        record = records.StagedRecord(
            fragment=header.fragment,
            round=header.round,
            island=header.island,
            digest=update_digest(header),
        )
        self.recorded.require(record)
        standing = self.recorded.staged.get(key_of(header))
        if standing not in (None, record):
            raise UsageError(
                f"Another departing update of island {header.island!r} stands for "
                f"round {header.round} of fragment {header.fragment}."
            )
        if standing is not None:
            self._log.sync()
            return
        self._log.heal()
        with self._departing.staging(header, body) as name:
            self._record(record, name)

    def staged(self, fragment: int, round: int, island: str) -> Framed:
        """Return a departing update whose round is not over.

        Raises:
            UsageError: there is none.
            CorruptError: its file is missing or damaged.
        """
        key = (fragment, round, island)
        if key not in self.recorded.staged:
            raise UsageError(
                f"No departing update of island {island!r} is staged for round {round} "
                f"of fragment {fragment}."
            )
        stored = stored_frame(self._disk, departing_name(key))
        header = stored.header
        if (
            header.kind is not FrameKind.DEPARTING
            or update_digest(header) != self.recorded.staged[key].digest
        ):
            raise CorruptError(
                f"{stored.name} is damaged: it holds another frame than was staged."
            )
        return header, stored.read()

    def recover(self, state: Framed, outcomes: Sequence[Header] = ()) -> None:
        """Go on from an island's state of a later round, the rounds between being lost.

        `outcomes` are up to two of the last agreed headers that islands still hold, in
        order of rounds. The caller has verified the state.

        Raises:
            UsageError: the state is not later than the journal.
            DiskError: the journal is unchanged; safe to repeat.
        """
        header, body = state
        self._require_frame(header, body, FrameKind.STATE)
        record = records.RecoveredRecord(
            fragment=header.fragment,
            round=header.round,
            digest=header.base,
            outcomes=tuple(records.AgreedRecord(pack(outcome)) for outcome in outcomes),
        )
        self.recorded.require(record)
        self._log.heal()
        name = state_name(header.fragment, header.round)
        self._disk.remove(name)  # one that a lost part of the log may have named
        self._drafts.write(name, header, body)
        self._record(record, name)

    def outcome(
        self, fragment: int, round: int, *, has_body: bool = True
    ) -> tuple[Header, U8 | None]:
        """Return the outcome of a round; the body is None once it is collected.

        With `has_body` False it is not read at all, and None.

        Raises:
            UsageError: the round is not over, or was lost before a recovery.
            CorruptError: the log or the body is damaged.
        """
        agreed = self._agreed(fragment, round)
        recorded = self.recorded.fragment(fragment)
        location = recorded.locations.get(round)
        is_gone = location is None and round not in recorded.void
        if is_gone or not has_body:
            return agreed.header, None
        try:
            return agreed.header, self._bodies.stored(agreed, location).read()
        except CorruptError:
            if location is None or round in recorded.locations:
                raise
            return agreed.header, None  # collected while it was read

    def body(self, fragment: int, round: int) -> StoredBody | None:
        """Return the stored body of an outcome; None once it is collected.

        Raises:
            UsageError: the round is not over, or was lost before a recovery.
            CorruptError: the log or the body is damaged.
        """
        agreed = self._agreed(fragment, round)
        location = self.recorded.fragment(fragment).locations.get(round)
        return None if location is None else self._bodies.stored(agreed, location)

    def state(self, fragment: int) -> FragmentState:
        """Return the present state of a fragment, replayed to the recorded bits.

        Raises:
            CorruptError: naming the round and both digests, or the missing file.
        """
        return self._snapshots.load(fragment)

    def compact(self, fragment: int) -> None:
        """Write a state file of the newest round, and remove files that it replaces.

        Works on the files, a piece at a time. Safe to repeat, and crash-safe at every
        instant.

        Raises:
            CorruptError: the journal does not replay to the recorded digest.
            DiskError: nothing is lost; safe to repeat.
        """
        self._snapshots.compact(fragment)
        self._departing.collect(fragment, over_files(self.recorded, fragment))

    def _collect_departed(self) -> None:
        """Remove departing updates whose rounds are over, ahead of compaction."""
        for fragment in range(len(self.recorded.fragments)):
            with suppress(DiskError):
                self._departing.collect(fragment, over_files(self.recorded, fragment))

    def _require_frame(self, header: Header, body: Body, kind: FrameKind) -> None:
        created = self.recorded.created
        assert created is not None
        if header.kind is not kind or header.run != created.run:
            raise UsageError(
                f"The {header.name} of run {header.run!r} does not belong here: the "
                f"journal of run {created.run!r} takes its {kind.name.lower()} frame."
            )
        size = sum(map(len, views_of(body)))
        if size != header.body_bytes:
            raise UsageError(
                f"A body of {size} bytes is not that of the {header.name}, which "
                f"has {header.body_bytes}."
            )

    def _record(self, record: records.Record, *names: str) -> None:
        """Make a record durable; `names` are the files that it names."""
        sequence = self._log.sequence
        try:
            position = self._log.append(encode(record))
            self._log.sync()
        except BaseException:
            self._log.withdraw(sequence)
            raise
        self.recorded.apply(record, position)
        for name in names:
            self._drafts.keep(name)

    def _read_back(self) -> None:
        for position, payload in self._log.read_back():
            try:
                record = decode(payload)
                self.recorded.require(record)
                self.recorded.apply(record, position)
            except (UsageError, CorruptError) as exc:
                raise CorruptError(
                    f"log segment {position.segment} cannot be replayed at byte "
                    f"{position.first}: {exc}"
                ) from exc

    def _agreed(self, fragment: int, round: int) -> records.AgreedRecord:
        # Compaction runs in another thread, and may remove cached records meanwhile.
        key = (fragment, round)
        agreed = self._recent.get(key)
        if agreed is None:
            agreed = self._read_agreed(fragment, round)
            self._keep(key, agreed)
        return agreed

    def _keep(self, key: tuple[int, int], agreed: records.AgreedRecord) -> None:
        self._recent[key] = agreed
        beyond = len(self._recent) - RECENT * max(1, len(self.recorded.fragments))
        for oldest in list(self._recent)[: max(0, beyond)]:
            self._recent.pop(oldest, None)

    def _read_agreed(self, fragment: int, round: int) -> records.AgreedRecord:
        recorded = self.recorded.fragment(fragment)
        if round not in recorded.positions:
            raise UsageError(
                f"Round {round} of fragment {fragment} has no outcome here: the last "
                f"one committed is {recorded.round}."
            )
        record = decode(self._log.read(recorded.positions[round]))
        match record:
            case records.CommittedRecord(agreed=agreed):
                return agreed
            case (
                records.RecoveredRecord(outcomes=outcomes)
                | records.PassedRecord(outcomes=outcomes)
            ):
                return next(
                    outcome for outcome in outcomes if outcome.fixed.round == round
                )
        raise CorruptError(f"the log has changed at {recorded.positions[round]}.")

    def _roster(self, fragment: int, round: int) -> Roster:
        return self._agreed(fragment, round).roster

    def _sweep(self) -> None:
        """Remove what no record names, unless it shows that records are missing."""
        later = files_ahead(self._disk, self.recorded.fragments)
        retained = {file.name for file in later}
        self._reports += [str(file) for file in later]
        for name in retained:
            self._drafts.give_way(name)
        self._log.sweep()
        self._bodies.sweep(self.recorded.fragments, retained)
        self._departing.open(self.recorded.staged, retained)
        if not self.recorded.fragments:
            for name in self._disk.names(STATES):
                self._disk.remove(name)


def _require_log_or_nothing(disk: Disk) -> None:
    """Return if there is a log, or no file of a journal at all."""
    if disk.names(LOG):
        return
    for folder in (*FOLDERS, SHARED, CONSTANTS):
        for name in disk.names(folder):
            raise CorruptError(
                f"{name} exists, and no log that names it: {LOG} is missing. Restore "
                "the journal from a copy."
            )
