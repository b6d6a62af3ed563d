"""The first process of a container: it leads one island, whatever may happen to it.

    python -m atoll.launch.leader --name NAME --restarts JSON --message FILE \
        -- python -m atoll.launch.bootstrap ...

Rule 1: SIGTERM reaches the first process alone. It tells the island, once, and waits
until that has left its run.
Rule 2: who was told to go has not finished, whatever its command ended with: the engine
decides whether it goes on elsewhere.
Rule 3: what is said between two lives is in the same log as what the lives say.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from atoll.launch.base import GRACE_S
from atoll.launch.engines.local.life import Life, Words
from atoll.launch.spec import Restarts
from atoll.launch.states import Report, State

MODULE = "atoll.launch.leader"
GIVEN_UP, TOLD_TO_GO = 70, 128 + signal.SIGTERM
"""Exit codes: it is left dead; it was told to go. Neither is started again there."""

CANCELLED = "ATOLL_CANCELLED"
"""Indexes of islands that were ended, in a variable that the engine fills when it
starts a container: one of them that is started all the same ends at once."""

LOOK_S = 0.1


class Led:
    """A process that leads a session, and speaks for itself."""

    def __init__(self, words: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(words), stdin=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        # The command tells its own: torchrun its ranks, a loader its workers.
        send = os.kill if number == signal.SIGTERM else os.killpg
        try:
            send(self.pid, number)
        except ProcessLookupError:
            return


def lead(
    index: int, name: str, words: Sequence[str], restarts: Restarts, *, grace_s: float
) -> Report:
    """Lead an island until it is over, and return how it ended."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    life = Life(index, name, restarts, Words(say=_say, start=lambda: Led(words)))
    while not life.is_over:
        now_s = time.monotonic()
        if heard:
            life.cancel(now_s, grace_s=grace_s)
        life.look(now_s)
        time.sleep(LOOK_S)
    return life.report


def exit_code(report: Report) -> int:
    """Return what the first process ends with, for an engine that goes by that."""
    if report.state is State.CANCELLED:
        return TOLD_TO_GO
    return 0 if report.state is State.FINISHED else GIVEN_UP


def message(report: Report) -> str:
    """Return what an engine is told of an island that is over."""
    return json.dumps(
        {
            "exit_code": report.exit_code,
            "restarts": report.restarts,
            "why": report.why[:200],
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Lead one island, and end as it ended."""
    given = _parser().parse_args(arguments)
    said = os.environ.get(given.index_from, "") if given.index_from else given.index
    if not str(said).isdecimal():
        sys.exit(f"atoll: {given.index_from}={said!r} is no index of an island.")
    index = int(said) + given.first
    if str(index) in os.environ.pop(CANCELLED, "").split(","):
        sys.exit(TOLD_TO_GO)
    name = f"{given.name}-{index}"
    restarts = Restarts(**given.restarts)
    report = lead(index, name, given.command, restarts, grace_s=given.grace_s)
    if given.message is not None:
        given.message.write_text(message(report))
    sys.exit(exit_code(report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--name", required=True)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--index", type=int)
    which.add_argument("--index-from", metavar="VARIABLE")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--restarts", type=json.loads, required=True)
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--message", type=Path)
    parser.add_argument("command", nargs="+")
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"atoll: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
