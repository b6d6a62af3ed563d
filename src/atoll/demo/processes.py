"""The islands' processes, as the one that started them sees them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.demo import files
from atoll.errors import RemoteError

COMMAND = (sys.executable, "-m", "atoll.demo.islands")
"""Is given the directory, and told the run on its standard input."""

GRACE_S = 20.0
"""For islands to go when the demo is interrupted."""


class Islands:
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
