"""The process that leads the islands of one launch, and outlives the terminal.

    python -m atoll.launch.engines.local.supervisor DIRECTORY < STARTS

Its input is JSON: argv, environments and the restart policy. It may contain secrets,
so it is on no disk and no command line. The first process exits as soon as it has
read it; the second, in a separate session, ends with its islands.

The supervisor and other processes meet in the directory of the launch:

    state.json       the supervisor's state of each island; it alone writes
    cancel.json      the islands that are to end; a process that cancels writes it
    island-3.log     the output of island 3, of all its starts
    supervisor.log   empty, unless the supervisor itself failed
    lock             locked by the supervisor while it runs

Rule 1: the lock tells whether the supervisor runs, because no other process can have it
by chance; a process is identified by its number and the instant it was started.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from atoll.errors import CorruptError, DiskError, NoSuchFile, UsageError
from atoll.launch.base import GRACE_S, Report
from atoll.launch.spec import Restarts
from atoll.launch.supervise import IslandSupervisor, ProcessHooks
from atoll.security.private_files import (
    private_directory,
    read_private,
    replace_private,
)

MAX_STATE_BYTES = 2**22


@dataclass(frozen=True)
class IslandRecord:
    """The stored state of one island, with its process."""

    report: Report
    pid: int | None = None
    identity: str | None = None
    """Distinguishes this process from a later one with the same number; on Slurm, the
    incarnation of the task."""


@dataclass(frozen=True)
class LaunchFiles:
    """The files of one launch."""

    directory: Path

    def make(self) -> None:
        """Make the directory.

        Raises:
            UsageError: it exists: the id was launched already.
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

    def lines(self, index: int, skip: int, offset: int) -> tuple[list[str], int]:
        """Return the log lines of an island after byte `offset`, and their end.

        The first `skip` lines are left out, and an incomplete line of a running island.
        """
        is_led = self.has_supervisor()
        try:
            with self.log(index).open("rb") as file:
                file.seek(offset)
                lines = list(islice(file, skip, None))
                end = file.tell()
        except FileNotFoundError:
            return [], offset
        if is_led and lines and not lines[-1].endswith(b"\n"):
            end -= len(lines.pop())
        return [line.decode(errors="replace").rstrip("\r\n") for line in lines], end

    def write_state(self, records: Sequence[IslandRecord]) -> None:
        form = [
            record.report.to_dict() | {"pid": record.pid, "started": record.identity}
            for record in records
        ]
        replace_private(self.state, json.dumps(form).encode())

    def read_state(self) -> list[IslandRecord] | None:
        """Return the state that the supervisor wrote, or None if there is none.

        Raises:
            CorruptError: the file is damaged.
        """
        try:
            data = read_private(self.state, content="state", max_bytes=MAX_STATE_BYTES)
        except NoSuchFile:
            return None
        try:
            return [_record_from_form(form) for form in json.loads(data)]
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise CorruptError(
                f"{self.state} is damaged: the state of the islands is unknown. End "
                "them by hand, if any is left."
            ) from exc

    def write_request(self, indexes: Collection[int], grace_s: float) -> None:
        """Request the end of islands, in addition to earlier requests."""
        earlier = self.read_request()
        indexes_to_end = sorted({*indexes, *(earlier[0] if earlier else ())})
        form = json.dumps({"indexes": indexes_to_end, "grace_s": grace_s})
        replace_private(self.request, form.encode())

    def read_request(self) -> tuple[list[int], float] | None:
        """Return the islands that are to end, and their grace, if requested."""
        try:
            data = read_private(self.request, content="request", max_bytes=2**16)
            form = json.loads(data)
            return [int(index) for index in form["indexes"]], float(form["grace_s"])
        except NoSuchFile:
            return None
        except (ValueError, LookupError, TypeError) as exc:
            raise CorruptError(f"{self.request} is no request to cancel.") from exc

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of the supervisor during the block."""
        with (self.directory / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def has_supervisor(self) -> bool:
        """Return whether the supervisor runs."""
        try:
            with (self.directory / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False


def process_identity(pid: int) -> str | None:
    """Return the boot id and the start time of a process; None if it has ended.

    They distinguish it from other processes with the same number.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The name of a program is in parentheses and may contain any character.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else f"{boot}:{fields[18]}"


