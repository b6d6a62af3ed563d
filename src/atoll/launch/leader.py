"""The process that leads one island through all restarts, started by its engine.

    python -m atoll.launch.leader --name reef --index 3 --restarts JSON \
        --leave-after-s 3540 -- python -m atoll.launch.bootstrap ...

It is the first process of a container or a job, so the engine's signals reach it alone.
Its messages about restarts are in the same log as the island's output.

Rule 1: on SIGTERM, and shortly before a time limit, the leader sends SIGTERM to the
island, once, and waits until the island has left its run. It exits with
`EXIT_CANCELLED`, with any exit code of the island: the engine decides whether the
island continues on another host.
Rule 2: otherwise it exits with the code of the island's last incarnation, but with 1
instead of `EXIT_CANCELLED`. With `--message` the file has that code, and the leader
exits with `EXIT_GIVEN_UP`, by which an engine starts no other in its place.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from atoll.launch.base import GRACE_S, Report, State
from atoll.launch.bootstrap import bootstrap_argv
from atoll.launch.spec import IslandSpec, Restarts
from atoll.launch.supervise import (
    LOOK_S,
    EndRequest,
    IslandCommand,
    IslandSupervisor,
    received_signals,
    supervise,
    write_line,
)

MODULE = "atoll.launch.leader"
EXIT_CANCELLED = 128 + signal.SIGTERM
"""The exit code for an island that did not fail, and has not finished."""

EXIT_GIVEN_UP = 70
"""The exit code for an island that is not restarted; neither is it with
`EXIT_CANCELLED`."""

CANCELLED = "ATOLL_CANCELLED"
"""The variable with the indexes of cancelled islands, which the engine sets when it
starts a container: if one of them is started nevertheless, it exits immediately."""

NUM_BEFORE = "ATOLL_NUM_BEFORE"
"""The variable with the number of earlier incarnations, with `--once`: for an engine
that restarts all containers of an island when one has ended."""

LEAVE_BEFORE_S = 60.0
"""How long before its time limit an island receives SIGTERM."""


def leader_argv(
    spec: IslandSpec,
    index: int | None = None,
    *,
    index_from: str | None = None,
    first: int = 0,
    limit_s: float = math.inf,
    message: str | None = None,
    is_once: bool = False,
    python: str = "python",
    prefix_from: str | None = None,
) -> list[str]:
    """Return the argv with which an engine starts an island's leader.

    The island receives SIGTERM before `limit_s`, when the engine ends the job. The
    other arguments are those of the leader, and of `bootstrap.bootstrap_argv`.
    """
    argv = [python, "-m", MODULE, "--name", spec.name]
    argv += ["--index", str(index)] if index_from is None else []
    argv += ["--index-from", index_from] if index_from is not None else []
    argv += ["--first", str(first)] if first else []
    argv += ["--restarts", json.dumps(spec.restarts.to_dict())]
    if limit_s < math.inf:
        leave_s = max(limit_s - LEAVE_BEFORE_S, limit_s / 2.0)
        argv += ["--leave-after-s", f"{leave_s:g}"]
    argv += ["--message", message] if message is not None else []
    argv += ["--once"] if is_once else []
    bootstrap = bootstrap_argv(
        spec,
        index=index,
        index_from=index_from,
        first=first,
        python=python,
        prefix_from=prefix_from,
    )
    return [*argv, "--", *bootstrap]


def with_requirements(argv: Sequence[str], requirements: Sequence[str]) -> list[str]:
    """Return an argv that installs packages with pip, and then executes `argv`."""
    if not requirements:
        return list(argv)
    packages = " ".join(shlex.quote(requirement) for requirement in requirements)
    script = f'python -m pip install --quiet {packages} && exec "$@"'
    return ["sh", "-c", script, "sh", *argv]


@dataclass(frozen=True)
class _Container:
    """A container or a job, whose engine sends signals and reads the exit code."""

    signals: Sequence[int]
    grace_s: float
    leave_at_s: float

    def end_requests(self, now_s: float) -> Mapping[int, EndRequest]:
        is_to_end = self.signals or now_s >= self.leave_at_s
        return {0: EndRequest(self.grace_s)} if is_to_end else {}

    def deliver(self, reports: Sequence[Report], now_s: float) -> bool:
        return True


def lead(
    name: str,
    argv: Sequence[str],
    restarts: Restarts,
    *,
    leave_after_s: float = math.inf,
    grace_s: float = GRACE_S,
    num_before: int | None = None,
) -> Report:
    """Lead an island until it is over, and return its last report.

    `num_before` is for an engine that restarts the leader itself, without a pause: the
    number of earlier incarnations. Then the command is not restarted here, and a
    failure is returned only after the pause of the restart policy.
    """
    once = restarts if num_before is None else replace(restarts, max_restarts=0)
    begun_at_s = time.monotonic()
    signals = received_signals(signal.SIGTERM)
    supervisor = IslandSupervisor(IslandCommand(0, name, argv, {}), once)
    supervise([supervisor], _Container(signals, grace_s, begun_at_s + leave_after_s))
    if supervisor.report.state is not State.FAILED or num_before is None:
        return supervisor.report
    has_lasted = time.monotonic() - begun_at_s >= restarts.crash_window_s
    num_crashes = 0 if has_lasted else num_before + 1
    is_last = num_before >= restarts.max_restarts
    return _paused(
        supervisor.report, 0.0 if is_last else restarts.pause_s(num_crashes), signals
    )


def _paused(report: Report, pause_s: float, signals: Sequence[int]) -> Report:
    """Return the report of a failure after a pause; CANCELLED if SIGTERM came."""
    if pause_s:
        write_line(
            f"{report.name} ended with {report.reason}, and exits in {pause_s:g} s."
        )
    until_s = time.monotonic() + pause_s
    while not signals and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    return replace(report, state=State.CANCELLED) if signals else report


def exit_code(report: Report) -> int:
    """Return the exit code of a leader, without `--message`."""
    if report.state is State.FINISHED:
        return 0
    if report.state is State.CANCELLED:
        return EXIT_CANCELLED
    code = report.exit_code
    status = 1 if code is None else code if code > 0 else 128 - code
    # A failed island was not cancelled: with this code an engine would restart it
    # forever, or report it as cancelled.
    return 1 if status == EXIT_CANCELLED else status


def _message(report: Report) -> str:
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
    report = lead(
        f"{options.name}-{index}",
        options.command,
        Restarts.from_dict(options.restarts),
        leave_after_s=options.leave_after_s,
        grace_s=options.grace_s,
        num_before=_num_before() if options.once else None,
    )
    if options.message is None:
        sys.exit(exit_code(report))
    options.message.write_text(_message(report))
    sys.exit(EXIT_GIVEN_UP if report.state is State.FAILED else exit_code(report))


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
    parser.add_argument("--leave-after-s", type=float, default=math.inf)
    parser.add_argument("--grace-s", type=float, default=GRACE_S)
    parser.add_argument("--message", type=Path)
    parser.add_argument("command", nargs="+")
    return parser


if __name__ == "__main__":
    main()
