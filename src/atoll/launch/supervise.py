"""The supervisor of islands on one machine: their restarts, its loop and its files.

    pending -> running -> finished
                  |----> restarting -> running ...
                  |----> failed
                  +----> cancelled

Rule 1: only a command that failed is restarted; one that ended with 0 is done, and one
        that ended with `FINAL_EXIT` would end so again.
Rule 2: an island that was cancelled ends as `cancelled`, with any exit code.
Rule 3: an incarnation that outlasts the crash window resets the count of crashes.

`supervise` is the loop of every engine, which gives it a `SupervisorPort`. Where a
supervisor and other processes share a disk, they meet in the files of a launch:

    state.json       the supervisor's state of each island; it alone writes
    cancel.json      the islands that are to end; a process that cancels writes it
    island-3.log     the output of island 3, of all its starts
    supervisor.log   empty, unless the supervisor itself failed
    lock             locked by the supervisor while it runs

Rule 4: the lock tells whether the supervisor runs, because no other process can have it
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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from atoll.errors import FINAL_EXIT, CorruptError, NoSuchFile, UsageError
from atoll.launch.base import Report, State
from atoll.launch.spec import Restarts
from atoll.security.private_files import (
    private_directory,
    read_private,
    replace_private,
)

LOOK_S = 0.1
MAX_STATE_BYTES = 2**22


@dataclass(frozen=True)
class EndRequest:
    """A request that an island leave its run and end."""

    grace_s: float
    """From SIGTERM to SIGKILL."""

    has_sigterm: bool = False
    """Whether the engine itself has sent SIGTERM to the processes of the island: a
    second one could end them before they have left."""


class SupervisorPort(Protocol):
    """An engine, as `supervise` uses it: once per iteration, on one thread."""

    def end_requests(self, now_s: float) -> Mapping[int, EndRequest]:
        """Return the islands that are to end, by index; others are ignored."""
        ...

    def deliver(self, reports: Sequence[Report], now_s: float) -> bool:
        """Deliver the present reports, and return whether that is done.

        The loop ends when all islands are over and this has returned True.
        """
        ...


def supervise(supervisors: Sequence[IslandSupervisor], port: SupervisorPort) -> None:
    """Start, restart and end islands until all are over."""
    while True:
        now_s = time.monotonic()
        requests = port.end_requests(now_s)
        for supervisor in supervisors:
            if (request := requests.get(supervisor.report.index)) is not None:
                supervisor.cancel(now_s, request)
            supervisor.look(now_s)
        is_done = port.deliver([supervisor.report for supervisor in supervisors], now_s)
        if is_done and all(supervisor.is_over for supervisor in supervisors):
            return
        time.sleep(LOOK_S)


def received_signals(*numbers: int) -> list[int]:
    """Return a list of the signals of these numbers that this process receives."""
    received: list[int] = []
    for number in numbers:
        signal.signal(number, lambda number, frame: received.append(number))
    return received


@dataclass(frozen=True)
class IslandCommand:
    """The argv of one island, and its additions to this process's environment."""

    index: int
    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str | None = None
    is_python: bool = True
    """Whether only the first process receives SIGTERM, and forwards it: torchrun to its
    ranks, a loader to its workers. A shell does not, so its whole group receives it."""


class ProcessGroup:
    """One incarnation of an island: a process that leads a session, with its children.

    Its output goes to the end of `log`, or else to that of this process.
    """

    def __init__(self, command: IslandCommand, log: Path | None) -> None:
        self._is_python = command.is_python
        with nullcontext() if log is None else log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command.argv),
                env={**os.environ, **command.environment},
                cwd=command.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, minus the signal's number if one ended it, or None."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal; nothing happens if its processes have ended."""
        is_for_one = self._is_python and number == signal.SIGTERM
        send(self._process.pid, number, is_for_one=is_for_one)


