"""The process that leads one island within its task, and writes down what became of it.

    python -m atoll.launch.engines.slurm.leader --place DIR --name N --restarts JSON \
        -- python -m atoll.launch.bootstrap ...

Rule 1: SIGTERM comes from Slurm, to every process of the task at once: the island has
heard it, and a second one would end it before it has left its run.
Rule 2: SIGUSR1 comes to the leader alone, before the time limit; so does a request of
whoever cancels. Then it is the leader who tells the island.
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
from atoll.launch.engines.local.supervisor import Group, Start
from atoll.launch.engines.slurm import INDEX, IslandFiles, read_secrets
from atoll.launch.spec import Restarts, is_python
from atoll.launch.supervise import Life, Words

LOOK_S = 0.25
ASK_EVERY_S = 1.0
"""How often the shared directory is asked whether the island is to go."""

LAST_WORD_S = 60.0
"""How long a leader tries to write down how its island ended, and keeps its place."""


def lead(files: IslandFiles, task: Start, restarts: Restarts, *, life: int) -> State:
    """Lead an island until it is over, and return how it ended."""
    heard = _signals()
    led = _life(files, task, restarts, heard)
    written, asked_at_s, over_at_s = None, -ASK_EVERY_S, math.inf
    while True:
        now_s = time.monotonic()
        if now_s - asked_at_s >= ASK_EVERY_S:
            asked_at_s = now_s
            # A shared directory fails for moments, and is asked and told again.
            with suppress(DiskError):
                if (grace_s := files.grace_s()) is not None:
                    led.cancel(now_s, grace_s=grace_s)
        if heard:
            led.cancel(now_s, grace_s=GRACE_S)
        led.look(now_s)
        if (report := led.report) != written:
            with suppress(DiskError):
                here = replace(report, host=os.uname().nodename)
                files.write_state(here, life=life)
                written = report
        over_at_s = min(over_at_s, now_s) if led.is_over else math.inf
        if led.is_over and (report == written or now_s >= over_at_s + LAST_WORD_S):
            return report.state
        time.sleep(LOOK_S)


class _Told:
    """A process that has had SIGTERM from Slurm, if Slurm has told the leader so."""

    def __init__(self, group: Group, heard: list[int]) -> None:
        self._group, self._heard = group, heard

    @property
    def pid(self) -> int:
        return self._group.pid

    def poll(self) -> int | None:
        return self._group.poll()

    def send(self, number: int) -> None:
        if number == signal.SIGTERM and signal.SIGTERM in self._heard:
            return
        self._group.send(number)


def _life(
    files: IslandFiles, task: Start, restarts: Restarts, heard: list[int]
) -> Life:
    def say(text: str) -> None:
        with suppress(OSError), files.log.open("a") as file:
            file.write(f"atoll: {text}\n")

    words = Words(say=say, start=lambda: _Told(Group(task, files.log), heard))
    return Life(task.index, task.name, restarts, words)


def _secrets(files: IslandFiles) -> dict[str, str]:
    """Return what the island is given; nothing if it is not to start."""
    try:
        return read_secrets(files.place)
    except NoSuchFile as exc:
        if files.was_asked_to_go():
            return {}
        raise UsageError(
            f"The launch {files.place.name} was over, and its secrets are gone. Launch "
            "again."
        ) from exc


def _signals() -> list[int]:
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: heard.append(number))
    return heard


def main(arguments: Sequence[str] | None = None) -> None:
    """Lead the island whose number Slurm has given to this task."""
    parser = argparse.ArgumentParser(prog="python -m atoll.launch.engines.slurm.leader")
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--restarts", type=json.loads, required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    index = given.first + int(os.environ[INDEX])
    files = IslandFiles(given.place, index)
    try:
        secrets = _secrets(files)
        name = f"{given.name}-{index}"
        # What the bootstrap becomes is what is told to go.
        own = given.command[given.command.index("--") + 1 :]
        task = Start(index, name, given.command, secrets, None, is_python(own))
        ended = lead(
            files,
            task,
            Restarts.from_dict(given.restarts),
            life=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        )
    except (AtollError, OSError, ValueError) as exc:
        sys.exit(f"atoll: {exc}")
    sys.exit(0 if ended in (State.FINISHED, State.CANCELLED) else 1)


if __name__ == "__main__":
    main()
