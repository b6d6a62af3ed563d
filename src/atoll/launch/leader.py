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
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.launch.base import GRACE_S, Report, State
from atoll.launch.leading import TOLD_TO_GO, lead
from atoll.launch.spec import Restarts

MODULE = "atoll.launch.leader"
GIVEN_UP = 70
"""The exit code of who is left dead: as `TOLD_TO_GO`, it is not started again there."""

CANCELLED = "ATOLL_CANCELLED"
"""Indexes of islands that were ended, in a variable that the engine fills when it
starts a container: one of them that is started all the same ends at once."""

NUM_BEFORE = "ATOLL_NUM_BEFORE"
"""How many lives of it were before, in a variable that an engine fills which starts all
of an island's containers again when one has ended; with `--once`."""


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
            "why": report.reason[:200],
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
    restarts = Restarts.from_dict(given.restarts)
    report = lead(
        name,
        given.command,
        restarts,
        grace_s=given.grace_s,
        num_before=_num_before() if given.once else None,
    )
    if given.message is not None:
        given.message.write_text(message(report))
    sys.exit(exit_code(report))


def _num_before() -> int:
    said = os.environ.pop(NUM_BEFORE, "")
    return int(said) if said.isdecimal() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--name", required=True)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--index", type=int)
    which.add_argument("--index-from", metavar="VARIABLE")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--restarts", type=json.loads, required=True)
    parser.add_argument("--once", action="store_true", help="the engine does the rest")
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--message", type=Path)
    parser.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    main()
