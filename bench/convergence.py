"""What do unequal islands, stragglers and a small wire cost in loss and in time?

Four islands train a model of 34,502 parameters until the tokens of 8000 inner steps
have counted, in virtual time, under each case and three seeds. Ratios are means over
the seeds, each beside the reference of the same seed, with their range. The program
ends with status 1 if a limit is missed. With --write the tables of docs/convergence.md
and docs/unequal-islands.md are made anew.
"""

from __future__ import annotations

import argparse
import os
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

DOCS = Path(__file__).parents[1] / "docs"
WIDTHS = {
    "case": 49,
    "loss": 6,
    "loss ratio": 22,
    "clock s": 7,
    "clock ratio": 22,
    "rounds": 6,
    "waiting": 7,
    "sent MB": 7,
    "limits": 1,
}
"""Columns of a table, each with its least width."""

PAGES = {
    DOCS / "convergence.md": tuple(WIDTHS),
    DOCS / "unequal-islands.md": ("case", "loss ratio", "clock ratio", "waiting"),
}
"""Pages with tables, and the columns that each shows."""

Runs = Mapping[str, Sequence[Ran]]
"""The results of each case, one per seed."""

TOKENS = {"outer.weight": "tokens"}
DYNAMIC = {"sync.dynamic_local_updates": True, **TOKENS}
DELAYED = {"sync.mode": "async"}
NAIVE = {"sync.mode": "async", "async.buffer": 1}
"""Each update is an outer step of its own, with momentum."""


def decoupled(quorum: int) -> dict[str, Any]:
    """Return the settings of rounds that close 4 s after their quorum."""
    return {**NAIVE, "run.quorum": quorum, "async.grace_s": 4.0, **TOKENS}


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
OUTER_SGD = {"outer.optimizer": "sgd", "outer.lr": 1.0, "outer.momentum": 0.0}
DEFAULTS = {"outer.lr": 0.7, "outer.momentum": 0.9}


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
    "equal": (
        Case(name="synchronous"),
        Case(
            name="dynamic local updates",
            settings=DYNAMIC,
            loss_at_most=1.0,
            clock_at_most=1.0,
        ),
        Case(name="naive asynchronous", settings=NAIVE, loss_at_least=1.10),
        Case(name="delayed Nesterov", settings=DELAYED, loss_at_most=1.03),
        Case(name="decoupled, quorum 3", settings=decoupled(3), loss_at_most=1.01),
    ),
    "unequal": (
        Case(name="synchronous", step_s=UNEQUAL_S),
        Case(
            name="dynamic local updates",
            settings=DYNAMIC,
            step_s=UNEQUAL_S,
            loss_at_most=1.005,
            clock_at_most=0.35,
        ),
        Case(name="naive asynchronous", settings=NAIVE, step_s=UNEQUAL_S),
        Case(
            name="delayed Nesterov",
            settings=DELAYED,
            step_s=UNEQUAL_S,
            loss_at_most=1.03,
            clock_at_most=0.35,
        ),
        Case(
            name="delayed Nesterov, dynamic local updates",
            settings={**DELAYED, **DYNAMIC},
            step_s=UNEQUAL_S,
            loss_at_most=1.02,
            clock_at_most=0.35,
        ),
        Case(
            name="decoupled, quorum 2",
            settings=decoupled(2),
            step_s=UNEQUAL_S,
            loss_at_most=1.01,
            clock_at_most=0.40,
        ),
        Case(
            name="decoupled, quorum 3",
            settings=decoupled(3),
            step_s=UNEQUAL_S,
            loss_at_most=1.01,
            clock_at_most=0.50,
        ),
    ),
    "straggler": (
        Case(name="synchronous", plan=straggler()),
        Case(name="dynamic local updates", plan=straggler(), settings=DYNAMIC),
        Case(
            name="delayed Nesterov",
            plan=straggler(),
            settings=DELAYED,
            loss_at_most=1.03,
            clock_at_most=0.85,
        ),
        Case(
            name="delayed Nesterov, dynamic local updates",
            plan=straggler(),
            settings={**DELAYED, **DYNAMIC},
        ),
        Case(name="decoupled, quorum 3", plan=straggler(), settings=decoupled(3)),
    ),
    "defaults": tuple(
        Case(name=name, step_s=UNEQUAL_S, settings={**settings, **DEFAULTS})
        for name, settings in (
            ("synchronous", {}),
            ("dynamic local updates", DYNAMIC),
            ("delayed Nesterov", DELAYED),
            ("decoupled, quorum 2", decoupled(2)),
            ("decoupled, quorum 3", decoupled(3)),
        )
    ),
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
                ("e3m0", "gather"),
            )
        ),
        Case(
            name="vanilla, fp32, outer SGD",
            plan=narrow_links(),
            settings={**FP32, **OUTER_SGD},
        ),
        *(
            Case(
                name=f"streaming, topk-2bit up, {down} down, outer SGD",
                plan=narrow_links(),
                settings={**streaming("topk-2bit", down), **OUTER_SGD},
                reference="vanilla, fp32, outer SGD",
                loss_at_most=1.07,
                clock_at_most=0.9,
                waiting_at_most=0.02,
            )
            for down in ("int8", "gather")
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
    parser.add_argument("--write", action="store_true", help="into docs/")
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


def lines(
    cases: Sequence[Case], runs: Runs, columns: Sequence[str] = tuple(WIDTHS)
) -> Iterator[str]:
    """Yield a table that is Markdown as well."""
    yield _line({name: name for name in columns})
    yield _line(
        {name: "---" if name in ("case", "limits") else "---:" for name in columns}
    )
    for case in cases:
        rans, peers = runs[case.name], runs[case.reference or cases[0].name]
        row = _row(case, rans, peers)
        yield _line({name: row[name] for name in columns})


def _row(case: Case, rans: Sequence[Ran], peers: Sequence[Ran]) -> dict[str, str]:
    return {
        "case": case.name,
        "loss": f"{mean(ran.loss for ran in rans):.3f}",
        "loss ratio": _ratio(rans, peers, "loss"),
        "clock s": f"{mean(ran.clock_s for ran in rans):.0f}",
        "clock ratio": _ratio(rans, peers, "clock_s"),
        "rounds": f"{mean(ran.rounds for ran in rans):.0f}",
        "waiting": f"{mean(ran.waiting for ran in rans):.1%}",
        "sent MB": f"{mean(ran.sent_bytes for ran in rans) / 1e6:.2f}",
        "limits": ", ".join(verdicts(case, rans, peers)),
    }


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


def _line(cells: Mapping[str, str]) -> str:
    padded = [
        f"{cell:{'<' if column in ('case', 'limits') else '>'}{WIDTHS[column]}}"
        for column, cell in cells.items()
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
    """Put each table where a page has its marker."""
    written = set()
    for page, columns in PAGES.items():
        text = page.read_text()
        for name, runs in results.items():
            begin, end = f"<!-- table {name} -->", "<!-- end -->"
            table = "\n".join([begin, *lines(TABLES[name], runs, columns), end])
            if begin in text:
                before, after = text.split(begin)
                text = before + table + after[after.index(end) + len(end) :]
                written.add(name)
        page.write_text(text)
    assert written == results.keys(), results.keys() - written


if __name__ == "__main__":
    main()
