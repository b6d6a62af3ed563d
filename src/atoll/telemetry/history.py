"""The past of a run as an answer of at most 2 MB: curves, marks, rounds and notes.

A cursor has the process, the number of merges and the last event of an answer. The next
answer has the news since then; or everything, if rows were merged meanwhile or another
process answers.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.errors import UsageError
from atoll.telemetry.curves import COLUMNS, COUNT, GROWING, merged_columns
from atoll.telemetry.past import Past

PARTS = ("curves", "marks", "rounds", "notes")
QUERY = frozenset({"after", "parts", "columns", "rows"})
DEFAULT_COLUMNS = ("loss", "tokens")
MAX_ANSWER_BYTES = 2_000_000
MAX_VALUES = 120_000
"""Values of curves in one answer: about a megabyte."""

_INTEGERS = ("tokens", "inner_steps", "bytes_up", "bytes_down", "round")


def history(
    past: Past,
    *,
    after: str = "",
    parts: Sequence[str] = PARTS,
    columns: Sequence[str] = DEFAULT_COLUMNS,
    rows: int | None = None,
) -> bytes:
    """Return an answer as JSON.

    Args:
        past: The past of the run.
        after: The cursor of the last answer; empty: everything.
        parts: Some of `PARTS`.
        columns: The columns of islands' curves, metrics of the loop among them.
        rows: So many rows at most: neighbours are merged.

    Raises:
        UsageError: a part or a column is not known, or the answer would be too large.
    """
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"parts has {part!r}. Known are: {', '.join(PARTS)}.")
    _require_columns(past, columns)
    first = _first(past, after)
    head = {
        "cursor": f"{past.process}:{past.merges}:{past.folded}",
        "process": past.process,
        "is_whole": first == 0,
        "is_from_start": bool(past.is_from_start),
        "first_unix_s": past.first_unix_s,
        "created_unix_s": past.created_unix_s,
        "missed": past.missed,
    }
    size, pieces = 0, []
    for key, text in _pieces(past, head, first, parts, columns, rows):
        size += len(key) + len(text)
        if size > MAX_ANSWER_BYTES:
            raise UsageError(
                f"This part of the past has more than {MAX_ANSWER_BYTES} bytes. Ask "
                f"for fewer than parts={','.join(parts)}, or columns than "
                f"{','.join(columns)}, or give rows=N."
            )
        pieces += [key, text]
    return "".join(pieces).encode()


def history_query(query: Mapping[str, str | int]) -> dict[str, Any]:
    """Return the arguments of `history` in the query of a request.

    Raises:
        UsageError: a key is not known, or `rows` is no number.
    """
    if unknown := sorted(query.keys() - QUERY):
        raise UsageError(
            f"The query has {unknown[0]!r}. Known are: {', '.join(sorted(QUERY))}."
        )
    values: dict[str, Any] = {"after": str(query.get("after", ""))}
    for key in ("parts", "columns"):
        if key in query:
            values[key] = str(query[key]).split(",")
    if "rows" in query:
        text = str(query["rows"])
        if not (text.isascii() and text.isdigit() and 0 < len(text) < 10):
            raise UsageError(f"rows={text[:80]!r} must be a whole number above 0.")
        values["rows"] = int(text)
    return values


def _require_columns(past: Past, columns: Sequence[str]) -> None:
    names = (*COLUMNS, *past.curves.metric_names)
    for column in columns:
        if column not in names:
            raise UsageError(
                f"columns has {column[:80]!r}. Known are: {', '.join(names)}."
            )


def _first(past: Past, after: str) -> int:
    """Return the number of the first event that is news to the holder of a cursor."""
    if not after:
        return 0
    parts = after.split(":")
    if len(parts) != 3 or not all(
        part.isascii() and part.isdigit() for part in parts[1:]
    ):
        raise UsageError(
            f"after={after[:80]!r} is no cursor. Use the `cursor` of the last answer."
        )
    is_same = parts[0] == past.process and parts[1] == str(past.merges)
    folded = int(parts[2][:20])
    return folded + 1 if is_same and folded <= past.folded else 0


def _pieces(
    past: Past,
    head: Mapping[str, Any],
    first: int,
    parts: Sequence[str],
    columns: Sequence[str],
    rows: int | None,
) -> Iterator[tuple[str, str]]:
    """Yield keys and texts, each encoded by itself so that other threads may run."""
    yield dumped(head)[:-1], ""
    if "curves" in parts:
        yield from _curves(past, first, columns, rows)
    if "marks" in parts:
        new_columns = [
            column for column in past.marks.columns if column.number >= first
        ]
        lines = [
            [c.last_round, c.fragment, c.at_unix_s, c.marks, c.rounds]
            for c in new_columns
        ]
        by_index = {island.index: name for name, island in past.islands.items()}
        names = [by_index.get(n) for n in range(max(by_index, default=-1) + 1)]
        yield (
            ',"marks":',
            dumped(
                {
                    "per_column": past.marks.per_column,
                    "islands": names,
                    "columns": lines,
                }
            ),
        )
    if "rounds" in parts:
        yield from _listed("rounds", [r for r in past.rounds if r["number"] >= first])
    if "notes" in parts:
        yield from _listed("notes", [n for n in past.notes if n["number"] >= first])
    yield "}", ""


def _listed(key: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    yield f',"{key}":[', ""
    for index, row in enumerate(rows):
        yield "," * (index > 0), dumped(row)
    yield "]", ""


def _curves(
    past: Past, first: int, columns: Sequence[str], rows: int | None
) -> Iterator[tuple[str, str]]:
    curves = past.curves
    start = next((n for n, x in enumerate(curves.numbers) if x >= first), len(curves))
    per_row, halvings = curves.per_row, 0
    values = (len(curves) - start) * max(1, len(curves.islands) * len(columns))
    length = len(curves) - start
    while values > MAX_VALUES or (rows is not None and length > max(1, rows)):
        halvings, per_row = halvings + 1, per_row * 2
        values, length = values // 2, (length + 1) // 2
    run = {name: column[start:] for name, column in curves.run.items()}
    for _ in range(halvings):
        run = {name: _every_second(column) for name, column in run.items()}
    texts = {name: _values(name, column) for name, column in run.items()}
    yield ',"curves":', dumped({"from": start, "per_row": per_row, **texts})[:-1]
    yield ',"anchor":', dumped(past.anchor)
    yield ',"islands":{', ""
    for index, (island, all_columns) in enumerate(curves.islands.items()):
        names = [name for name in (*columns, COUNT) if name in all_columns]
        chosen = {name: all_columns[name][start:] for name in names}
        if "loss" not in chosen:
            chosen["loss"] = all_columns["loss"][start:]
        for _ in range(halvings):
            chosen = merged_columns(chosen)
        yield "," * (index > 0), f"{dumped(island)}:{_island(chosen, columns)}"
    yield "}}", ""


def _every_second(column: array[float]) -> array[float]:
    return column[1::2] + column[-1:] if len(column) % 2 else column[1::2]


def _island(chosen: Mapping[str, array[float]], columns: Sequence[str]) -> str:
    answer: dict[str, Any] = {
        name: _values(name, chosen[name]) for name in columns if name in chosen
    }
    diverged = [n for n, loss in enumerate(chosen["loss"]) if math.isinf(loss)]
    if diverged and "loss" in columns:
        answer["not_finite"] = diverged
    return dumped(answer)


def _values(name: str, column: Sequence[float]) -> list[float | int | None]:
    """Return a column as JSON holds it; unknown is null."""
    if name in _INTEGERS:
        return [int(x) if math.isfinite(x) else None for x in column]
    if name in GROWING or name == "at":
        return [round(x, 3) if math.isfinite(x) else None for x in column]
    return [x if math.isfinite(x) else None for x in column]


def dumped(value: object) -> str:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":"), default=dict)
