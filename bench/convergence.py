"""What do unequal islands, stragglers and a small wire cost in loss and in time?

Four islands train a model of 34,502 parameters until the tokens of 8000 inner steps
have counted, in virtual time, under each case and three seeds. Ratios are means over
the seeds, each beside the reference of the same seed, with their range. The program
ends with status 1 if a limit is missed. With --write the tables of docs/convergence.md
are made anew.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

from _convergence_runs import UNEQUAL_S, Case, Ran, run
from _timing import parse

from atoll.simulate import FaultPlan

PAGE = Path(__file__).parents[1] / "docs" / "convergence.md"
COLUMNS = (
    "case",
    "loss",
    "loss ratio",
    "clock s",
    "clock ratio",
    "rounds",
    "waiting",
    "sent MB",
    "limits",
)

Runs = Mapping[str, Sequence[Ran]]
"""The results of each case, one per seed."""

DYNAMIC = {"sync.dynamic_local_updates": True, "outer.weight": "tokens"}


def straggler() -> FaultPlan:
    """Let one island need 5.7 times as long, for five minutes out of every ten."""
    plan = FaultPlan()
    for at_s in range(300, 12_000, 600):
        plan = plan.slow("i3", factor=5.7, at_s=at_s, for_s=300)
    return plan


def narrow_links() -> FaultPlan:
    """Let an update in fp32 take 3 s, a tenth of a window, after all have joined."""
    return FaultPlan().throttle("*", bytes_per_s=46_000, at_s=10)


FP32 = {"wire.up": "fp32", "wire.down": "fp32"}
OUTER_SGD = {"outer.optimizer": "sgd", "outer.lr": 1.0}


def streaming(up: str, down: str) -> dict[str, Any]:
    """Return the settings of four fragments with overlap, and these codecs."""
    return {
        "sync.num_fragments": 4,
        "sync.fragment_order": "by_size",
        "sync.overlap_steps": 5,
        "wire.up": up,
        "wire.down": down,
    }


TABLES: Mapping[str, Sequence[Case]] = {
    "equal": (Case(name="synchronous"),),
    "unequal": (Case(name="synchronous", step_s=UNEQUAL_S),),
    "straggler": (Case(name="synchronous", plan=straggler()),),
    "wire": (
        Case(name="vanilla, fp32", plan=narrow_links(), settings=FP32),
        *(
            Case(
                name=f"streaming, {up} up, {down} down",
                plan=narrow_links(),
                settings=streaming(up, down),
                loss_at_most=1.015,
                clock_at_most=0.9,
                waiting_at_most=0.02,
            )
            for up, down in (
                ("fp32", "fp32"),
                ("bf16", "bf16"),
                ("bf16-stochastic", "bf16"),
                ("int8", "int8"),
                ("e3m0", "int8"),
            )
        ),
        Case(
            name="vanilla, fp32, outer SGD",
            plan=narrow_links(),
            settings={**FP32, **OUTER_SGD},
        ),
        Case(
            name="streaming, topk-2bit up, int8 down, outer SGD",
            plan=narrow_links(),
            settings={**streaming("topk-2bit", "int8"), **OUTER_SGD},
            reference="vanilla, fp32, outer SGD",
            loss_at_most=1.05,
            clock_at_most=0.9,
            waiting_at_most=0.02,
        ),
    ),
}
"""Cases are compared with the first one of their table, unless they name another."""


def main() -> None:
    """Print the tables; end with status 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inner-steps", type=int, default=8000, help="of all islands")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=TABLES, help="one table")
    parser.add_argument("--write", action="store_true", help="docs/convergence.md")
    options = parse(parser, inner_steps=480, seeds=1)
    names = [options.only] if options.only else list(TABLES)
    results = measure(names, options)
    for name in names:
        print(f"{name}\n")
        print("\n".join(lines(TABLES[name], results[name])))
        print()
    if options.write:
        write_tables(results)
    if missed := num_missed(results):
        print(f"{missed} limits are missed")
        sys.exit(0 if options.smoke else 1)


