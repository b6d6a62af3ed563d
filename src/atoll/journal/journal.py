"""The durable record of a run: what it is, who took part, what every round came to.

Rule 1: the log is the commit point. What a record names is durable before the record
        is, and a record that is not durable did not happen.
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

from atoll.disk import Disk, Room
from atoll.errors import CorruptError, DiskError, UsageError
from atoll.journal.bodies import SHARED, Bodies, is_large
from atoll.journal.constants import FOLDER as CONSTANTS
from atoll.journal.constants import ConstantFiles
from atoll.journal.departing import Departing, departing_name, key_of
from atoll.journal.encoding import decode, encode
from atoll.journal.later import FOLDERS, later_files, require_not_founded
from atoll.journal.log import FOLDER as LOG
from atoll.journal.log import Cut, Log
from atoll.journal.past import Past
from atoll.journal.receipt_key import NAME as RECEIPT_KEY
from atoll.journal.receipt_key import load_receipt_key
from atoll.journal.recorded import Recorded
from atoll.journal.records import (
    Agreed,
    Arrived,
    Committed,
    ConstantKept,
    CountedSet,
    Created,
    Ended,
    EpochSet,
    Founded,
    Joined,
    Left,
    MoveSet,
    Passed,
    PauseSet,
    Place,
    Record,
    Recovered,
    Staged,
)
from atoll.journal.snapshots import Snapshots
from atoll.journal.states import STATES, state_name
from atoll.journal.stored import U8, Drafts, Framed, StoredBody, stored_frame
from atoll.protocol import ModelSpec
from atoll.weights import FragmentState
from atoll.wire import Header, Kind, Roster, pack, update_digest

RECENT = 2
"""Outcomes of each fragment that are kept in memory, without their bodies: every
island asks for them."""

Note = Joined | Left | EpochSet | PauseSet | MoveSet | CountedSet | ConstantKept | Ended
"""A record that stands for itself: no file of the journal's own goes with it."""


