"""The process that leads one island where an engine starts it once and no more.

    python -m atoll.launch.leading --name reef-3 --restarts JSON --leave-after-s 3540 \
        -- python -m atoll.launch.bootstrap ...

It starts the command, and starts it again by the restart policy; says so in the
island's own log; and passes on what the engine says.

Rule 1: SIGTERM, and a time limit that comes near, tell the island to leave its run. It
has `base.GRACE_S` for that, and the leader ends with `TOLD_TO_GO`.
Rule 2: else the leader ends as the island's last life did; but never with
`TOLD_TO_GO`, for which it is 1.
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
from atoll.launch.bootstrap import bootstrap_words
from atoll.launch.spec import IslandSpec, Restarts
from atoll.launch.supervise import Life, Words

MODULE = "atoll.launch.leading"
LOOK_S = 0.1
TOLD_TO_GO = 128 + signal.SIGTERM
"""The leader's exit code: its island did not fail, and has not finished."""

LEAVE_BEFORE_S = 60.0
"""How long before the end of its time an island is told to go."""


def leader_words(
    spec: IslandSpec,
    index: int,
    *,
    limit_s: float,
    python: str = "python",
    prefix_from: str | None = None,
) -> list[str]:
    """Return the words by which an engine starts an island that is led.

    It is told to go before `limit_s` are over, in which the engine ends it.
    """
    leave_s = max(limit_s - LEAVE_BEFORE_S, limit_s / 2.0)
    restarts = json.dumps(spec.restarts.to_dict())
    words = [python, "-m", MODULE, "--name", spec.island(index)]
    words += ["--restarts", restarts, "--leave-after-s", f"{leave_s:g}", "--"]
    boot = bootstrap_words(spec, index=index, python=python, prefix_from=prefix_from)
    return [*words, *boot]


def with_requirements(words: Sequence[str], requirements: Sequence[str]) -> list[str]:
    """Return the words that have pip install something first, in a container."""
    if not requirements:
        return list(words)
    wanted = " ".join(shlex.quote(each) for each in requirements)
    script = f'python -m pip install --quiet {wanted} && exec "$@"'
    return ["sh", "-c", script, "sh", *words]


def lead(
    name: str,
    words: Sequence[str],
    restarts: Restarts,
    *,
    leave_after_s: float = math.inf,
    grace_s: float = GRACE_S,
    num_before: int | None = None,
) -> Report:
    """Lead an island until it is over, and return how it ended.

    An engine that starts it again itself, and at once, gives the number of its lives
    before: then this one is all, and a death is told after the pause that is due.
    """
    once = restarts if num_before is None else replace(restarts, max_restarts=0)
    begun_at_s = time.monotonic()
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    led = Life(0, name, once, Words(say=_say, start=lambda: _Led(words)))
    leave_at_s = time.monotonic() + leave_after_s
    while not led.is_over:
        now_s = time.monotonic()
        if heard or now_s >= leave_at_s:
            led.cancel(now_s, grace_s=grace_s)
        led.look(now_s)
        time.sleep(LOOK_S)
    if led.report.state is not State.FAILED or num_before is None:
        return led.report
    has_lasted = time.monotonic() - begun_at_s >= restarts.crash_window_s
    num_crashes = 0 if has_lasted else num_before + 1
    is_last = num_before >= restarts.max_restarts
    return _paused(led.report, 0.0 if is_last else restarts.pause_s(num_crashes), heard)


def _paused(report: Report, pause_s: float, heard: Sequence[int]) -> Report:
    """Return what is to be told of a death after a pause: who is told to go, goes."""
    if pause_s:
        _say(f"{report.name} ended with {report.reason}, and goes in {pause_s:g} s.")
    until_s = time.monotonic() + pause_s
    while not heard and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    return replace(report, state=State.CANCELLED) if heard else report


class _Led:
    """A life: a process that leads a session, with all that it starts."""

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
        # The first process tells its own, torchrun its ranks: a second SIGTERM would
        # end those before they have left.
        tell = os.kill if number == signal.SIGTERM else os.killpg
        try:
            tell(self._process.pid, number)
        except ProcessLookupError:
            return


def _say(text: str) -> None:
    os.write(sys.stdout.fileno(), f"atoll: {text}\n".encode())


def exit_code(report: Report) -> int:
    """Return what the leader of an island ends with."""
    if report.state is State.FINISHED:
        return 0
    if report.state is State.CANCELLED:
        return TOLD_TO_GO
    code = report.exit_code
    said = 1 if code is None else code if code > 0 else 128 - code
    # Who failed was not told to go: an engine would start it again and again, or take
    # it for cancelled.
    return 1 if said == TOLD_TO_GO else said


def main(arguments: Sequence[str] | None = None) -> None:
    """Lead the island that an engine has started."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--name", required=True)
    parser.add_argument("--restarts", type=json.loads, required=True)
    parser.add_argument("--leave-after-s", type=float, required=True)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    report = lead(
        given.name,
        given.command,
        Restarts.from_dict(given.restarts),
        leave_after_s=given.leave_after_s,
    )
    sys.exit(exit_code(report))


if __name__ == "__main__":
    main()
