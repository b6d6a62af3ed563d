"""The first process of a container: it leads one island through all restarts.

    python -m atoll.launch.leader --name NAME --restarts JSON --message FILE \
        -- python -m atoll.launch.bootstrap ...

Rule 1: SIGTERM reaches the first process alone. It sends SIGTERM to the island, once,
and waits until the island has left its run.
Rule 2: an island that received SIGTERM has not finished, with any exit code: the engine
decides whether it continues on another host.
Rule 3: messages about restarts are in the same log as the island's output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.launch.base import GRACE_S, Report, State
from atoll.launch.job_leader import EXIT_CANCELLED, lead
from atoll.launch.spec import Restarts

MODULE = "atoll.launch.leader"
EXIT_GIVEN_UP = 70
"""The exit code for an island that is not restarted; neither is it with
`EXIT_CANCELLED`."""

CANCELLED = "ATOLL_CANCELLED"
"""The variable with the indexes of cancelled islands, which the engine sets when it
starts a container: if one of them is started nevertheless, it exits immediately."""

NUM_BEFORE = "ATOLL_NUM_BEFORE"
"""The variable with the number of earlier incarnations, with `--once`: for an engine
that restarts all containers of an island when one has ended."""


def exit_code(report: Report) -> int:
    """Return the exit code of the first process, which the engine evaluates."""
    if report.state is State.CANCELLED:
        return EXIT_CANCELLED
    return 0 if report.state is State.FINISHED else EXIT_GIVEN_UP


def message(report: Report) -> str:
    """Return the termination message about an island that is over."""
    return json.dumps(
        {
            "exit_code": report.exit_code,
            "restarts": report.restarts,
            "why": report.reason[:200],
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Lead one island, and exit with the code for its end."""
    options = _parser().parse_args(arguments)
    value = (
        os.environ.get(options.index_from, "") if options.index_from else options.index
    )
    if not str(value).isdecimal():
        sys.exit(f"atoll: {options.index_from}={value!r} is no index of an island.")
    index = int(value) + options.first
    if str(index) in os.environ.pop(CANCELLED, "").split(","):
        sys.exit(EXIT_CANCELLED)
    name = f"{options.name}-{index}"
    restarts = Restarts.from_dict(options.restarts)
    report = lead(
        name,
        options.command,
        restarts,
        grace_s=options.grace_s,
        num_before=_num_before() if options.once else None,
    )
    if options.message is not None:
        options.message.write_text(message(report))
    sys.exit(exit_code(report))


def _num_before() -> int:
    value = os.environ.pop(NUM_BEFORE, "")
    return int(value) if value.isdecimal() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--name", required=True)
    index = parser.add_mutually_exclusive_group(required=True)
    index.add_argument("--index", type=int)
    index.add_argument("--index-from", metavar="VARIABLE")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--restarts", type=json.loads, required=True)
    parser.add_argument("--once", action="store_true", help="the engine restarts")
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--message", type=Path)
    parser.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    main()
