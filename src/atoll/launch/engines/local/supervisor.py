"""The process that leads the islands of one launch, and outlives the terminal.

    python -m atoll.launch.engines.local.supervisor DIRECTORY < STARTS

What is to be started is JSON on standard input: words, environments and the restart
policy. It may hold secrets, so it is on no disk and no command line. The first process
returns as soon as it has read it; the second, in a session of its own, ends with its
islands.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import DiskError
from atoll.launch.base import GRACE_S
from atoll.launch.engines.local.files import Known, LaunchFiles, send, started
from atoll.launch.engines.local.life import Life, Words
from atoll.launch.spec import Restarts

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
    pid = int(report.place.split()[1]) if report.place else None
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
    restarts = Restarts(**said["restarts"])
    sys.stdout.flush()
    if os.fork():
        os._exit(0)
    os.setsid()
    with files.held():
        supervise(files, starts, restarts)


def written(starts: Sequence[Start], restarts: Restarts) -> bytes:
    """Return what the supervisor reads."""
    islands: list[dict[str, Any]] = [vars(each) for each in starts]
    return json.dumps({"islands": islands, "restarts": vars(restarts)}).encode()


if __name__ == "__main__":
    main()
