"""How much memory does a coordinator need, and does it grow with its islands?

A real coordinator serves runs of 2, 8 and 32 islands. Two of them train from the
start; the others join in round 9, and up to 8 of them take the run's state. Round 10 is
compacted while the last rounds go on, the anchor is exported twice, and at the end the
coordinator is started anew on its journal. Islands bring one and the same body, and
train nothing. The limit, 12 bytes per parameter, the agreed body and 64 MB, is for
all that is resident at any time, the interpreter and numba included.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _light import Islands
from _served import Process, Served, Settings, serving, until
from _timing import parse

from atoll.wire import codec

MB = 10**6
PER_PARAMETER = 12
FIXED_BYTES = 64 * MB
FLAT_BYTES = 32 * MB
"""What 32 islands may take beyond 2 of the same codecs."""

FIRST = 2
LATE_ROUND, LAST_ROUND = 9, 12
"""When others join, and the end; by a coordinator's own rule the tenth round is
compacted."""

STATES = 8
"""So many take the state, which is 8 bytes per parameter, at most."""

SAMPLE_S = 0.005
CASES = ((2, "fp32", "fp32"), (2, "e3m0", "int8"), (8, "e3m0", "int8"))
LARGE = (32, "e3m0", "int8")
"""32 islands that bring 100M parameters in fp32 would be 12.8 GB in each round."""


@dataclass
class Memory:
    """The most that was resident in a phase; its parts were highest at some time."""

    rss: int = 0
    anonymous: int = 0
    mapped: int = 0

    def look(self, process: Process) -> None:
        """Take in what is resident now."""
        self.anonymous = max(self.anonymous, process.said("RssAnon"))
        self.mapped = max(self.mapped, process.said("RssFile"))


@dataclass
class Phases:
    """What each phase of a run took."""

    process: Process
    most: dict[str, Memory] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch the process while the block lasts."""
        memory = self.most.setdefault(name, Memory())
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(SAMPLE_S):
                memory.look(self.process)

        self.process.forget_highest()
        watching = threading.Thread(target=sample, daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()
            memory.rss = max(memory.rss, self.process.said("VmHWM"))
            memory.look(self.process)


def main() -> None:
    """Print a table for each case, and what they have in common."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--islands", type=int, nargs="*", default=[2, 8, 32])
    parser.add_argument("--up", nargs="*", default=["fp32", "e3m0"])
    given = parse(parser, elements=100_000, islands=[2], up=["e3m0"])
    cases = [
        case
        for case in (*CASES, LARGE)
        if case[0] in given.islands and case[1] in given.up
    ]
    print(f"resident memory of a coordinator, {given.elements} parameters, in MB\n")
    highest: dict[tuple[str, str], dict[int, int]] = {}
    for islands, up, down in cases:
        most = measure(islands, up, down, given.elements)
        limit = limit_of(down, given.elements)
        tell(f"{islands} islands, {up} up and {down} down", most, limit)
        rss = max(each.rss for each in most.values())
        highest.setdefault((up, down), {})[islands] = rss
    for (up, down), by_islands in highest.items():
        tell_growth(f"{up} up and {down} down", by_islands)


def limit_of(down: str, elements: int) -> int:
    """Return what a coordinator may take."""
    agreed = codec(down).body_bytes(elements)
    return PER_PARAMETER * elements + agreed + FIXED_BYTES


def tell(what: str, most: dict[str, Memory], limit: int) -> None:
    """Print one run's phases, and its highest beside the limit."""
    print(f"{what:40} {'highest':>8} {'anonymous':>10} {'mapped':>8}")
    for name, each in most.items():
        parts = f"{each.anonymous / MB:10.0f} {each.mapped / MB:8.0f}"
        print(f"    {name:36} {each.rss / MB:8.0f} {parts}")
    rss = max(each.rss for each in most.values())
    verdict = "holds" if rss <= limit else "MISSED"
    ratio = f"ratio {rss / limit:.2f}"
    print(f"    {'all':36} {rss / MB:8.0f}  <= {limit / MB:.0f} {verdict}, {ratio}\n")


def tell_growth(what: str, by_islands: dict[int, int]) -> None:
    """Print whether memory is flat in the number of islands."""
    if len(by_islands) < 2:
        return
    few, many = min(by_islands), max(by_islands)
    grown = by_islands[many] - by_islands[few]
    verdict = "holds" if grown <= FLAT_BYTES else "MISSED"
    ratio = f"ratio {by_islands[many] / by_islands[few]:.3f}"
    print(f"{what}: from {few} to {many} islands {grown / MB:+.0f} MB", end="")
    print(f"  <= {FLAT_BYTES / MB:.0f} {verdict}, {ratio}")


def measure(islands: int, up: str, down: str, elements: int) -> dict[str, Memory]:
    """Live through a run, and return what each of its phases took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = settings_of(up, down)
        with serving(folder, settings) as served, served.line() as line:
            phases = Phases(served.process)
            with phases.phase("idle"):
                served.status()
            with phases.phase("founding"):
                run = Islands.found(line, elements)
                run.join(FIRST)
            live(run, served, phases, islands)
        with serving(folder, settings) as served:
            again = phases.most["restart on the journal"] = Memory()
            again.rss = served.process.said("VmHWM")
            again.look(served.process)
            assert served.status()["round"] == LAST_ROUND
        return phases.most


def live(run: Islands, served: Served, phases: Phases, islands: int) -> None:
    """Go through all rounds, with late islands, a compaction and exports."""
    with phases.phase(f"rounds 1 to {LATE_ROUND - 1} of {FIRST}"):
        rounds(run, LATE_ROUND - 1)
    late = max(islands - FIRST, 1)
    with phases.phase(f"{late} more join, state, round {LATE_ROUND}"):
        run.join(islands)
        run.take_state(min(late, STATES))
        run.round(FIRST)  # it was open when they joined, and does not wait for them
    with phases.phase("export"):
        export(served)
    with phases.phase(f"rounds {LATE_ROUND + 1} to {LAST_ROUND - 1} of {islands}"):
        rounds(run, LAST_ROUND - 1)
        states = served.directory / "journal" / "states" / "0"
        until("the compaction", lambda: any(states.glob("1[0-9]")))
    with phases.phase(f"export and state during round {LAST_ROUND}"):
        at_once(lambda: rounds(run, LAST_ROUND), lambda: export(served))
        run.take_state(1)


def rounds(run: Islands, last: int) -> None:
    """Go on to a round, all together."""
    while run.state.round < last:
        run.round(len(run.joined))


def at_once(*actions: Callable[[], None]) -> None:
    """Do several things at the same time."""
    with ThreadPoolExecutor(len(actions)) as threads:
        for each in [threads.submit(action) for action in actions]:
            each.result()


def export(served: Served) -> None:
    """Take the anchor as a file of safetensors, and look at its size."""
    places: list[np.ndarray] = []

    def into(size: int) -> memoryview:
        places.append(np.empty(size, np.uint8))
        return memoryview(places[-1].data)

    # While a round is being committed the answer is to ask again.
    until("an export", lambda: served.ask("/anchor", into=into).status == 200)
    assert places


def settings_of(up: str, down: str) -> Settings:
    """Return a run in which nobody is ever late, however slow this machine is."""
    return {
        "run": {"name": "memory", "start_islands": FIRST},
        "sync": {"sync_every": 10},
        "wire": {"up": up, "down": down},
        "outer": {"optimizer": "nesterov"},
        "limits": {"deadline_min_s": 600.0},
    }


if __name__ == "__main__":
    main()
