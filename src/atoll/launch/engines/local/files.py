"""The directory of a launch on this machine: how its supervisor and others meet.

    state.json       what the supervisor knows of each island; it alone writes
    cancel.json      which islands are to go; whoever cancels writes
    island-3.log     what island 3 says, all of its lives
    supervisor.log   empty, unless the supervisor itself failed
    lock             held by the supervisor while it lives

Rule 1: whether the supervisor lives is asked of the lock, which no other process can
hold by chance; a process by its number and the instant it was started.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from atoll.errors import CorruptError, NoSuchFile, UsageError
from atoll.launch.states import Report, State
from atoll.security.private import private_directory, read_private, replace_private

MAX_STATE_BYTES = 2**22


@dataclass(frozen=True)
class Known:
    """What was written of one island."""

    report: Report
    pid: int | None = None
    started: str | None = None
    """What tells this process from a later one of the same number."""


@dataclass(frozen=True)
class LaunchFiles:
    """The files of one launch."""

    directory: Path

    def make(self) -> None:
        """Make the directory.

        Raises:
            UsageError: it is there: the id was launched already.
        """
        private_directory(self.directory.parent)
        try:
            self.directory.mkdir(mode=0o700)
        except FileExistsError as exc:
            raise UsageError(
                f"{self.directory.name!r} was launched on this machine already. "
                "Launch under another name."
            ) from exc

    def log(self, index: int) -> Path:
        return self.directory / f"island-{index}.log"

    @property
    def supervisor_log(self) -> Path:
        return self.directory / "supervisor.log"

    @property
    def state(self) -> Path:
        return self.directory / "state.json"

    @property
    def request(self) -> Path:
        return self.directory / "cancel.json"

    def lines(self, index: int, skip: int, at: int) -> tuple[list[str], int]:
        """Return what an island has said from byte `at` on, and where that ends.

        The first `skip` lines are left out, and for later one that is being written.
        """
        is_led = self.has_supervisor()
        try:
            with self.log(index).open("rb") as file:
                file.seek(at)
                said = list(islice(file, skip, None))
                end = file.tell()
        except FileNotFoundError:
            return [], at
        if is_led and said and not said[-1].endswith(b"\n"):
            end -= len(said.pop())
        return [line.decode(errors="replace").rstrip("\r\n") for line in said], end

    def write_state(self, all_known: Sequence[Known]) -> None:
        said = [
            {**vars(each.report), "state": each.report.state.value}
            | {"pid": each.pid, "started": each.started}
            for each in all_known
        ]
        replace_private(self.state, json.dumps(said).encode())

    def read_state(self) -> list[Known] | None:
        """Return what the supervisor wrote, or None if it has written nothing.

        Raises:
            CorruptError: the file is damaged.
        """
        try:
            data = read_private(self.state, what="state", max_bytes=MAX_STATE_BYTES)
        except NoSuchFile:
            return None
        try:
            return [_known(form) for form in json.loads(data)]
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise CorruptError(
                f"{self.state} does not say what became of the islands. End them by "
                "hand, if any is left."
            ) from exc

    def write_request(self, indexes: Collection[int], grace_s: float) -> None:
        """Ask for islands to go, with those that were asked for before."""
        before = self.read_request()
        asked = sorted({*indexes, *(before[0] if before else ())})
        said = json.dumps({"indexes": asked, "grace_s": grace_s})
        replace_private(self.request, said.encode())

    def read_request(self) -> tuple[list[int], float] | None:
        """Return which islands are to go, and within which time."""
        try:
            data = read_private(self.request, what="request", max_bytes=2**16)
            form = json.loads(data)
            return [int(each) for each in form["indexes"]], float(form["grace_s"])
        except NoSuchFile:
            return None
        except (ValueError, LookupError, TypeError) as exc:
            raise CorruptError(f"{self.request} says nothing of use.") from exc

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the supervisor while the block lasts."""
        with (self.directory / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def has_supervisor(self) -> bool:
        """Return whether the supervisor lives."""
        try:
            with (self.directory / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def started(pid: int) -> str | None:
    """Return what tells a process from others of its number; None if it is gone.

    The instant of its start, in ticks since the machine's, and which start that was.
    """
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The name of a program is in parentheses and may hold anything.
    state, *others = said.rpartition(")")[2].split()
    return None if state == "Z" else f"{boot}:{others[18]}"


def send(pid: int, number: int, *, is_for_one: bool = False) -> None:
    """Send a signal to a group of processes, or its first, if that is there."""
    try:
        (os.kill if is_for_one else os.killpg)(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _known(form: Any) -> Known:
    report = Report(
        index=int(form["index"]),
        name=str(form["name"]),
        state=State(form["state"]),
        restarts=int(form["restarts"]),
        exit_code=None if form["exit_code"] is None else int(form["exit_code"]),
        why=str(form["why"]),
        place=str(form["place"]),
    )
    pid = None if form["pid"] is None else int(form["pid"])
    return Known(report, pid, form["started"])
