"""Moves of a run between a bucket and a coordinator's directory.

move.json         source, target and identifier of the move
journal.arriving  the run while it is received; rewritten until it is complete
journal           the same journal, after the move

Rule 1: the source decides that the run has moved, after `receive` and before `settle`:
        after a crash in between, `settle` is called again.
Rule 2: one process at a time uses the directory, from `receive` to `settle`.
Rule 3: a received journal is like any other, and is not opened before the move is
        decided. It is complete on return: `receive` has opened it as a restart would.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from atoll.coordinator.service import Service
from atoll.data import DataSpec
from atoll.disk import Disk, SystemDisk, sync_directory
from atoll.errors import CorruptError, NoSuchFile, OutcomeLost, Unreachable, UsageError
from atoll.exchange import Frame
from atoll.exchange.bucket.claims import LedgerDocument, ledger_document
from atoll.exchange.bucket.documents import (
    ControlDocument,
    MemberDocument,
    RosterDocument,
    RunDocument,
    SettingsDocument,
)
from atoll.exchange.bucket.large_objects import constants_of
from atoll.exchange.bucket.move import FragmentProgress, MovedRun
from atoll.exchange.bucket.states import BASES, ROSTERS, counted_progress
from atoll.journal import (
    CountedRecord,
    CreatedRecord,
    EpochRecord,
    HoldingRecord,
    JoinedRecord,
    Journal,
    LedgerRecord,
    PauseRecord,
    WindowRecord,
)
from atoll.journal import LeftRecord as HasLeft
from atoll.protocol import Heartbeat, Phase, TensorSpec
from atoll.protocol.coordinator import unmovable
from atoll.protocol.membership import EVICTED, Member
from atoll.protocol.model import bytes_of
from atoll.protocol.operators import END_ROUNDS, NO_ROUND, end_of
from atoll.security.private_files import (
    private_directory,
    read_private,
    remove_private,
    replace_private,
    translated,
)
from atoll.settings import RunSettings
from atoll.weights import Layout, lay_out, require_state, terms_of
from atoll.wire import verify_body
from atoll.wire.digests import Bytes

JOURNAL, ARRIVING, TICKET = "journal", "journal.arriving", "move.json"
MAX_TICKET_BYTES = 2**14


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The identity of one move to one directory."""

    source: str
    target: str
    nonce: str

    @property
    def command(self) -> str:
        """The command that resumes the move."""
        return f"atoll move {self.source} {self.target}"


class Arrival:
    """A directory that receives a run. Close it after use.

    Raises:
        UsageError: the directory has another run or another move, or another process
            uses it.
    """

    def __init__(self, directory: Path, *, source: str, target: str) -> None:
        self._directory = directory
        self._disk: SystemDisk | None = None
        existing = ticket_of(directory)
        self.has_come = has_journal(directory)
        """Whether the run of this move has arrived."""

        if self.has_come and (existing is None or _route(existing) != (source, target)):
            raise UsageError(
                f"{directory} holds a run already. Choose another directory for the "
                "one that comes: --dir DIR."
            )
        if existing is not None and _route(existing) != (source, target):
            raise UsageError(
                f"Another run is being moved to {directory}: `{existing.command} --dir "
                f"{directory}`. Finish that, give it up with --back, or choose another "
                "directory."
            )
        self.is_begun = existing is not None
        self.ticket = existing or _new_ticket(source, target)

    def close(self) -> None:
        """Release the directory. Safe to repeat."""
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    def prepare(self) -> None:
        """Lock the directory, and make the identity of the move durable.

        Raises:
            UsageError: another process uses it, or has just used it.
        """
        self._own()
        existing = ticket_of(self._directory)
        if has_journal(self._directory) or existing not in (None, self.ticket):
            raise UsageError(
                f"Another process has just used {self._directory}. Say it again."
            )
        data = json.dumps(asdict(self.ticket)).encode() + b"\n"
        replace_private(self._directory / TICKET, data)
        self.is_begun = True

    def receive(self, source: Source) -> None:
        """Write the run's journal from the start, beside its final path."""
        disk = self._own()
        for name in disk.names(""):
            disk.remove(name)
        receive(disk, source)

    def settle(self) -> None:
        """Make the received journal the run's journal. Safe to repeat.

        Raises:
            CorruptError: the received journal has been removed.
        """
        if self.has_come:
            return
        disk = self._own()
        if not disk.names("log/"):
            raise CorruptError(
                f"{disk.root} holds no run, and {self.ticket.source} says that it has "
                "come here. Put it back from a copy."
            )
        journal = self._directory / JOURNAL
        with translated(journal):
            shutil.rmtree(
                journal, ignore_errors=True
            )  # it has no log, so it is not in use
            os.rename(disk.root, journal)
            sync_directory(self._directory)
        self.has_come = True

    def forget(self) -> None:
        """Remove the received journal: the run stays at its source."""
        disk = self._own()
        remove_private(self._directory / TICKET)
        shutil.rmtree(disk.root, ignore_errors=True)
        self.close()

    def _own(self) -> SystemDisk:
        if self._disk is None:
            private_directory(self._directory)
            self._disk = SystemDisk(self._directory / ARRIVING)
        return self._disk


