"""The rows of a run as text: values of the status in, a small table out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from atoll.telemetry.text import NO_VALUE, format_span, padded, printable, wrapped

MAX_NAMES = 8
"""Islands that are named in one line."""

STATE_CELLS, COUNT_CELLS, SHARE_CELLS = 14, 17, 9

NO_ROWS = (
    "The run does not deal out rows: data.order is 'islands', and each island cuts its "
    "own part of the data.\n"
)

Rows = Mapping[str, Any]


def render_rows(status: Mapping[str, Any], *, width: int) -> str:
    """Return the page of a run's rows, with a line feed at its end."""
    rows: Rows | None = status.get("data")  # older coordinators have none
    if rows is None:
        return NO_ROWS
    if not rows["is_open"]:
        return "No island has described the data of the run yet.\n"
    lines = [_description(rows)]
    for state, key, remark in (
        ("trained", "trained", "counted by every fragment"),
        ("in hand", "in_hand", _names(rows["by_island"])),
        ("partly trained", "partly", _partly(rows)),
        ("refused", "refused", ""),
        ("free", "free", ""),
    ):
        lines += _line(state, rows[key], rows["total"], remark, width)
    if rows["rows_per_s"]:
        lines.append(_rate(rows))
    return "\n".join(lines) + "\n"


def _description(rows: Rows) -> str:
    passes, count = rows["passes"], rows["rows"]
    length = "a stream" if count is None else f"{count:,} rows"
    times = {0: "passes without end", 1: "1 pass"}.get(passes, f"{passes} passes")
    order = f"shuffled by seed {rows['seed']}" if rows["shuffle"] else "not shuffled"
    return f"{length}, {times}, units of {rows['unit_rows']}, {order}"


def _line(
    state: str, count: int | None, total: int | None, remark: str, width: int
) -> Iterator[str]:
    amount = NO_VALUE if count is None else f"{count:,}"
    share = NO_VALUE if not total or count is None else f"{100 * count / total:.1f} %"
    start = (
        padded(state, STATE_CELLS)
        + padded(amount, COUNT_CELLS, is_right=True)
        + padded(share, SHARE_CELLS, is_right=True)
    )
    first, *others = wrapped(remark, max(20, width - len(start) - 3))
    yield f"{start}   {first}".rstrip()
    yield from (" " * (len(start) + 3) + line for line in others)


def _names(counts: Mapping[str, int]) -> str:
    listed = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    few = ", ".join(
        f"{printable(name)} {count:,}" for name, count in listed[:MAX_NAMES]
    )
    others = len(listed) - MAX_NAMES
    return f"{few} and {others} more" if others > 0 else few


def _partly(rows: Rows) -> str:
    if not rows["partly"]:
        return ""
    names = sorted(rows["partly_by_island"])
    if not names:
        return "counted by some fragments, and refused in others"
    few = ", ".join(printable(name) for name in names[:MAX_NAMES])
    return f"counted by some fragments, and their island has gone: {few}"


def _rate(rows: Rows) -> str:
    rate = f"{60 * rows['rows_per_s']:,.0f} rows/min"
    if rows["eta_s"] is None:
        return rate
    return f"{rate}, about {format_span(rows['eta_s'])} left"
