"""Many trials by storm, in several processes; what fails is shrunk and printed.

    python -m atoll.simulate.storming --storms 10000 --first 0

exits with 1 when an invariant did not hold in one of them. With --store the islands
meet in a bucket.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from atoll.simulate.trials import Trial, store_trial, trial

BATCH = 25
"""Storms between two looks at the progress."""

SHRUNK = 3
"""So many failures are shrunk; more of them are seldom more bugs."""


@dataclass
class Tally:
    """What some storms came to."""

    storms: int = 0
    rounds: int = 0
    events: int = 0
    deaths: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    """By seed: the first violation."""

    def add(self, other: Tally) -> None:
        self.storms += other.storms
        self.rounds += other.rounds
        self.events += other.events
        self.deaths += other.deaths
        self.failures.update(other.failures)

    def __str__(self) -> str:
        return (
            f"{self.storms} storms, {self.rounds} rounds, {self.deaths} deaths, "
            f"{self.events} events, {len(self.failures)} violations"
        )


def settle() -> None:
    """Make this process fit for storms, which make little garbage that is cyclic.

    What was imported is looked at no more, and what a storm makes less often: that is
    some 3 % of all the time, and costs some MB.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def weather(seeds: Sequence[int], draw: Callable[[int], Trial] = trial) -> Tally:
    """Run the storms of `seeds`, one after the other."""
    tally = Tally()
    for seed in seeds:
        result = draw(seed).run()
        tally.storms += 1
        tally.rounds += sum(result.rounds)
        tally.events += result.events
        tally.deaths += sum(result.deaths.values())
        if result.violations:
            tally.failures[seed] = str(result.violations[0])
    return tally


def weather_all(
    first: int,
    storms: int,
    *,
    processes: int,
    draw: Callable[[int], Trial] = trial,
) -> Iterator[Tally]:
    """Run storms in several processes, and yield what they have come to so far."""
    total = Tally()
    batches = [
        range(start, min(start + BATCH, first + storms))
        for start in range(first, first + storms, BATCH)
    ]
    # Spawned, not forked: whoever calls this may have threads.
    fresh = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=fresh, initializer=settle) as pool:
        for tally in pool.map(partial(weather, draw=draw), batches):
            total.add(tally)
            yield total


def explain(seed: int, draw: Callable[[int], Trial] = trial) -> str:
    """Return a failed storm as a test, its plan as small as it could be made."""
    return draw(seed).shrunk().as_test()


def main(words: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description="Run storms in virtual time.")
    parser.add_argument("--storms", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="over a bucket")
    asked = parser.parse_args(words)
    draw = store_trial if asked.store else trial
    since_s, total = time.monotonic(), Tally()
    storms = weather_all(
        asked.first, asked.storms, processes=asked.processes, draw=draw
    )
    for total in storms:
        sys.stdout.write(f"\r{time.monotonic() - since_s:6.0f} s  {total}")
        sys.stdout.flush()
    sys.stdout.write("\n")
    for at, (seed, violation) in enumerate(sorted(total.failures.items())):
        sys.stdout.write(f"seed {seed}: {violation}\n")
        if at < SHRUNK:
            sys.stdout.write(f"\n{explain(seed, draw)}\n")
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