def has_journal(directory: Path) -> bool:
    """Return whether a directory has a run."""
    return any((directory / JOURNAL / "log").glob("*"))


def ticket_of(directory: Path) -> Ticket | None:
    """Return the move to a directory, in progress or complete; None if there is none.

    Raises:
        CorruptError: the file is malformed.
    """
    path = directory / TICKET
    try:
        data = read_private(path, content="move", max_bytes=MAX_TICKET_BYTES)
    except NoSuchFile:
        return None
    try:
        fields = json.loads(data)
        values = {key: fields[key] for key in ("source", "target", "nonce")}
        if not all(isinstance(value, str) for value in values.values()):
            raise TypeError("not a text")
        return Ticket(**values)
    except (ValueError, LookupError, TypeError) as exc:
        raise CorruptError(
            f"{path} does not name the run that is being moved. Choose another "
            "directory."
        ) from exc


def require_arrived(directory: Path) -> None:
    """Check that no run is being moved to a directory.

    Raises:
        UsageError: one is; the message has the command that resumes the move.
    """
    ticket = None if has_journal(directory) else ticket_of(directory)
    if ticket is not None:
        raise UsageError(
            f"A run is being moved to {directory}. Run `{ticket.command} --dir "
            f"{directory}` again to resume, or with --back to cancel; then serve it."
        )


def _new_ticket(source: str, target: str) -> Ticket:
    return Ticket(source=source, target=target, nonce=secrets.token_hex(16))


def _route(ticket: Ticket) -> tuple[str, str]:
    return ticket.source, ticket.target


def moved_run_of(service: Service, _: float) -> MovedRun:
    """Return the description of a moved run, without weights.

    Raises:
        UsageError: the run is not being moved.
        Unreachable: a round is being committed: ask again.
    """
    state, created = service.state, service.journal.recorded.created
    if state.move is None:
        raise UsageError("The run is not being moved. Move it first.")
    if unmovable(state) or any(round.phase is Phase.CLOSING for round in state.rounds):
        raise Unreachable("A round is being closed. Ask again.")
    assert created is not None
    assert state.model is not None
    settings = SettingsDocument(
        run=state.run,
        fingerprint=created.fingerprint,
        settings=RunSettings.from_dict(created.settings),
    )
    return MovedRun(
        settings=settings,
        run=RunDocument(
            run=state.run,
            fingerprint=created.fingerprint,
            founding=state.move.nonce,
            model=state.model,
            constants=_constants(service),
        ),
        controls=tuple(_controls(service, settings.settings)),
        members=tuple(
            _member(service, member) for member in state.members.known.values()
        ),
        fragments=tuple(
            _progress(service, member) for member in range(len(state.rounds))
        ),
        rosters=tuple(_rosters(service)),
        rows=_ledger(service),
    )


def _ledger(service: Service) -> LedgerDocument | None:
    """Return the ledger of rows after the described rounds, if there is one."""
    state, weights = service.state, service.weights
    if state.ledger is None:
        return None
    return ledger_document(
        state.ledger,
        run=state.run,
        number=0,
        rounds=tuple(weights[index].round for index in range(len(state.rounds))),
        incarnations={},
    )


def _constants(service: Service) -> tuple[str, ...]:
    """Return the digests of the constants that the coordinator has to send."""
    stored = {
        constant.digest for constant in service.catalogue.there if bytes_of(constant)
    }
    return tuple(sorted(stored))


