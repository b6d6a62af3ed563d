"""The directory of a coordinator that a run is on its way to.

move.json         from where to where, and what names this move
journal.arriving  the run as it will be; thrown away and written anew until it is whole
journal           the same, once the run is here

Rule 1: what decides that the run is here is said at the place that it leaves, after
        `receive` and before `settle`: whoever died in between goes on with `settle`.
Rule 2: one process at a time has to do with the directory, from `receive` to `settle`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.coordinator.received import Source, receive
from atoll.disk import SystemDisk, sync_directory
from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.security.private import (
    private_directory,
    read_private,
    remove_private,
    replace_private,
    translated,
)

JOURNAL, ARRIVING, TICKET = "journal", "journal.arriving", "move.json"
MAX_TICKET_BYTES = 2**14


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Names one move to one directory."""

    source: str
    target: str
    nonce: str

    @property
    def command(self) -> str:
        """What is said again to go on."""
        return f"atoll move {self.source} {self.target}"


class Arrival:
    """A directory that a run comes to. Close it.

    Raises:
        UsageError: another run is there or on its way, or another process is at it.
    """

    def __init__(self, directory: Path, *, source: str, target: str) -> None:
        self._directory = directory
        self._disk: SystemDisk | None = None
        found = ticket_of(directory)
        self.has_come = has_journal(directory)
        """Whether the run of this move is here for good."""

        if self.has_come and (found is None or _way(found) != (source, target)):
            raise UsageError(
                f"{directory} holds a run already. Choose another directory for the "
                "one that comes: --dir DIR."
            )
        if found is not None and _way(found) != (source, target):
            raise UsageError(
                f"Another run is on its way to {directory}: `{found.command} --dir "
                f"{directory}`. Finish that, give it up with --back, or choose another "
                "directory."
            )
        self.is_begun = found is not None
        self.ticket = found or _new_ticket(source, target)

    def close(self) -> None:
        """Let others have the directory. Safe to repeat."""
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    def prepare(self) -> None:
        """Have the directory to itself, and the name of its move durable.

        Raises:
            UsageError: another process is at it, or has just been.
        """
        self._own()
        found = ticket_of(self._directory)
        if has_journal(self._directory) or found not in (None, self.ticket):
            raise UsageError(
                f"Another process has just used {self._directory}. Say it again."
            )
        said = json.dumps(asdict(self.ticket)).encode() + b"\n"
        replace_private(self._directory / TICKET, said)
        self.is_begun = True

    def receive(self, source: Source) -> None:
        """Write the run's journal anew, beside where it will be."""
        disk = self._own()
        for name in disk.names(""):
            disk.remove(name)
        receive(disk, source)

    def settle(self) -> None:
        """Let the run be served from here: it is decided. Safe to repeat.

        Raises:
            CorruptError: what was received has been removed.
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
            shutil.rmtree(journal, ignore_errors=True)  # without a log: of nobody's
            os.rename(disk.root, journal)
            sync_directory(self._directory)
        self.has_come = True

    def forget(self) -> None:
        """Remove what was received: the run stays where it is."""
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
    """Return whether a run is in a directory."""
    return any((directory / JOURNAL / "log").glob("*"))


def ticket_of(directory: Path) -> Ticket | None:
    """Return the move by which a run comes to a directory, or has come.

    Raises:
        CorruptError: the file does not say so.
    """
    path = directory / TICKET
    try:
        data = read_private(path, what="move", max_bytes=MAX_TICKET_BYTES)
    except NoSuchFile:
        return None
    try:
        said = json.loads(data)
        values = {key: said[key] for key in ("source", "target", "nonce")}
        if not all(isinstance(each, str) for each in values.values()):
            raise TypeError("not a text")
        return Ticket(**values)
    except (ValueError, LookupError, TypeError) as exc:
        raise CorruptError(
            f"{path} does not say which run is on its way. Choose another directory."
        ) from exc


def require_arrived(directory: Path) -> None:
    """Return unless a run is on its way to a directory.

    Raises:
        UsageError: it is, and how it gets there.
    """
    ticket = None if has_journal(directory) else ticket_of(directory)
    if ticket is not None:
        raise UsageError(
            f"A run is on its way to {directory}. Say `{ticket.command} --dir "
            f"{directory}` again to go on, or with --back to give it up; then serve it."
        )


def _new_ticket(source: str, target: str) -> Ticket:
    return Ticket(source=source, target=target, nonce=secrets.token_hex(16))


def _way(ticket: Ticket) -> tuple[str, str]:
    return ticket.source, ticket.target
