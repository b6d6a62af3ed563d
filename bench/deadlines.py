"""What do learned deadlines cost and save, beside fixed timeouts of 30, 120 and 600 s?

Four islands train for an hour of virtual time under each scenario. A fixed timeout
counts from the first update of a round, which is kinder to it than from the opening.
With --plot the tables and the picture of docs/deadlines.md are made anew.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from _deadline_bars import Panel, bars
from _deadline_plans import MIXED, SCENARIOS
from _deadline_runs import Ran, run
from _timing import parse

from atoll.simulate import FaultPlan

DOCS = Path(__file__).parents[1] / "docs"
POLICIES = {"learned": None, "30 s": 30.0, "120 s": 120.0, "600 s": 600.0}
LONG_WINDOW_S = 1200.0
LONG = {"even speeds": FaultPlan(), "speeds 1, 1, 1.3, 2": MIXED}
LONG_MAX_S = 3600.0
"""`deadline_max_s` for these: longer than a window of the slowest island."""
COLUMNS = (
    "scenario",
    "deadline",
    "rounds/h",
    "windows/h",
    "waiting",
    "lost",
    "late",
    "dropped",
)

Table = Mapping[tuple[str, str], Ran]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--hours", type=float, default=1.0, help="of virtual time")
    given = parse(parser, hours=0.1)
    tables = {
        "a-minute": measured(given.hours),
        "twenty-minutes": measured_long(3 * given.hours),
    }
    for name, table in tables.items():
        print(f"windows of {name.replace('-', ' ')}\n")
        for line in lines(table):
            print(line)
        print()
    if given.plot:
        write_picture(tables["a-minute"])
        write_tables(tables)


def measured(hours: float) -> Table:
    """Return what each scenario came to under each policy."""
    return {
        (scenario, policy): run(plan, timeout_s=timeout_s, hours=hours)
        for scenario, plan in SCENARIOS.items()
        for policy, timeout_s in POLICIES.items()
    }


def measured_long(hours: float) -> Table:
    """Return the same for long windows, with another upper bound too."""
    table: dict[tuple[str, str], Ran] = {}
    for scenario, plan in LONG.items():
        for policy, timeout_s in POLICIES.items():
            table[scenario, policy] = _long(plan, hours, timeout_s=timeout_s)
        raised = _long(plan, hours, deadline_max_s=LONG_MAX_S)
        table[scenario, "learned, max 3600 s"] = raised
    return table


def _long(
    plan: FaultPlan,
    hours: float,
    *,
    timeout_s: float | None = None,
    deadline_max_s: float = 600.0,
) -> Ran:
    return run(
        plan,
        timeout_s=timeout_s,
        deadline_max_s=deadline_max_s,
        window_s=LONG_WINDOW_S,
        hours=hours,
    )


def lines(table: Table) -> Iterator[str]:
    """Yield a table that is Markdown as well."""
    yield _line(COLUMNS)
    yield _line(["---"] * 2 + ["---:"] * (len(COLUMNS) - 2))
    for (scenario, policy), ran in table.items():
        yield _line(
            (
                scenario if policy == "learned" else "",
                policy,
                f"{ran.rounds_per_hour:.1f}",
                f"{ran.windows_per_hour:.0f}",
                f"{ran.waiting:.0%}",
                f"{ran.lost:.1%}",
                f"{ran.num_late}",
                f"{ran.num_dropped}",
            )
        )


def _line(cells: tuple[str, ...] | list[str]) -> str:
    first, second, *rest = cells
    words = [f"{first:24}", f"{second:19}", *(f"{cell:>9}" for cell in rest)]
    return f"| {' | '.join(words)} |"


def write_picture(table: Table) -> None:
    """Draw rounds per hour, counted work and lost work."""
    panels = (
        _panel(table, "rounds per hour", "rounds_per_hour", ".0f"),
        _panel(table, "windows counted per hour", "windows_per_hour", ".0f"),
        _panel(table, "work lost", "lost", ".0%"),
    )
    target = DOCS / "images" / "deadlines.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(bars(panels, list(POLICIES)))


def _panel(table: Table, title: str, measure: str, form: str) -> Panel:
    rows: dict[str, list[float]] = {}
    for (scenario, _), ran in table.items():
        rows.setdefault(scenario, []).append(getattr(ran, measure))
    return Panel(title, rows, form)


def write_tables(tables: Mapping[str, Table]) -> None:
    """Put the tables where docs/deadlines.md says so."""
    page = DOCS / "deadlines.md"
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        made = f"{begin}\n" + "\n".join(lines(table)) + f"\n{end}"
        text, count = re.subn(
            f"{begin}.*?{end}", lambda _, made=made: made, text, flags=re.DOTALL
        )
        assert count == 1, begin
    page.write_text(text)


if __name__ == "__main__":
    main()