def _controls(service: Service, settings: RunSettings) -> Iterator[ControlDocument]:
    """Yield the commands of operators as documents of a bucket."""
    state, epochs = service.state, service.journal.recorded.epochs
    for epoch in epochs:
        if epoch.values.get(END_ROUNDS) == NO_ROUND:
            continue  # covered by the last round, below
        yield ControlDocument(run=state.run, action="set", values=epoch.values)
    _, last = end_of(
        settings,
        [epoch.values for epoch in epochs if epoch.values.get(END_ROUNDS) != NO_ROUND],
    )
    if state.last_round != last:
        yield ControlDocument(
            run=state.run, action="stop", values={}, last_round=state.last_round
        )
    if state.is_paused:
        yield ControlDocument(run=state.run, action="pause", values={})


def _member(service: Service, member: Member) -> MemberDocument:
    """Return the document of a member: every open round waits for it."""
    return MemberDocument(
        run=service.state.run,
        slot=member.slot,
        key=member.key,
        nonce=member.nonce,
        opened=(),
        stands=(),
        beats=0,
        has_left=member.has_left,
        beat=Heartbeat(
            island=member.island,
            incarnation=member.incarnation,
            step=member.step,
            holds=member.holds,
        ),
    )


def _progress(service: Service, fragment: int) -> FragmentProgress:
    state = service.state
    return FragmentProgress(
        round=service.weights[fragment].round,
        counted=counted_progress(state, fragment),
        bases=state.rounds[fragment].bases[:-1][-BASES:],
    )


def _rosters(service: Service) -> Iterator[RosterDocument]:
    for fragment, recorded in enumerate(service.journal.recorded.fragments):
        for round in range(max(1, recorded.round - ROSTERS + 1), recorded.round + 1):
            if round not in recorded.positions:
                continue  # lost before a recovery
            header, _ = service.journal.outcome(fragment, round, has_body=False)
            assert header.roster is not None
            assert header.outer is not None
            yield RosterDocument(
                run=header.run,
                fragment=fragment,
                round=round,
                epoch=header.epoch,
                base=header.base,
                outer=header.outer,
                shards=(),
                roster=header.roster,
            )


class Source(Protocol):
    """The source of a move; nothing changes there meanwhile."""

    def belongings(self) -> MovedRun:
        """Return the description of the run, without weights."""
        ...

    def state(self, fragment: int) -> Frame:
        """Return the state of a fragment after its last round."""
        ...

    def agreed(self, fragment: int, round: int) -> Frame:
        """Return the outcome of a described round; OutcomeLost if it was removed."""
        ...

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        """Yield a described constant, in parts."""
        ...


def receive(disk: Disk, source: Source) -> None:
    """Write the journal of a moved run; it is durable on return.

    Raises:
        UsageError: the disk has a journal.
        CorruptError: the parts of the run do not fit together; the disk has only a
            journal to be removed.
        DiskError, Unreachable: likewise; safe to repeat on an empty disk.
    """
    moved = source.belongings()
    created = CreatedRecord(
        run=moved.settings.run,
        settings=moved.settings.settings.to_dict(),
        fingerprint=moved.settings.fingerprint,
    )
    journal = Journal.create(disk, created)
    for constant in constants_of(moved.run):
        journal.constants.store(constant, source.parts(constant))
    journal.arrive(
        moved.run.model,
        ((frame.header, frame.body) for frame in _states(moved, source)),
    )
    for fragment, progress in enumerate(moved.fragments):
        _pass(journal, moved, fragment, source)
        _count(journal, fragment, progress)
    if moved.rows is not None:
        _record_rows(journal, moved, moved.rows)
    _record_controls(journal, moved)
    for member in sorted(moved.members, key=lambda document: document.slot):
        _join(journal, moved, member)
    journal.sync()
    Service.open(disk, now_s=0.0)