class IslandSupervisor:
    """Starts, polls, restarts and cancels the process of one island.

    Messages about that go where the island's output goes: to `log`, if there is one.
    """

    def __init__(
        self, command: IslandCommand, restarts: Restarts, *, log: Path | None = None
    ) -> None:
        self._command, self._restarts, self._log = command, restarts, log
        self._state = State.PENDING
        self._process: ProcessGroup | None = None
        self._num_restarts = self._num_crashes = 0
        self._exit_code: int | None = None
        self._reason = ""
        self._since_s = self._until_s = 0.0
        self._is_cancelled = False

    @property
    def report(self) -> Report:
        """The state of the island."""
        pid = self._process.pid if self._process else None
        return Report(
            index=self._command.index,
            name=self._command.name,
            state=self._state,
            restarts=self._num_restarts,
            exit_code=self._exit_code,
            reason=self._reason,
            host="" if pid is None else f"process {pid}",
        )

    @property
    def is_over(self) -> bool:
        return self._state.is_over

    def look(self, now_s: float) -> None:
        """Poll the process, and take the transition that is due."""
        if self._state is State.PENDING:
            self._start(now_s)
        elif self._state is State.RUNNING:
            self._look_at_process(now_s)
        elif self._state is State.RESTARTING and now_s >= self._until_s:
            self._num_restarts += 1
            self._start(now_s)

    def cancel(self, now_s: float, request: EndRequest) -> None:
        """Send SIGTERM, and SIGKILL after the grace. Only the first call counts."""
        if self.is_over or self._is_cancelled:
            return
        self._is_cancelled = True
        if self._process is None:
            self._end(State.CANCELLED, "")
            return
        self._until_s = now_s + request.grace_s
        if not request.has_sigterm:
            self._process.send(signal.SIGTERM)

    def _start(self, now_s: float) -> None:
        try:
            self._process = ProcessGroup(self._command, self._log)
        except OSError as exc:
            self._end(State.FAILED, f"it cannot be run: {exc.strerror}")
            self._write(f"cannot be run: {exc.strerror}.")
            return
        self._state, self._since_s = State.RUNNING, now_s

    def _look_at_process(self, now_s: float) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            # Its children must not outlive it, and act under the name of the island.
            self._process.send(signal.SIGKILL)
            self._process, self._exit_code = None, code
            self._ended(code, now_s)
        elif self._is_cancelled and now_s >= self._until_s:
            self._process.send(signal.SIGKILL)

    def _ended(self, code: int, now_s: float) -> None:
        reason = exit_text(code)
        if self._is_cancelled:
            self._end(State.CANCELLED, reason)
        elif code == 0:
            self._end(State.FINISHED, "")
        elif code == FINAL_EXIT:
            self._end(State.FAILED, f"{reason}: it has no part in the run")
            self._write(
                f"ended with {reason}, and is not restarted: it has no part in the "
                "run. The error above names the remedy."
            )
        else:
            has_lasted = now_s - self._since_s >= self._restarts.crash_window_s
            self._num_crashes = 0 if has_lasted else self._num_crashes + 1
            self._failed(reason, now_s)

    def _failed(self, reason: str, now_s: float) -> None:
        policy = self._restarts
        if self._num_restarts >= policy.max_restarts:
            self._end(State.FAILED, reason)
        elif self._num_crashes >= policy.max_crashes:
            self._end(
                State.FAILED, f"crashed {self._num_crashes} times in a row: {reason}"
            )
            self._write(f"ended with {reason}, and is not restarted.")
        else:
            pause_s = policy.pause_s(self._num_crashes)
            self._until_s = now_s + pause_s
            self._state, self._reason = State.RESTARTING, reason
            self._write(f"ended with {reason}, and is restarted in {pause_s:g} s.")

    def _end(self, state: State, reason: str) -> None:
        self._state, self._reason = state, reason

    def _write(self, text: str) -> None:
        write_line(f"{self._command.name} {text}", self._log)


def write_line(text: str, log: Path | None = None) -> None:
    """Write a message of ours into the log of an island, or else to our own output."""
    line = f"atoll: {text}\n".encode()
    if log is None:
        os.write(sys.stdout.fileno(), line)
        return
    with suppress(OSError), log.open("ab") as file:
        file.write(line)


def exit_text(code: int) -> str:
    """Return the text of an exit code or of the signal that ended a process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


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
                f"{self.directory.name!r} was launched already, with files in "
                f"{self.directory.parent}. Launch under another name."
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
