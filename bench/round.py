"""How long does a full-model round take over a coordinator, and where does it go?

A coordinator and its islands are processes of their own on one machine. Beside them,
in the same run and in turns: the floor (the same wire bytes over one raw socket per
island, the codec passes alone, write and fsync of the agreed bytes), an all-reduce by
gloo, torchft's DiLoCo step, and what anybody would write first with `http.server` and
`torch.save`. In every turn each scheme starts anew and warms up, for not all of
them fit into memory at once. A ratio to the floor tells how many times as
long ours takes; to others, a ratio of 2 means that ours takes half as long.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from _round_crew import Crew
from _round_schemes import NO_TORCHFT, WIRES, Plan, Round, schemes
from _timing import TURNS, Row, parse, report

WARM_UPS = 2
"""The second buffers of what is kept from round to round come with the second."""

ROUNDS = 2
"""Timed rounds of a scheme in each turn."""

TIMES_FLOOR = 1.5
TIMES_TORCHFT = {"fp32": 1.0, "e3m0": 3.0}
TIMES_NAIVE = 5.0

TITLES = {
    "seconds": "a round beside others",
    "cpu_s": "CPU time of all processes of a round, which a busy machine changes less",
}
Taken = Mapping[str, list[Round]]
"""The rounds of each scheme."""


def main() -> None:
    """Print the tables."""
    given = arguments()
    found = {each: measured(each, given) for each in given.islands}
    size = f"{given.elements} elements, median of {given.turns} turns"
    for what in ("seconds", "cpu_s"):
        lines = [
            line for each in given.islands for line in rows(each, found[each], what)
        ]
        report(f"{TITLES[what]}, {size}", lines)
        print()
    if "torchft" not in next(iter(found.values())):
        print(f"\n{NO_TORCHFT}")
    for islands, taken in found.items():
        for name in taken:
            tell_parts(f"{islands} islands, {name}", taken[name])


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--wires", choices=WIRES, nargs="+", default=list(WIRES))
    parser.add_argument("--only", nargs="+", help="schemes, by their first word")
    parser.add_argument("--tls", action="store_true", help="ours alone has it then")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    return parse(parser, elements=50_000, turns=1, islands=[2], wires=["bf16"])


def measured(islands: int, given: argparse.Namespace) -> Taken:
    """Return the timed rounds of every scheme, taken in turns."""
    taken: dict[str, list[Round]] = defaultdict(list)
    for turn in range(given.turns):
        for name, start in schemes(given.wires).items():
            if given.only and name.split()[0] not in given.only:
                continue
            with (
                tempfile.TemporaryDirectory(dir=given.folder) as folder,
                Crew() as crew,
            ):
                make = start(
                    crew,
                    Plan(
                        islands=islands,
                        elements=given.elements,
                        has_tls=given.tls,
                        folder=Path(folder),
                    ),
                )
                rounds = [make() for _ in range(WARM_UPS + ROUNDS)][WARM_UPS:]
            taken[name] += rounds
            times = " ".join(f"{r.seconds:.3f} s (CPU {r.cpu_s:.3f})" for r in rounds)
            print(f"turn {turn}, {islands} islands, {name}: {times}", file=sys.stderr)
    return taken


def rows(islands: int, taken: Taken, what: str) -> Iterator[Row]:
    """Yield ours beside everything that was measured."""
    took = {
        name: statistics.median(getattr(each, what) for each in rounds)
        for name, rounds in taken.items()
    }
    for wire in WIRES:
        mine = took.get(f"ours {wire}")
        if mine is None:
            continue
        for other, peer_s in took.items():
            goal = goal_of(wire, other)
            if goal is None:
                continue
            is_floor = other.startswith("floor")
            yield Row(
                what=f"{islands} islands, {wire} beside {other}",
                ours_s=mine,
                peer_s=peer_s,
                ratio=mine / peer_s if is_floor else peer_s / mine,
                limit=goal if goal and what == "seconds" else None,
                at_most=is_floor,
            )


def goal_of(wire: str, other: str) -> float | None:
    """Return the ratio that ours should reach, 0 for none; None: not to compare."""
    scheme, _, of = other.partition(" ")
    if scheme == "floor":
        return TIMES_FLOOR if of == wire else None
    if scheme == "gloo":
        return 0.0 if of == wire or (wire, of) == ("e3m0", "bf16") else None
    if scheme == "torchft":
        return TIMES_TORCHFT.get(wire, 0.0)
    return TIMES_NAIVE if scheme == "naive" else None


def tell_parts(title: str, rounds: list[Round]) -> None:
    """Print the median of each part of a scheme's rounds, if it has any."""
    names = dict.fromkeys(name for each in rounds for name in each.parts)
    if not names:
        return
    print(f"\n{title:48} {'ms':>9} {'CPU ms':>9}")
    for name in names:
        parts = [each.parts[name] for each in rounds if name in each.parts]
        medians = [
            statistics.median(column) * 1e3 for column in zip(*parts, strict=True)
        ]
        print(f"    {name:44} " + " ".join(f"{each:9.1f}" for each in medians))


if __name__ == "__main__":
    main()
