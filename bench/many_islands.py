"""What do a thousand islands cost a coordinator: rounds, heartbeats, threads, memory?

Islands of a tiny model, driven by one process, publish and wait for outcomes as real
ones do; a second process beats for them all the while and measures how long a beat
takes. Beside it, the same crowd at `http.server` of the standard library, which adds
updates up and keeps nothing: no roster, no journal, no digest, a thread per island.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _crowd import Crowd, Talk
from _crowd_talks import ELEMENTS, Calls, Plain
from _light import Islands, joining
from _served import SERVE, WITHOUT_PAST, Process, Settings, serving
from _timing import parse


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one stack took."""

    round_s: float
    beats_s: Sequence[float]
    threads: int
    rss: int
    cpu_s: float
    """Of the listening side, per round."""

    crowd_s: float
    """Of the processor, by the crowd itself, per round."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--islands", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--past", action="store_true", help="compare with a coordinator without one"
    )
    given = parse(parser, islands=8, rounds=2)
    if given.past:
        compare_past(given.islands, given.rounds)
        return
    ours = at_coordinator(given.islands, given.rounds)
    plain = at_stdlib(given.islands, given.rounds)
    print(f"{given.islands} islands of {ELEMENTS} parameters, {given.rounds} rounds")
    print(f"    python {' '.join(sys.argv)}\n")
    print(f"{'':36} {'ours':>10} {'http.server':>12} {'ratio':>7}")
    for what, mine, theirs in lines(ours, plain):
        ratio = mine / theirs if theirs else float("inf")  # a clock of 10 ms
        print(f"{what:36} {mine:10.2f} {theirs:12.2f} {ratio:7.2f}")


PAIRS = 5
"""Coordinators with and without the past, one after the other."""


def compare_past(count: int, rounds: int) -> None:
    """Print what folding the past costs: the medians of some pairs, and their ratio."""
    with_past, without = [], []
    for _ in range(PAIRS):
        without.append(at_coordinator(count, rounds, code=WITHOUT_PAST))
        with_past.append(at_coordinator(count, rounds))
    print(f"{count} islands of {ELEMENTS} parameters, {rounds} rounds, {PAIRS} pairs")
    print(f"    python {' '.join(sys.argv)}\n")
    print(f"{'':36} {'with past':>10} {'without':>10} {'ratio':>7}")
    figures: dict[str, Callable[[Figures], float]] = {
        "round, ms": lambda figures: 1e3 * figures.round_s,
        "its processor, ms per round": lambda figures: 1e3 * figures.cpu_s,
        "resident, MB": lambda figures: figures.rss / 1e6,
    }
    for name, read in figures.items():
        folded = statistics.median(map(read, with_past))
        plain = statistics.median(map(read, without))
        print(f"{name:36} {folded:10.2f} {plain:10.2f} {folded / plain:7.3f}")


def lines(ours: Figures, plain: Figures) -> Iterator[tuple[str, float, float]]:
    """Yield what is compared."""
    both = (ours, plain)
    yield ("rounds per second", *(1 / each.round_s for each in both))
    for share in (50, 99):
        yield (
            f"heartbeat, p{share}, ms",
            *(1e3 * float(np.percentile(each.beats_s, share)) for each in both),
        )
    yield ("threads", *(each.threads for each in both))
    yield ("resident, MB", *(each.rss / 1e6 for each in both))
    yield ("its processor, ms per round", *(1e3 * each.cpu_s for each in both))
    yield (
        "the crowd's processor, ms per round",
        *(1e3 * each.crowd_s for each in both),
    )


def at_coordinator(count: int, rounds: int, *, code: str = SERVE) -> Figures:
    """Have the crowd at a real coordinator."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = settings_of(count)
        with (
            serving(folder, settings, code=code) as served,
            served.line() as line,
        ):
            run = Islands.found(line, ELEMENTS)
            begun_s = time.monotonic()
            for number in range(1, count):
                line.call(joining(number, ELEMENTS))
            took_s = time.monotonic() - begun_s
            print(f"joining, one after the other: {count / took_s:.0f} per second\n")
            talk = Calls(served, run)
            beats = [talk.beat(number) for number in range(count)]
            return crowded(served.process, served.address, count, rounds, talk, beats)


def at_stdlib(count: int, rounds: int) -> Figures:
    """Have the crowd at the standard library."""
    script = str(Path(__file__).with_name("_crowd_stdlib.py"))
    beat = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n{}"
    with listening([sys.executable, script, str(count)]) as process:
        assert process.stdout is not None
        address = ("127.0.0.1", int(process.stdout.readline()))
        known = Process(process.pid)
        return crowded(known, address, count, rounds, Plain(), [beat])


def crowded(
    process: Process,
    address: tuple[str, int],
    count: int,
    rounds: int,
    talk: Talk,
    beats: Sequence[bytes],
) -> Figures:
    """Let a crowd train while somebody beats."""
    with Crowd(address, count, talk) as crowd:
        crowd.train(1, 1)  # loads what is loaded once
        with probing(address, beats) as took:
            before_s, own_s, begun_s = (
                process.cpu_s,
                time.process_time(),
                time.monotonic(),
            )
            ends = crowd.train(2, rounds + 1)
            cpu_s = (process.cpu_s - before_s) / rounds
            crowd_s = (time.process_time() - own_s) / rounds
            threads, rss = process.said("Threads"), process.said("VmRSS")
    lengths = np.diff([begun_s, *ends])
    return Figures(
        round_s=statistics.median(lengths.tolist()),
        beats_s=took,
        threads=threads,
        rss=rss,
        cpu_s=cpu_s,
        crowd_s=crowd_s,
    )


@contextmanager
def probing(address: tuple[str, int], beats: Sequence[bytes]) -> Iterator[list[float]]:
    """Beat while the block lasts; then the list has how long each beat took."""
    took: list[float] = []
    script = str(Path(__file__).with_name("_prober.py"))
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("\n".join(beat.hex() for beat in beats))
        file.flush()
        with listening([sys.executable, script, str(address[1]), file.name]) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            process.stdout.readline()
            yield took
            process.stdin.close()
            took += json.loads(process.stdout.readline())


@contextmanager
def listening(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that ends with its standard input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdin is not None
        yield process
        process.stdin.close()


def settings_of(count: int) -> Settings:
    """Return a run that begins when all are here, and in which nobody is late."""
    return {
        "run": {"name": "many", "start_islands": count, "quorum": count},
        "sync": {"sync_every": 10},
        "wire": {"up": "bf16", "down": "bf16"},
        "limits": {"deadline_min_s": 600.0},
    }


if __name__ == "__main__":
    main()
