"""The process that leads one island on an engine that starts a job only once.

    python -m atoll.launch.job_leader --name reef-3 --restarts JSON \
        --leave-after-s 3540 -- python -m atoll.launch.bootstrap ...

It starts the command, restarts it by the restart policy, reports restarts in the
island's own log, and forwards signals of the engine.

Rule 1: on SIGTERM, and shortly before a time limit, the leader sends SIGTERM to the
island, which has `base.GRACE_S` to leave its run. The leader exits with
`EXIT_CANCELLED`.
Rule 2: otherwise the leader exits with the code of the island's last incarnation, but
with 1 instead of `EXIT_CANCELLED`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from atoll.launch.base import GRACE_S, Report, State
from atoll.launch.bootstrap import bootstrap_argv
from atoll.launch.spec import IslandSpec, Restarts
from atoll.launch.supervise import IslandSupervisor, ProcessHooks

MODULE = "atoll.launch.job_leader"
LOOK_S = 0.1
EXIT_CANCELLED = 128 + signal.SIGTERM
"""The leader's exit code: its island did not fail, and has not finished."""

LEAVE_BEFORE_S = 60.0
"""How long before its time limit an island receives SIGTERM."""


def leader_argv(
    spec: IslandSpec,
    index: int,
    *,
    limit_s: float,
    python: str = "python",
    prefix_from: str | None = None,
) -> list[str]:
    """Return the argv with which an engine starts an island's leader.

    The island receives SIGTERM before `limit_s`, when the engine ends the job.
    """
    leave_s = max(limit_s - LEAVE_BEFORE_S, limit_s / 2.0)
    restarts = json.dumps(spec.restarts.to_dict())
    argv = [python, "-m", MODULE, "--name", spec.island(index)]
    argv += ["--restarts", restarts, "--leave-after-s", f"{leave_s:g}", "--"]
    bootstrap = bootstrap_argv(
        spec, index=index, python=python, prefix_from=prefix_from
    )
    return [*argv, *bootstrap]


def with_requirements(argv: Sequence[str], requirements: Sequence[str]) -> list[str]:
    """Return an argv that installs packages with pip, and then executes `argv`."""
    if not requirements:
        return list(argv)
    packages = " ".join(shlex.quote(requirement) for requirement in requirements)
    script = f'python -m pip install --quiet {packages} && exec "$@"'
    return ["sh", "-c", script, "sh", *argv]


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
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    supervisor = IslandSupervisor(
        0, name, once, ProcessHooks(log=_log, start=lambda: _Session(argv))
    )
    leave_at_s = time.monotonic() + leave_after_s
    while not supervisor.is_over:
        now_s = time.monotonic()
        if signals or now_s >= leave_at_s:
            supervisor.cancel(now_s, grace_s=grace_s)
        supervisor.look(now_s)
        time.sleep(LOOK_S)
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
        _log(f"{report.name} ended with {report.reason}, and exits in {pause_s:g} s.")
    until_s = time.monotonic() + pause_s
    while not signals and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    return replace(report, state=State.CANCELLED) if signals else report


class _Session:
    """One incarnation: a process that leads a session, with all that it starts."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, number: int) -> None:
        # The first process forwards SIGTERM to its children, torchrun to its ranks: a
        # second one would end those before they have left.
        send = os.kill if number == signal.SIGTERM else os.killpg
        try:
            send(self._process.pid, number)
        except ProcessLookupError:
            return


def _log(text: str) -> None:
    os.write(sys.stdout.fileno(), f"atoll: {text}\n".encode())


def exit_code(report: Report) -> int:
    """Return the exit code of an island's leader."""
    if report.state is State.FINISHED:
        return 0
    if report.state is State.CANCELLED:
        return EXIT_CANCELLED
    code = report.exit_code
    status = 1 if code is None else code if code > 0 else 128 - code
    # A failed island was not cancelled: with this code an engine would restart it
    # forever, or report it as cancelled.
    return 1 if status == EXIT_CANCELLED else status


def main(arguments: Sequence[str] | None = None) -> None:
    """Lead the island that an engine has started."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--name", required=True)
    parser.add_argument("--restarts", type=json.loads, required=True)
    parser.add_argument("--leave-after-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    report = lead(
        options.name,
        options.command,
        Restarts.from_dict(options.restarts),
        leave_after_s=options.leave_after_s,
    )
    sys.exit(exit_code(report))


if __name__ == "__main__":
    main()
