"""The process that leads the islands of one launch, and outlives the terminal.

    python -m atoll.launch.engines.local.supervisor DIRECTORY < STARTS

Its input is JSON: words, environments and the restart policy. It may contain secrets,
so it is on no disk and no command line. The first process returns as soon as it has
read it; the second, in a session of its own, ends with its islands.

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
from atoll.launch.supervise import Life, Words
from atoll.security.private_files import (
    private_directory,
    read_private,
    replace_private,
)

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
            each.report.to_dict() | {"pid": each.pid, "started": each.started}
            for each in all_known
        ]
        replace_private(self.state, json.dumps(said).encode())

    def read_state(self) -> list[Known] | None:
        """Return what the supervisor wrote, or None if it has written nothing.

        Raises:
            CorruptError: the file is damaged.
        """
        try:
            data = read_private(self.state, content="state", max_bytes=MAX_STATE_BYTES)
        except NoSuchFile:
            return None
        try:
            return [_known_from_form(form) for form in json.loads(data)]
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
            data = read_private(self.request, content="request", max_bytes=2**16)
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


def _known_from_form(form: Any) -> Known:
    pid = None if form["pid"] is None else int(form["pid"])
    return Known(Report.from_dict(form), pid, form["started"])


MODULE = "atoll.launch.engines.local.supervisor"
LOOK_S = 0.1


@dataclass(frozen=True)
class Start:
    """One island: what is executed, and in which environment beside this one's."""

    index: int
    name: str
    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str | None
    is_python: bool
    """Whether SIGTERM is for the first process alone, which tells its own: torchrun
    its ranks, a loader its workers. A shell tells nobody, so all of it is told."""


class Group:
    """A process that leads a session, with all that it starts."""

    def __init__(self, start: Start, log: Path) -> None:
        self._is_python = start.is_python
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                list(start.words),
                env={**os.environ, **start.environment},
                cwd=start.directory,
                stdin=subprocess.DEVNULL,
                stdout=said,
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


def supervise(files: LaunchFiles, starts: Sequence[Start], restarts: Restarts) -> None:
    """Lead islands until all of them are over."""
    lives = {each.index: _life(files, each, restarts) for each in starts}
    is_ending = _on_sigterm()
    written: list[Known] | None = None
    while True:
        now_s = time.monotonic()
        _heed(files, lives, is_ending, now_s)
        for life in lives.values():
            life.look(now_s)
        known = [_known(life) for life in lives.values()]
        if known != written:
            with suppress(DiskError):  # islands are led on, and it is tried again
                files.write_state(known)
                written = known
        if written == known and all(life.is_over for life in lives.values()):
            return
        time.sleep(LOOK_S)


def _heed(
    files: LaunchFiles, lives: Mapping[int, Life], is_ending: list[int], now_s: float
) -> None:
    """Let those go that are asked to."""
    if is_ending:
        for life in lives.values():
            life.cancel(now_s, grace_s=GRACE_S)
    asked = None
    with suppress(DiskError):
        asked = files.read_request()
    if asked is not None:
        indexes, grace_s = asked
        for index in indexes:
            if index in lives:
                lives[index].cancel(now_s, grace_s=grace_s)


def _life(files: LaunchFiles, start: Start, restarts: Restarts) -> Life:
    log = files.log(start.index)

    def say(text: str) -> None:
        with suppress(OSError), log.open("a") as file:
            file.write(f"atoll: {text}\n")

    words = Words(say=say, start=lambda: Group(start, log))
    return Life(start.index, start.name, restarts, words)


def _known(life: Life) -> Known:
    report = life.report
    pid = int(report.host.split()[1]) if report.host else None
    return Known(report, pid, None if pid is None else started(pid))


def _on_sigterm() -> list[int]:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    return heard


def main() -> None:
    """Read what is to be started, let go of whoever gave it, and lead the islands."""
    files = LaunchFiles(Path(sys.argv[1]))
    said = json.load(sys.stdin)
    starts = [Start(**each) for each in said["islands"]]
    restarts = Restarts.from_dict(said["restarts"])
    sys.stdout.flush()
    if os.fork():
        os._exit(0)
    os.setsid()
    with files.held():
        supervise(files, starts, restarts)


def written(starts: Sequence[Start], restarts: Restarts) -> bytes:
    """Return what the supervisor reads."""
    islands: list[dict[str, Any]] = [vars(each) for each in starts]
    return json.dumps({"islands": islands, "restarts": restarts.to_dict()}).encode()


if __name__ == "__main__":
    main()
