"""How long do the others wait when one of three islands dies?

Real processes: a coordinator and three islands that send an update every half second.
One of them is killed (its connection closes), or stopped (it falls silent), and the
clock runs until the first commit that is made without it. Then one is left alone with
a busy processor for 5 s, at the lowest priority there is: it must keep its place.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _served import Process, Served, serving, until
from _starved import starved
from _timing import TURNS, Row, parse

KILLED_S = 2.0
"""The limit from a closed connection to the others' next commit."""

NOTICED_S = 0.25
"""By so much a commit may follow a deadline: it is noticed by a clock of 0.1 s, and
then the round is reduced and made durable."""

STARVED_S = 5.0
STEP_S, SYNC_EVERY = 0.05, 10
KNOWN = 6
"""Rounds in which an island must have counted before its pace is known."""

NAMES = ("a", "b", "c")
VICTIM = "c"

PUBLISHED = """\
torchft, for comparison (measured apart from this run, with
torchft-nightly 2026.10.26 on CPU, two replicas): death between two syncs stalls the
survivor for 4.07 s; death during the all-reduce fails the survivor's commit, throws all
its inner steps since the last one away, and the next sync stalls 3.9 to 4.1 s more; a
replica stopped for 20 s stalls the survivor for 4.6 s.
That survivors here keep all their work is shown by tests/e2e/test_islands_die.py."""


@dataclass
class Stage:
    """A run of three islands."""

    served: Served
    folder: Path
    stack: ExitStack
    islands: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start an island."""
        script = str(Path(__file__).with_name("_island.py"))
        log = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        process = subprocess.Popen(
            [sys.executable, script, self.served.url, name, str(STEP_S)],
            env=dict(self.served.environment),
            stderr=log,
        )
        self.stack.callback(end, process)
        self.islands[name] = process
        return process

    def until_known(self, since_unix_s: float) -> None:
        """Return when all three have counted in enough rounds since a moment."""

        def is_known() -> bool:
            for name, island in self.islands.items():
                assert island.poll() is None, (self.folder / f"{name}.log").read_text()
            return len(self.commits(since_unix_s, counted=len(NAMES))) >= KNOWN

        until("a known pace", is_known)

    def commits(self, since_unix_s: float, **fields: object) -> list[dict[str, Any]]:
        """Return the commits after a moment, oldest first."""
        found = self.served.events("round_committed", **fields)
        return [each for each in found if each["at"] > since_unix_s]

    def without_s(self, since_unix_s: float) -> float:
        """Return how long it took to the first commit without the victim."""
        survivors = len(NAMES) - 1

        def first() -> list[dict[str, Any]]:
            return self.commits(since_unix_s, counted=survivors)

        found = until("a commit without it", first, within_s=60.0)
        return float(found[0]["at"]) - since_unix_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=TURNS)
    given = parse(parser, turns=1)
    turns, starved_s = given.turns, 1.0 if given.smoke else STARVED_S
    with staged() as stage:
        victim = stage.start(VICTIM)
        killed, stopped = [], []
        for _ in range(turns):
            victim, took_s = kill(stage, victim)
            killed.append(took_s)
            stopped.append(stop(stage, victim))
        starvation = starve(stage, victim, starved_s)
        silence = stay_silent(stage, victim)
    tell(killed, stopped)
    print(f"{starvation}\n{silence}\n\n{PUBLISHED}")


def tell(killed: list[float], stopped: list[tuple[float, float]]) -> None:
    """Print medians beside their limits, and all that they are medians of."""
    took_s = statistics.median(killed)
    commit_s = statistics.median(each for each, _ in stopped)
    deadline_s = statistics.median(each for _, each in stopped)
    over_s = statistics.median(waited - told for waited, told in stopped)
    print("from the death of one of three islands to the others' next commit")
    print(f"    python {' '.join(sys.argv)}\n")
    print(f"{'':40} {'ours s':>8} {'limit s':>8} {'ratio':>7}")
    tell_row("SIGKILL: its connection closes", took_s, KILLED_S)
    told = f"SIGSTOP: a deadline of {deadline_s:.2f} s was told"
    tell_row(told, commit_s, deadline_s + NOTICED_S)
    print(f"\nAll, killed: {', '.join(f'{each:.2f}' for each in killed)} s.")
    said = (f"{waited:.2f} ({told:.2f})" for waited, told in stopped)
    print(f"All, stopped (status had said): {', '.join(said)} s.")
    print(f"A commit follows a deadline by {over_s * 1e3:.0f} ms.\n")


def tell_row(what: str, ours_s: float, limit_s: float) -> None:
    """Print one figure beside its limit."""
    ratio = ours_s / limit_s
    numbers = {"ours_s": ours_s, "peer_s": limit_s, "ratio": ratio}
    row = Row(what=what, **numbers, limit=1.0, at_most=True)
    print(f"{what:40} {ours_s:8.2f} {limit_s:8.2f} {ratio:7.2f}  {row.verdict}")


def kill(
    stage: Stage, victim: subprocess.Popen[bytes]
) -> tuple[subprocess.Popen[bytes], float]:
    """Kill the victim, and return its next life and how long the others waited."""
    stage.until_known(time.time())
    killed_s = time.time()
    victim.kill()
    victim.wait()
    took_s = stage.without_s(killed_s)
    return stage.start(VICTIM), took_s


def stop(stage: Stage, victim: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Stop the victim; return how long the others waited, and what they were told."""
    stage.until_known(time.time())
    stopped_s = time.time()
    victim.send_signal(signal.SIGSTOP)
    told_s = until("status names it", lambda: late_at(stage.served)) - stopped_s
    took_s = stage.without_s(stopped_s)
    victim.send_signal(signal.SIGCONT)
    return took_s, told_s