class Journal:
    """One run's journal. Get it by `create` or `open`."""

    def __init__(self, disk: Disk, log: Log) -> None:
        self._disk, self._log = disk, log
        self.room = Room(disk.free_bytes)
        """What others may take of the disk: it keeps a reserve for commits."""

        self._drafts = Drafts(disk)
        self._bodies = Bodies(disk, self._drafts)
        self._departing = Departing(disk, self._drafts, self.room)
        self.room.reclaimers.append(self._collect_departed)
        self._recent: dict[tuple[int, int], Agreed] = {}
        self._found: list[str] = []
        """Files that are later than the log, or missing beside it, in words."""

        self._prepared: tuple[Header, Place | None, str | None] | None = None
        self.recorded = Recorded(self._roster)
        self._snapshots = Snapshots(disk, self.recorded, self._bodies, self._agreed)
        self.past = Past(disk, self.recorded, self._bodies, self._read_agreed)
        """Rounds that are over, while compaction has left them."""

        self.constants = ConstantFiles(disk, self.recorded, self.note, self.room)
        """What the run keeps of its model's constants."""

        self.receipt_key = load_receipt_key(disk)
        """Proves what the run has committed. It never leaves the coordinator."""

        self._read_back()

    @classmethod
    def create(cls, disk: Disk, created: Created) -> Journal:
        """Begin the journal of a new run; it is durable on return.

        Raises:
            UsageError: there is a journal on the disk.
            CorruptError: there is one without its log.
        """
        _require_log_or_nothing(disk)
        if not disk.names(LOG):
            load_receipt_key(disk)  # before the log: a run that exists has its key
        journal = cls(disk, Log.create(disk, encode(created)))
        with suppress(DiskError):  # the owner tries again
            journal.seal()
        return journal

    @classmethod
    def open(cls, disk: Disk) -> Journal:
        """Return the journal on a disk, with everything that was promised.

        What a crash left unfinished is cut off or removed, and `cut` tells of it;
        `damage` tells what else was wrong and could be done without.

        Raises:
            UsageError: there is none.
            CorruptError: something promised is damaged or missing; nothing is removed.
        """
        _require_log_or_nothing(disk)
        has_key = bool(disk.names(RECEIPT_KEY))
        journal = cls(disk, Log.open(disk))
        if not has_key and not journal._log.was_first_version:
            journal._found.append(
                f"{RECEIPT_KEY} is missing, and another key was made: what islands can "
                "prove of earlier rounds is not known any more. Restore it from a copy."
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
        """What did not verify and could be done without, in words."""
        return [
            *self._log.damage,
            *self._found,
            *self._snapshots.damage,
            *self.constants.damage,
        ]

    @property
    def reports(self) -> list[str]:
        """What was cut off and what was damaged, in words."""
        return [*([str(self.cut)] if self.cut else []), *self.damage]

    @property
    def cut(self) -> Cut | None:
        """What an interrupted append had left at the end of the log when opened."""
        return self._log.cut

    def append(self, record: Note) -> None:
        """Add a record; it is durable when `sync` has returned.

        Raises:
            UsageError: it cannot follow what the journal has.
            DiskError: nothing was added; safe to repeat.
        """
        if not isinstance(record, Note):
            raise UsageError(
                f"{type(record).__name__} comes with files of its own. Call found, "
                "arrive, passed, commit, stage or recover."
            )
        self.recorded.require(record)
        self.recorded.apply(record, self._log.append(encode(record)))

    def note(self, record: Note) -> None:
        """Add a record that is durable when this returns.

        Raises:
            UsageError: it cannot follow what the journal has.
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
            self._require_frame(header, body, Kind.STATE)
            if (header.fragment, header.round) != (index, 0):
                raise UsageError(
                    f"The {header.name} cannot found fragment {index}: give one state "
                    "of round 0 per fragment, in order."
                )
        record = Founded(model=model, digests=tuple(h.base for h, _ in states))
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
            self._require_frame(header, body, Kind.STATE)
            if header.fragment != index:
                raise UsageError(
                    f"The {header.name} is not of fragment {index}: give one state "
                    "per fragment, in order."
                )
            self._drafts.write(state_name(index, header.round), header, body)
            headers.append(header)
        record = Arrived(
            model=model,
            rounds=tuple(header.round for header in headers),
            digests=tuple(header.base for header in headers),
        )
        names = [state_name(each.fragment, each.round) for each in headers]
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
            self._require_frame(header, body, Kind.AGREED)
        self._log.heal()
        kept = [self._bodies.keep(header, body) for header, body in outcomes]
        record = Passed(
            fragment=fragment,
            bases=tuple(bases),
            outcomes=tuple(Agreed.of(header) for header, _ in outcomes),
            places=tuple(place for place, _ in kept),
        )
        self.recorded.require(record)
        self._record(record, *[draft for _, draft in kept if draft])

    def prepare(self, agreed: Header, body: U8) -> None:
        """Make the body of an outcome durable, ahead of its `commit`.

        May run beside all calls but `commit`, in one thread at a time. A small body
        costs nothing to wait for, and stays for `commit`.

        Raises:
            DiskError: nothing is prepared; safe to repeat.
        """
        if is_large(agreed):
            self._prepared = (agreed, *self._bodies.keep(agreed, body))

    def commit(
        self, agreed: Header, body: U8, *, digest_after: bytes, epoch: int
    ) -> None:
        """Make the outcome of a round durable: it counts when this returns.

        Raises:
            UsageError: it is not the fragment's next round on its present state.
            DiskError: nothing is committed; safe to repeat.
        """
        self._require_frame(agreed, body, Kind.AGREED)
        record = Committed(
            agreed=Agreed.of(agreed),
            digest_after=digest_after,
            epoch=epoch,
            place=Place() if agreed.elements else None,
        )
        self.recorded.require(record)
        # A withdrawn record of this round must not outlive the body that it names.
        self._log.heal()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is agreed:
            _, place, draft = prepared
        else:
            place, draft = self._bodies.keep(agreed, body)
        self._record(replace(record, place=place), *([draft] if draft else []))
        self._keep((agreed.fragment, agreed.round), record.agreed)

    def draft(self, header: Header, body: U8) -> None:
        """Have a file of a departing update before its `stage`, which is then short.

        May run beside all other calls, in any thread. What is never staged is removed
        when its round is over.

        Raises:
            UsageError: it is no departing update of this run.
            DiskError: nothing is there; safe to repeat.
        """
        self._require_frame(header, body, Kind.DEPARTING)
        if self.recorded.fragment(header.fragment).round < header.round:
            self._departing.draft(header, body)

    def stage(self, header: Header, body: U8) -> None:
        """Make a departing update durable until its round is over. Safe to repeat.

        Raises:
            UsageError: the round is over, or another update stands for the island.
            DiskError: nothing is staged; safe to repeat.
        """
        self._require_frame(header, body, Kind.DEPARTING)
        record = Staged(
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
            header.kind is not Kind.DEPARTING
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
            DiskError: the journal is as it was; safe to repeat.
        """
        header, body = state
        self._require_frame(header, body, Kind.STATE)
        record = Recovered(
            fragment=header.fragment,
            round=header.round,
            digest=header.base,
            outcomes=tuple(Agreed(pack(outcome)) for outcome in outcomes),
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
        """Return what a round came to; the body is None when it is kept no more.

        With `has_body` False it is not read at all, and None.

        Raises:
            UsageError: the round is not over, or was lost before a recovery.
            CorruptError: the log or the body is damaged.
        """
        agreed = self._agreed(fragment, round)
        known = self.recorded.fragment(fragment)
        place = known.places.get(round)
        is_gone = place is None and round not in known.void
        if is_gone or not has_body:
            return agreed.header, None
        try:
            return agreed.header, self._bodies.stored(agreed, place).read()
        except CorruptError:
            if place is None or round in known.places:
                raise
            return agreed.header, None  # collected while it was read

    def body(self, fragment: int, round: int) -> StoredBody | None:
        """Return where the body of an outcome lies; None when it is kept no more.

        Raises:
            UsageError: the round is not over, or was lost before a recovery.
            CorruptError: the log or the body is damaged.
        """
        agreed = self._agreed(fragment, round)
        place = self.recorded.fragment(fragment).places.get(round)
        return None if place is None else self._bodies.stored(agreed, place)

    def state(self, fragment: int) -> FragmentState:
        """Return the present state of a fragment, replayed to the recorded bits.

        Raises:
            CorruptError: naming the round and both digests, or what is missing.
        """
        return self._snapshots.load(fragment)

    def compact(self, fragment: int) -> None:
        """Have a state file of the newest round, and collect what is needed no more.

        Works a piece at a time on what is on the disk. Safe to repeat, and at every
        instant of a crash.

        Raises:
            CorruptError: the journal does not replay to the recorded digest.
            DiskError: nothing is lost; safe to repeat.
        """
        self._snapshots.compact(fragment)
        self._departing.collect(fragment, self.recorded.fragment(fragment).round)

    def _collect_departed(self) -> None:
        """Remove departing updates whose rounds are over, ahead of compaction."""
        for fragment, known in enumerate(self.recorded.fragments):
            with suppress(DiskError):
                self._departing.collect(fragment, known.round)

    def _require_frame(self, header: Header, body: U8, kind: Kind) -> None:
        created = self.recorded.created
        assert created is not None
        if header.kind is not kind or header.run != created.run:
            raise UsageError(
                f"The {header.name} of run {header.run!r} does not belong here: the "
                f"journal of run {created.run!r} takes its {kind.name.lower()} frame."
            )
        if len(body) != header.body_bytes:
            raise UsageError(
                f"A body of {len(body)} bytes is not that of the {header.name}, which "
                f"has {header.body_bytes}."
            )

    def _record(self, record: Record, *names: str) -> None:
        """Make a record durable; `names` are the files that it names."""
        sequence = self._log.sequence
        try:
            where = self._log.append(encode(record))
            self._log.sync()
        except BaseException:
            self._log.withdraw(sequence)
            raise
        self.recorded.apply(record, where)
        for name in names:
            self._drafts.keep(name)

    def _read_back(self) -> None:
        for where, payload in self._log.read_back():
            try:
                record = decode(payload)
                self.recorded.require(record)
                self.recorded.apply(record, where)
            except (UsageError, CorruptError) as exc:
                raise CorruptError(
                    f"log segment {where.segment} cannot be replayed at byte "
                    f"{where.first}: {exc}"
                ) from exc

    def _agreed(self, fragment: int, round: int) -> Agreed:
        # Compaction asks from a thread of its own: what is kept may go at any moment.
        key = (fragment, round)
        agreed = self._recent.get(key)
        if agreed is None:
            agreed = self._read_agreed(fragment, round)
            self._keep(key, agreed)
        return agreed

    def _keep(self, key: tuple[int, int], agreed: Agreed) -> None:
        self._recent[key] = agreed
        beyond = len(self._recent) - RECENT * max(1, len(self.recorded.fragments))
        for oldest in list(self._recent)[: max(0, beyond)]:
            self._recent.pop(oldest, None)

    def _read_agreed(self, fragment: int, round: int) -> Agreed:
        known = self.recorded.fragment(fragment)
        if round not in known.where:
            raise UsageError(
                f"Round {round} of fragment {fragment} has no outcome here: the last "
                f"one committed is {known.round}."
            )
        record = decode(self._log.read(known.where[round]))
        match record:
            case Committed(agreed=agreed):
                return agreed
            case Recovered(outcomes=outcomes) | Passed(outcomes=outcomes):
                return next(each for each in outcomes if each.fixed.round == round)
        raise CorruptError(f"the log has changed at {known.where[round]}.")

    def _roster(self, fragment: int, round: int) -> Roster:
        return self._agreed(fragment, round).roster

    def _sweep(self) -> None:
        """Remove what no record names, unless it shows that records are missing."""
        later = later_files(self._disk, self.recorded.fragments)
        kept = {each.name for each in later}
        self._found += [str(each) for each in later]
        for name in kept:
            self._drafts.give_way(name)
        self._log.sweep()
        self._bodies.sweep(self.recorded.fragments, kept)
        self._departing.open(self.recorded.staged, kept)
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
                f"{name} is there, and no log that names it: {LOG} is missing. Restore "
                "the journal from a copy."
            )
