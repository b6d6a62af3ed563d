"""Runs the demo on one machine: a coordinator here, and a process for each island."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from atoll.demo import files
from atoll.demo.dataset import read_messages, split_by_era, write_eras
from atoll.errors import RemoteError
from atoll.security import Credentials, Role, token_file
from atoll.settings import RunSettings

if TYPE_CHECKING:
    from atoll.coordinator.app import Coordinator


LOOK_S = 0.5
"""How often the islands are looked at."""

OnLook = Callable[[Mapping[str, Any]], None]


def run_islands(
    directory: Path, settings: RunSettings, *, on_look: OnLook
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train until the run ends; return what each island found out, and the status.

    Raises:
        RemoteError: an island failed; its log says why.
        UsageError: the text is not installed.
    """
    count = settings.run.start_islands
    with ExitStack() as ending:
        # They load the longest, so all else is done meanwhile.
        islands = ending.enter_context(
            IslandProcesses(directory, _environment(directory))
        )
        from atoll.coordinator.app import Coordinator, ListenOptions

        write_eras(files.text(directory), split_by_era(read_messages(), count))
        coordinator = Coordinator(directory, settings, listening=ListenOptions())
        ending.callback(coordinator.close)
        ending.callback(islands.end)  # while there is a coordinator to leave
        coordinator.start()
        _remember(coordinator, directory)
        islands.begin(coordinator.url)
        _watch(islands, count, coordinator, on_look)
        status = coordinator.status()
    read = [
        json.loads(files.results(directory, shard).read_text())
        for shard in range(count)
    ]
    return read, status


def _environment(directory: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_CONFIG_HOME": str(files.home(directory).resolve()),
        "OMP_NUM_THREADS": "1",  # each has a core at most, and a fork knows no pool
    }


def _remember(coordinator: Coordinator, directory: Path) -> None:
    """Put what an island needs where it looks; the user's own stays as it is."""
    Credentials(files.home(directory) / "atoll" / "runs").remember(
        coordinator.url,
        pin=coordinator.pin,
        tokens={Role.ISLAND: token_file(directory.resolve(), Role.ISLAND)},
    )


def _watch(
    islands: IslandProcesses, count: int, coordinator: Coordinator, on_look: OnLook
) -> None:
    """Wait for the islands, and show what they do meanwhile."""
    while count:
        on_look(coordinator.status())
        count -= islands.next_end(LOOK_S) is not None
    on_look(coordinator.status())


COMMAND = (sys.executable, "-m", "atoll.demo.islands")
"""Is given the directory, and told the run on its standard input."""

GRACE_S = 20.0
"""For islands to go when the demo is interrupted."""


class IslandProcesses:
    """Processes that load at once, train when they are told a run, and end with this.

    They are a group of their own, so that an interruption at the keyboard reaches
    them by `end` alone, while there still is a coordinator to leave.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        *,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._directory = directory
        with files.log(directory).open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--directory", str(directory)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                process_group=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def begin(self, run: str) -> None:
        """Let them join a run as soon as they have loaded."""
        try:
            self._to.write(f"{run}\n".encode())
        except BrokenPipeError:
            raise self._failure(None, self._process.wait()) from None

    def next_end(self, timeout_s: float) -> int | None:
        """Return the shard of an island that is done, or None if none is for so long.

        Raises:
            RemoteError: one has failed; its log says why.
        """
        if not select.select([self._from], [], [], timeout_s)[0]:
            return None
        told = self._from.readline()
        if not told:
            raise self._failure(None, self._process.wait())
        shard, status = map(int, told.split())
        if status:
            raise self._failure(shard, status)
        return shard

    def end(self) -> None:
        """Let those go that are still there, and wait for them. Safe to repeat."""
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._to.close()
        self._from.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _failure(self, shard: int | None, status: int) -> RemoteError:
        log = files.log(self._directory, shard)
        said = log.read_text(errors="replace").strip()
        who = "The process of the islands" if shard is None else f"Island {shard}"
        return RemoteError(
            f"{who} ended with status {status}: "
            f"{said.splitlines()[-1] if said else 'it said nothing'}. "
            f"Its log is {log}."
        )