def late_at(served: Served) -> float | None:
    """Return when the victim is late, as the status of an unmoved round says."""
    status = served.status()
    waits = {each["island"]: each["late_in_s"] for each in status["waits_for"]}
    if VICTIM not in waits or len(waits) > 1:
        return None
    return float(status["now_unix_s"]) + float(waits[VICTIM])


def starve(stage: Stage, victim: subprocess.Popen[bytes], seconds: float) -> str:
    """Leave the victim without a processor for a while; say what became of it."""
    stage.until_known(time.time())
    begun_s, process = time.time(), Process(victim.pid)
    before_s = process.cpu_s
    with starved(victim.pid):
        time.sleep(seconds)
    used_s = process.cpu_s - before_s
    stage.until_known(time.time())
    names = ("island_silent", "island_left", "island_joined")
    found = [
        each for name in names for each in stage.served.events(name, island=VICTIM)
    ]
    is_evicted = any(each["at"] > begun_s for each in found)
    missed = len(stage.commits(begun_s, counted=len(NAMES) - 1))
    verdict = "MISSED: it was evicted" if is_evicted else "holds: it was not evicted"
    return (
        f"Starved for {seconds:g} s, in which it got {used_s * 1e3:.0f} ms of a "
        f"processor: {verdict}.\n{missed} commits were made without it; then it "
        "counted again."
    )


def stay_silent(stage: Stage, victim: subprocess.Popen[bytes]) -> str:
    """Stop the victim for good; say when nobody waits for it any more."""
    stopped_s = time.time()
    victim.send_signal(signal.SIGSTOP)

    def silent() -> list[float]:
        found = stage.served.events("island_silent", island=VICTIM)
        return [each["at"] for each in found if each["at"] > stopped_s]

    silent_s = until("silence", silent)[0]
    until("rounds of two", lambda: len(stage.commits(silent_s)) >= KNOWN)
    first, *_ = stage.commits(silent_s)
    return (
        "An island that missed a round is awaited once more, until its lease ends: "
        f"after {first['at'] - stopped_s:.1f} s\nof silence, nobody waits for it."
    )


@contextmanager
def staged() -> Iterator[Stage]:
    """Give a run in which the survivors train already."""
    settings = {
        "run": {"name": "death", "start_islands": len(NAMES)},
        "sync": {"sync_every": SYNC_EVERY, "overlap_steps": 2},
        "outer": {"momentum": 0.5},
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = stack.enter_context(serving(folder, settings))
        stage = Stage(served, folder, stack)
        for name in NAMES:
            if name != VICTIM:
                stage.start(name)
        yield stage


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process in any case."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait()


if __name__ == "__main__":
    main()