def measure(names: Sequence[str], options: argparse.Namespace) -> Mapping[str, Runs]:
    """Return the results of all cases of these tables, run in several processes."""
    # One thread per process: two processes have two cores, and sums keep their order.
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
    tasks = [
        (name, index, seed)
        for seed in range(options.seeds)
        for name in names
        for index in range(len(TABLES[name]))
    ]
    act = partial(_measured, inner_steps=options.inner_steps)
    fresh = get_context("spawn")
    results: dict[str, dict[str, list[Ran]]] = {name: {} for name in names}
    with ProcessPoolExecutor(options.processes, mp_context=fresh) as pool:
        for (name, index, _), ran in zip(tasks, pool.map(act, tasks), strict=True):
            results[name].setdefault(TABLES[name][index].name, []).append(ran)
    return results


def _measured(task: tuple[str, int, int], *, inner_steps: int) -> Ran:
    name, index, seed = task
    return run(TABLES[name][index], seed=seed, inner_steps=inner_steps)


def lines(cases: Sequence[Case], runs: Runs) -> Iterator[str]:
    """Yield a table that is Markdown as well."""
    yield _line(COLUMNS)
    yield _line(["---", *["---:"] * (len(COLUMNS) - 2), "---"])
    for case in cases:
        rans, peers = runs[case.name], runs[case.reference or cases[0].name]
        yield _line(
            (
                case.name,
                f"{mean(ran.loss for ran in rans):.3f}",
                _ratio(rans, peers, "loss"),
                f"{mean(ran.clock_s for ran in rans):.0f}",
                _ratio(rans, peers, "clock_s"),
                f"{mean(ran.rounds for ran in rans):.0f}",
                f"{mean(ran.waiting for ran in rans):.1%}",
                f"{mean(ran.sent_bytes for ran in rans) / 1e6:.2f}",
                ", ".join(verdicts(case, rans, peers)),
            )
        )


def ratios(rans: Sequence[Ran], peers: Sequence[Ran], figure: str) -> list[float]:
    """Return a figure of each seed beside the same seed of the reference."""
    pairs = zip(rans, peers, strict=True)
    return [getattr(ran, figure) / getattr(peer, figure) for ran, peer in pairs]


def verdicts(case: Case, rans: Sequence[Ran], peers: Sequence[Ran]) -> Iterator[str]:
    """Yield each limit of a case, and whether it holds for the mean over the seeds."""
    loss = mean(ratios(rans, peers, "loss"))
    clock = mean(ratios(rans, peers, "clock_s"))
    waiting = mean(ran.waiting for ran in rans)
    for name, value, limit in (
        ("loss", loss, case.loss_at_most),
        ("clock", clock, case.clock_at_most),
        ("waiting", waiting, case.waiting_at_most),
    ):
        if limit is not None:
            yield f"{name} <= {limit:g} {_verdict(value <= limit)}"
    if case.loss_at_least is not None:
        at_least = case.loss_at_least
        yield f"loss >= {at_least:g} {_verdict(loss >= at_least)}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def _ratio(rans: Sequence[Ran], peers: Sequence[Ran], figure: str) -> str:
    """Return the mean ratio, and the range over the seeds if it is visible."""
    if rans is peers:
        return ""
    values = ratios(rans, peers, figure)
    ends = f"{min(values):.3f}", f"{max(values):.3f}"
    spread = f" ({ends[0]} to {ends[1]})" if ends[0] != ends[1] else ""
    return f"{mean(values):.3f}{spread}"


def _line(cells: Sequence[str]) -> str:
    widths = (49, 6, 22, 7, 22, 6, 7, 7, 1)
    padded = [
        f"{cell:<{width}}" if index in (0, len(widths) - 1) else f"{cell:>{width}}"
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def num_missed(results: Mapping[str, Runs]) -> int:
    """Return how many limits are missed in the tables."""
    return sum(
        "MISSED" in line
        for name, runs in results.items()
        for line in lines(TABLES[name], runs)
    )


def write_tables(results: Mapping[str, Runs]) -> None:
    """Put the tables where docs/convergence.md says so."""
    text = PAGE.read_text()
    for name, runs in results.items():
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        made = f"{begin}\n" + "\n".join(lines(TABLES[name], runs)) + f"\n{end}"
        text, count = re.subn(
            f"{begin}.*?{end}", lambda _, made=made: made, text, flags=re.DOTALL
        )
        assert count == 1, begin
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
