"""The process that leads one island within its task, and writes the island's state.

    python -m atoll.launch.engines.slurm.leader --place DIR --name N --restarts JSON \
        -- python -m atoll.launch.bootstrap ...

Rule 1: Slurm sends SIGTERM to every process of the task at the same time: the island
has received it, and a second one would end it before it has left its run.
Rule 2: only the leader receives SIGUSR1, before the time limit, and requests to cancel.
Then the leader sends SIGTERM to the island.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.errors import AtollError, DiskError, NoSuchFile, UsageError
from atoll.launch.base import GRACE_S, Report, State
from atoll.launch.engines.slurm import INDEX, IslandFiles, read_secrets
from atoll.launch.spec import Restarts, is_python
from atoll.launch.supervise import (
    EndRequest,
    IslandCommand,
    IslandSupervisor,
    received_signals,
    supervise,
)

ASK_EVERY_S = 1.0
"""How often the leader checks the shared directory for a request to cancel."""

LAST_WORD_S = 60.0
"""How long a leader tries to write the final state, and occupies its node."""


@dataclass
class _Task:
    """A task of Slurm: its signals, and its files on the shared file system."""

    files: IslandFiles
    signals: Sequence[int]
    incarnation: int
    asked_at_s: float = -math.inf
    over_at_s: float = math.inf
    written: Report | None = None

    def end_requests(self, now_s: float) -> Mapping[int, EndRequest]:
        grace_s = GRACE_S if self.signals else None
        if now_s - self.asked_at_s >= ASK_EVERY_S:
            self.asked_at_s = now_s
            # A shared file system may fail for moments: the next iteration retries.
            with suppress(DiskError):
                requested_s = self.files.grace_s()
                grace_s = grace_s if requested_s is None else requested_s
        if grace_s is None:
            return {}
        has_sigterm = signal.SIGTERM in self.signals
        return {self.files.index: EndRequest(grace_s, has_sigterm=has_sigterm)}

    def deliver(self, reports: Sequence[Report], now_s: float) -> bool:
        (report,) = reports
        if report != self.written:
            with suppress(DiskError):
                on_host = replace(report, host=os.uname().nodename)
                self.files.write_state(on_host, incarnation=self.incarnation)
                self.written = report
        if report.state.is_over:
            self.over_at_s = min(self.over_at_s, now_s)
        return report == self.written or now_s >= self.over_at_s + LAST_WORD_S


def _secrets(files: IslandFiles) -> dict[str, str]:
    """Return the secrets of the island; none if it is cancelled and will not start."""
    try:
        return read_secrets(files.directory)
    except NoSuchFile as exc:
        if files.is_cancelled():
            return {}
        raise UsageError(
            f"The launch {files.directory.name} was over, and its secrets are gone. "
            "Launch again."
        ) from exc


def main(arguments: Sequence[str] | None = None) -> None:
    """Lead the island with the number of this task of Slurm's array."""
    parser = argparse.ArgumentParser(prog="python -m atoll.launch.engines.slurm.leader")
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--restarts", type=json.loads, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    index = options.first + int(os.environ[INDEX])
    files = IslandFiles(options.place, index)
    try:
        secrets = _secrets(files)
        name = f"{options.name}-{index}"
        # The bootstrap becomes the island's command, which then receives SIGTERM.
        island_argv = options.command[options.command.index("--") + 1 :]
        task = IslandCommand(
            index, name, options.command, secrets, None, is_python(island_argv)
        )
        supervisor = IslandSupervisor(
            task, Restarts.from_dict(options.restarts), log=files.log
        )
        incarnation = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        signals = received_signals(signal.SIGTERM, signal.SIGUSR1)
        supervise([supervisor], _Task(files, signals, incarnation))
    except (AtollError, OSError, ValueError) as exc:
        sys.exit(f"atoll: {exc}")
    ended = supervisor.report.state
    sys.exit(0 if ended in (State.FINISHED, State.CANCELLED) else 1)


if __name__ == "__main__":
    main()