def send(pid: int, number: int, *, is_for_one: bool = False) -> None:
    """Send a signal to a process group, or only to its leader, if it exists."""
    try:
        (os.kill if is_for_one else os.killpg)(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _record_from_form(form: Any) -> IslandRecord:
    pid = None if form["pid"] is None else int(form["pid"])
    return IslandRecord(Report.from_dict(form), pid, form["started"])


MODULE = "atoll.launch.engines.local.supervisor"
LOOK_S = 0.1


@dataclass(frozen=True)
class IslandCommand:
    """The argv of one island, and its additions to this process's environment."""

    index: int
    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str | None
    is_python: bool
    """Whether only the first process receives SIGTERM, and forwards it: torchrun to its
    ranks, a loader to its workers. A shell does not, so its whole group receives it."""


class ProcessGroup:
    """A process that leads a session, with all that it starts."""

    def __init__(self, command: IslandCommand, log: Path) -> None:
        self._is_python = command.is_python
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command.argv),
                env={**os.environ, **command.environment},
                cwd=command.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        is_for_one = self._is_python and number == signal.SIGTERM
        send(self._process.pid, number, is_for_one=is_for_one)


def supervise(
    files: LaunchFiles, commands: Sequence[IslandCommand], restarts: Restarts
) -> None:
    """Lead islands until all of them are over."""
    supervisors = {
        command.index: _supervisor(files, command, restarts) for command in commands
    }
    signals = _sigterm_signals()
    supervisor_input: list[IslandRecord] | None = None
    while True:
        now_s = time.monotonic()
        _cancel_requested(files, supervisors, signals, now_s)
        for supervisor in supervisors.values():
            supervisor.look(now_s)
        records = [_record(supervisor) for supervisor in supervisors.values()]
        if records != supervisor_input:
            with suppress(DiskError):  # the next iteration writes it again
                files.write_state(records)
                supervisor_input = records
        if supervisor_input == records and all(
            supervisor.is_over for supervisor in supervisors.values()
        ):
            return
        time.sleep(LOOK_S)


def _cancel_requested(
    files: LaunchFiles,
    supervisors: Mapping[int, IslandSupervisor],
    signals: list[int],
    now_s: float,
) -> None:
    """Cancel the islands of a request; all of them after SIGTERM."""
    if signals:
        for supervisor in supervisors.values():
            supervisor.cancel(now_s, grace_s=GRACE_S)
    request = None
    with suppress(DiskError):
        request = files.read_request()
    if request is not None:
        indexes, grace_s = request
        for index in indexes:
            if index in supervisors:
                supervisors[index].cancel(now_s, grace_s=grace_s)


def _supervisor(
    files: LaunchFiles, command: IslandCommand, restarts: Restarts
) -> IslandSupervisor:
    log = files.log(command.index)

    def write(text: str) -> None:
        with suppress(OSError), log.open("a") as file:
            file.write(f"atoll: {text}\n")

    hooks = ProcessHooks(log=write, start=lambda: ProcessGroup(command, log))
    return IslandSupervisor(command.index, command.name, restarts, hooks)


def _record(supervisor: IslandSupervisor) -> IslandRecord:
    report = supervisor.report
    pid = int(report.host.split()[1]) if report.host else None
    return IslandRecord(report, pid, None if pid is None else process_identity(pid))


def _sigterm_signals() -> list[int]:
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    return signals


def main() -> None:
    """Read the commands, release the launching process, and lead the islands."""
    files = LaunchFiles(Path(sys.argv[1]))
    form = json.load(sys.stdin)
    commands = [IslandCommand(**command) for command in form["islands"]]
    restarts = Restarts.from_dict(form["restarts"])
    sys.stdout.flush()
    if os.fork():
        os._exit(0)
    os.setsid()
    with files.held():
        supervise(files, commands, restarts)


def supervisor_input(commands: Sequence[IslandCommand], restarts: Restarts) -> bytes:
    """Return the input of the supervisor."""
    islands: list[dict[str, Any]] = [vars(command) for command in commands]
    return json.dumps({"islands": islands, "restarts": restarts.to_dict()}).encode()


if __name__ == "__main__":
    main()
