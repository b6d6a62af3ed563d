"""Containers of a loopback cloud: processes of this machine with little around them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Container:
    """A process in a session of its own; told by SIGTERM, ended by SIGKILL."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], place: Path
    ) -> None:
        self.log = place / "log"
        place.mkdir(parents=True)
        around = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(place),
        }
        with self.log.open("ab") as said:
            self._process = subprocess.Popen(
                list(words),
                env={**around, **environment},
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.was_stopped = False

    def exit_code(self) -> int | None:
        """Return how it ended, as a container's engine counts: 137 is SIGKILL."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def lines(self) -> list[str]:
        """Return what it has said, but for a line that is not whole yet."""
        return self.log.read_text().split("\n")[:-1]

    def stop(self, *, kill_after_s: float) -> None:
        """Tell its first process to go, and end it later if it stays."""
        self.was_stopped = True
        if self.exit_code() is None:
            self._process.send_signal(signal.SIGTERM)
            timer = threading.Timer(kill_after_s, self.kill)
            timer.daemon = True
            timer.start()

    def kill(self) -> None:
        """End it with all that it started."""
        children = descendants(self._process.pid)
        if self.exit_code() is None:
            self._process.kill()
        self._process.wait()
        kill_all(children)


def kill_all(processes: Sequence[int]) -> None:
    """End processes, those that there still are."""
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue


def descendants(parent: int) -> list[int]:
    """Return who a process has started, and whom they have."""
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            children = [int(each) for each in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found
