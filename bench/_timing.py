"""Interleaved medians: two things are compared only within one run, turn by turn.

Absolute times on shared machines differ by a factor of two from minute to minute;
ratios of medians taken in turns do not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

TURNS = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: a ratio, beside its limit if it has one."""

    what: str
    ours_s: float
    peer_s: float
    ratio: float
    limit: float | None = None
    at_most: bool = False
    """Whether the limit is an upper one; else the ratio must reach it."""

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return ""
        holds = self.ratio <= self.limit if self.at_most else self.ratio >= self.limit
        sign = "<=" if self.at_most else ">="
        return f"{sign} {self.limit:g} {'holds' if holds else 'MISSED'}"


def medians(
    actions: Mapping[str, Callable[[], object]], *, turns: int = TURNS
) -> dict[str, float]:
    """Return the median seconds of each action, taken in turns after one warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(turns + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def arguments(
    description: str, *, elements: int = 100_000_000, smoke_elements: int = 100_000
) -> argparse.Namespace:
    """Return the command line: `--elements`, `--turns` and `--smoke`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--elements", type=int, default=elements)
    parser.add_argument("--turns", type=int, default=TURNS)
    return parse(parser, elements=smoke_elements, turns=1)


def parse(parser: argparse.ArgumentParser, **smoke: object) -> argparse.Namespace:
    """Return the command line; `--smoke` replaces options by the sizes in `smoke`."""
    parser.add_argument(
        "--smoke", action="store_true", help="tiny sizes, which measure nothing"
    )
    options = parser.parse_args()
    if options.smoke:
        vars(options).update(smoke)
    return options


def report(title: str, rows: Iterable[Row]) -> None:
    """Print the table and how to get it again."""
    print(f"{title}\n    python {' '.join(sys.argv)}\n")
    print(f"{'':40} {'ours ms':>9} {'peer ms':>9} {'ratio':>7}  limit")
    for row in rows:
        times = f"{row.ours_s * 1e3:9.1f} {row.peer_s * 1e3:9.1f} {row.ratio:7.2f}"
        print(f"{row.what:40} {times}  {row.verdict}")
