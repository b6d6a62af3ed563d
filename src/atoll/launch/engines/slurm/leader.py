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
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from atoll.errors import AtollError, DiskError, NoSuchFile, UsageError
from atoll.launch.base import GRACE_S, State
from atoll.launch.engines.local.supervisor import IslandCommand, ProcessGroup
from atoll.launch.engines.slurm import INDEX, IslandFiles, read_secrets
from atoll.launch.spec import Restarts, is_python
from atoll.launch.supervise import IslandSupervisor, ProcessHooks

LOOK_S = 0.25
ASK_EVERY_S = 1.0
"""How often the leader checks the shared directory for a request to cancel."""

LAST_WORD_S = 60.0
"""How long a leader tries to write the final state, and occupies its node."""


def lead(
    files: IslandFiles, task: IslandCommand, restarts: Restarts, *, incarnation: int
) -> State:
    """Lead an island until it is over, and return its final state."""
    signals = _received_signals()
    supervisor = _supervisor(files, task, restarts, signals)
    written, asked_at_s, over_at_s = None, -ASK_EVERY_S, math.inf
    while True:
        now_s = time.monotonic()
        if now_s - asked_at_s >= ASK_EVERY_S:
            asked_at_s = now_s
            # A shared file system may fail for moments: the next iteration retries.
            with suppress(DiskError):
                if (grace_s := files.grace_s()) is not None:
                    supervisor.cancel(now_s, grace_s=grace_s)
        if signals:
            supervisor.cancel(now_s, grace_s=GRACE_S)
        supervisor.look(now_s)
        if (report := supervisor.report) != written:
            with suppress(DiskError):
                on_host = replace(report, host=os.uname().nodename)
                files.write_state(on_host, incarnation=incarnation)
                written = report
        over_at_s = min(over_at_s, now_s) if supervisor.is_over else math.inf
        if supervisor.is_over and (
            report == written or now_s >= over_at_s + LAST_WORD_S
        ):
            return report.state
        time.sleep(LOOK_S)


class _SignalledProcess:
    """A process that got SIGTERM from Slurm itself, if the leader has got it, too."""

    def __init__(self, group: ProcessGroup, signals: list[int]) -> None:
        self._group, self._signals = group, signals

    @property
    def pid(self) -> int:
        return self._group.pid

    def poll(self) -> int | None:
        return self._group.poll()

    def send(self, number: int) -> None:
        if number == signal.SIGTERM and signal.SIGTERM in self._signals:
            return
        self._group.send(number)


def _supervisor(
    files: IslandFiles, task: IslandCommand, restarts: Restarts, signals: list[int]
) -> IslandSupervisor:
    def write(text: str) -> None:
        with suppress(OSError), files.log.open("a") as file:
            file.write(f"atoll: {text}\n")

    def start() -> _SignalledProcess:
        return _SignalledProcess(ProcessGroup(task, files.log), signals)

    hooks = ProcessHooks(log=write, start=start)
    return IslandSupervisor(task.index, task.name, restarts, hooks)


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


def _received_signals() -> list[int]:
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: signals.append(number))
    return signals


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
        ended = lead(
            files,
            task,
            Restarts.from_dict(options.restarts),
            incarnation=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )
    except (AtollError, OSError, ValueError) as exc:
        sys.exit(f"atoll: {exc}")
    sys.exit(0 if ended in (State.FINISHED, State.CANCELLED) else 1)


if __name__ == "__main__":
    main()