def _states(moved: MovedRun, source: Source) -> Iterator[Frame]:
    settings, _ = end_of(moved.settings.settings, _epochs(moved))
    layout: Layout = lay_out(moved.run.model, settings)
    if len(layout) != len(moved.fragments):
        raise CorruptError(
            f"{len(moved.fragments)} fragments come along, and the model has "
            f"{len(layout)}. Give the move up with --back."
        )
    for index, (fragment, progress) in enumerate(
        zip(layout, moved.fragments, strict=True)
    ):
        frame = source.state(index)
        terms = terms_of(fragment, settings)
        require_state(frame.header, fragment, terms, round=progress.round)
        verify_body(frame.header, frame.body)
        yield frame


def _pass(journal: Journal, moved: MovedRun, fragment: int, source: Source) -> None:
    """Store the last outcomes that exist, and the bases that updates may name."""
    outcomes: list[Frame] = []
    rounds = sorted(
        roster.round for roster in moved.rosters if roster.fragment == fragment
    )
    for round in rounds[-2:]:
        try:
            outcomes.append(source.agreed(fragment, round))
        except OutcomeLost:
            outcomes.clear()  # an island that missed it takes the state
    for frame in outcomes:
        verify_body(frame.header, frame.body)
    journal.passed(
        fragment,
        bases=moved.fragments[fragment].bases,
        outcomes=[(frame.header, frame.body) for frame in outcomes],
    )


def _count(journal: Journal, fragment: int, progress: FragmentProgress) -> None:
    for work in progress.counted:
        journal.append(
            CountedRecord(
                fragment=fragment,
                island=work.island,
                round=work.round,
                inner_steps=work.inner_steps,
                tokens=work.tokens,
            )
        )
        if work.window:
            window = WindowRecord(
                fragment=fragment, island=work.island, window=work.window
            )
            journal.append(window)


def _record_rows(journal: Journal, moved: MovedRun, rows: LedgerDocument) -> None:
    """Record the ledger of rows.

    Raises:
        CorruptError: it is not that of the described rounds.
    """
    rounds = tuple(progress.round for progress in moved.fragments)
    if rows.rounds != rounds:
        raise CorruptError(
            f"A ledger of rows after rounds {rows.rounds} comes along with {rounds}. "
            "Move the run again."
        )
    data = rows.data or DataSpec(rows=None)
    journal.append(
        LedgerRecord(
            is_open=rows.data is not None,
            rows=data.rows or 0,
            fingerprint=data.fingerprint,
            front=rows.front,
            free=rows.free.pack(),
            counted=tuple(spans.pack() for spans in rows.counted),
            refused=tuple(spans.pack() for spans in rows.refused),
        )
    )
    for row in rows.islands:
        journal.append(
            HoldingRecord(
                island=row.island,
                in_hand=row.in_hand.pack(),
                partly=row.partly.pack(),
                numbers=tuple(claim.number for claim in row.claims),
                claims=tuple(claim.spans.pack() for claim in row.claims),
            )
        )


def _record_controls(journal: Journal, moved: MovedRun) -> None:
    """Record the commands of operators as if given to this coordinator."""
    for number, values in enumerate(_epochs(moved), start=1):
        journal.append(EpochRecord(number=number, values=values))
    actions = [
        control.action
        for control in moved.controls
        if control.action in ("pause", "resume")
    ]
    if actions[-1:] == ["pause"]:
        journal.append(PauseRecord(is_paused=True))


def _epochs(moved: MovedRun) -> list[Mapping[str, Any]]:
    """Return the values of every epoch, including the last round of a stopped run."""
    epochs: list[Mapping[str, Any]] = []
    for control in moved.controls:
        if control.action == "set":
            epochs.append(control.values)
        elif control.action == "stop" and control.last_round is not None:
            epochs.append({END_ROUNDS: control.last_round})
    return epochs


def _join(journal: Journal, moved: MovedRun, member: MemberDocument) -> None:
    """Record the latest incarnation of an island, and whether it has left."""
    incarnation_key = (member.beat.island, member.beat.incarnation)
    island, incarnation = incarnation_key
    journal.append(
        JoinedRecord(
            island=island,
            incarnation=incarnation,
            slot=member.slot,
            key_digest=member.key,
            nonce=member.nonce,
        )
    )
    evicted = [(control.island, control.incarnation) for control in moved.controls]
    if member.has_left or incarnation_key in evicted:
        reason = EVICTED if incarnation_key in evicted else ""
        journal.append(HasLeft(island=island, incarnation=incarnation, reason=reason))
