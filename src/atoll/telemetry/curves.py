"""Curves and marks of a run in bounded memory: when they are full, neighbours merge.

Rule 1: a row of curves holds the last known value of a total, and the mean of
the losses that were reported meanwhile. So a rate between two rows is exact, however
many rows were merged.
Rule 2: an unknown value is NaN, never 0. A loss that was not finite is infinite, and so
is every row that such a row was merged into.
Rule 3: a merged mark is the worst of its rounds.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CELLS = 1_000_000
"""Numbers in all curves: 8 MB."""

MIN_ROWS, MAX_ROWS = 64, 512
TICK_S = 5.0
"""A row is made at least this often while there is news."""

MAX_METRICS = 16
"""Metrics of the training loop that are kept, per run."""

GROWING = ("tokens", "inner_steps", "seconds", "wait_s", "bytes_up", "bytes_down")
RUN_COLUMNS = ("at", "round", "tokens")
COLUMNS = ("loss", *GROWING)
COUNT = "loss_count"
UNKNOWN = math.nan


def six(value: float) -> float:
    """Return a number with six significant digits, as curves hold it."""
    return float(f"{value:.6g}")


@dataclass
class CurveRow:
    """The values of one island since the last tick."""

    totals: Mapping[str, float]
    """Of `GROWING`; a missing one is unknown."""

    loss_sum: float = 0.0
    loss_count: int = 0
    metrics: Mapping[str, float] | None = None


class Curves:
    """Rows of the run's and of each island's values.

    Args:
        limit: Rows at most; fewer if there are many islands.
    """

    def __init__(self, *, limit: int = MAX_ROWS) -> None:
        self.limit = limit
        self.run = {name: array("d") for name in RUN_COLUMNS}
        self.islands: dict[str, dict[str, array[float]]] = {}
        self.numbers: list[int] = []
        """For each row the number of the last event in it."""

        self.per_row = 1
        self.ticks = 0
        """Ticks in the last row."""

        self.metric_names: list[str] = []

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def max_rows(self) -> int:
        cells = len(self.islands) * (len(COLUMNS) + 1 + len(self.metric_names))
        return min(self.limit, max(MIN_ROWS, MAX_CELLS // max(1, cells)))

    def tick(
        self, number: int, run: Sequence[float], islands: Mapping[str, CurveRow]
    ) -> bool:
        """Enter the values since the last tick; return whether rows were merged."""
        if not self.numbers or self.ticks >= self.per_row:
            self._append()
        self.numbers[-1] = number
        self.ticks += 1
        for name, value in zip(RUN_COLUMNS, run, strict=True):
            self.run[name][-1] = value
        for island, row in islands.items():
            self._enter(island, row)
        return self.shrink()

    def shrink(self) -> bool:
        """Merge rows until they are few enough; return whether any were merged."""
        is_merged = False
        while len(self) > self.max_rows:
            self._merge()
            is_merged = True
        return is_merged

    def forget(self, island: str) -> None:
        """Remove an island's curves."""
        self.islands.pop(island, None)

    def metric(self, name: str) -> bool:
        """Return whether a metric of this name is kept."""
        if name in self.metric_names:
            return True
        if len(self.metric_names) < MAX_METRICS and name not in (*COLUMNS, COUNT):
            self.metric_names.append(name)
            return True
        return False

    def _append(self) -> None:
        self.ticks = 0
        self.numbers.append(0)
        for column in self.run.values():
            column.append(UNKNOWN)
        for columns in self.islands.values():
            for name, column in columns.items():
                column.append(column[-1] if name in GROWING and column else UNKNOWN)
            columns[COUNT][-1] = 0

    def _enter(self, island: str, row: CurveRow) -> None:
        columns = self.islands.get(island)
        if columns is None:
            columns = {name: self._unknown() for name in COLUMNS}
            columns[COUNT] = array("d", [0.0]) * len(self)
            self.islands[island] = columns
        for name, value in row.totals.items():
            columns[name][-1] = value
        for name, value in (row.metrics or {}).items():
            columns.setdefault(name, self._unknown())[-1] = value
        if row.loss_count:
            count = columns[COUNT][-1]
            before = columns["loss"][-1] * count if count else 0.0
            columns[COUNT][-1] = count + row.loss_count
            mean = (before + row.loss_sum) / (count + row.loss_count)
            columns["loss"][-1] = six(mean)

    def _unknown(self) -> array[float]:
        return array("d", [UNKNOWN]) * len(self)

    def _merge(self) -> None:
        is_odd = len(self) % 2
        # The last row of an odd number stays open, and takes as much again.
        self.ticks += 0 if is_odd else self.per_row
        self.per_row *= 2
        self.numbers = _later(self.numbers)
        for name, column in self.run.items():
            self.run[name] = array("d", _later(column))
        for columns in self.islands.values():
            merged = merged_columns(columns)
            columns.clear()
            columns.update(merged)

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the state as plain values, in pieces of at most `MAX_ROWS` numbers."""
        yield {
            "numbers": self.numbers,
            "per_row": self.per_row,
            "ticks": self.ticks,
            "metric_names": self.metric_names,
            "run": {name: list(column) for name, column in self.run.items()},
        }
        for island, columns in self.islands.items():
            for name, column in columns.items():
                yield {"island": island, "column": name, "values": list(column)}

    def restore(self, part: Mapping[str, Any]) -> None:
        """Take over one of the `parts`, the first one first."""
        if "island" in part:
            values = array("d", part["values"])
            if len(values) != len(self):
                raise ValueError(f"{part['column']} has {len(values)} values")
            self.islands.setdefault(part["island"], {})[part["column"]] = values
            return
        self.numbers = [int(number) for number in part["numbers"]]
        self.per_row, self.ticks = int(part["per_row"]), int(part["ticks"])
        self.metric_names = [str(name) for name in part["metric_names"]]
        self.run = {name: array("d", part["run"][name]) for name in RUN_COLUMNS}


def merged_columns(
    columns: Mapping[str, array[float]],
) -> dict[str, array[float]]:
    """Return an island's columns with neighbouring rows merged in pairs."""
    counts = columns[COUNT]
    merged = {}
    for name, column in columns.items():
        if name == "loss":
            merged[name] = _mean_losses(column, counts)
        elif name == COUNT:
            merged[name] = array("d", map(sum, _pairs(counts)))
        elif name in GROWING:
            merged[name] = array("d", _later(column))
        else:
            merged[name] = array("d", map(_known, _pairs(column)))
    return merged


def _later(column: Any) -> Any:
    """Return every second value, and the last one of an odd number."""
    return column[1::2] + column[-1:] if len(column) % 2 else column[1::2]


def _pairs(column: Sequence[float]) -> list[Sequence[float]]:
    return [column[first : first + 2] for first in range(0, len(column), 2)]


def _known(values: Sequence[float]) -> float:
    """Return the later value that is known."""
    return values[-1] if values[-1] == values[-1] else values[0]


def _mean_losses(losses: array[float], counts: array[float]) -> array[float]:
    means = array("d")
    for values, weights in zip(_pairs(losses), _pairs(counts), strict=True):
        total = sum(weights)
        weighted = [v * w for v, w in zip(values, weights, strict=True) if w]
        means.append(six(sum(weighted) / total) if total else UNKNOWN)
    return means


MAX_MARKS = 512
COUNTED, LATE, ABSENT, REFUSED, NO_MARK = "#", "~", ".", "!", " "
_WORSE = {mark: rank for rank, mark in enumerate(" #~.!")}


@dataclass
class MarkColumn:
    """The marks of some rounds of one fragment, one character per island."""

    number: int
    """The number of the last event in it."""

    fragment: int
    first_round: int
    last_round: int
    at_unix_s: float
    rounds: int
    marks: str

    def join(self, later: MarkColumn) -> None:
        """Take in a later column of the same fragment."""
        self.number, self.at_unix_s = later.number, later.at_unix_s
        self.last_round = later.last_round
        self.rounds += later.rounds
        self.marks = worst(self.marks, later.marks)


def worst(some: str, others: str) -> str:
    """Return the worse mark at each place."""
    if some == others:
        return some
    length = max(len(some), len(others))
    pairs = zip(some.ljust(length), others.ljust(length), strict=True)
    return "".join(max(pair, key=lambda mark: _WORSE.get(mark, 0)) for pair in pairs)


class Marks:
    """Which islands counted in which rounds."""

    def __init__(self) -> None:
        self.columns: list[MarkColumn] = []
        self.per_column = 1
        self._open: dict[int, MarkColumn] = {}
        """By fragment the column that takes further rounds."""

    def add(self, column: MarkColumn) -> bool:
        """Enter a round; return whether columns were merged."""
        open_column = self._open.get(column.fragment)
        if open_column is not None and open_column.rounds < self.per_column:
            open_column.join(column)
            return False
        self.columns.append(column)
        self._open[column.fragment] = column
        if len(self.columns) <= MAX_MARKS:
            return False
        self._merge()
        return True

    def blank(self, index: int) -> None:
        """Remove the marks at one place, which another island takes over."""
        for column in self.columns:
            if index < len(column.marks):
                text = column.marks
                column.marks = text[:index] + NO_MARK + text[index + 1 :]

    def _merge(self) -> None:
        while len(self.columns) > MAX_MARKS:
            before = len(self.columns)
            self.per_column *= 2
            self._open = {}
            columns: list[MarkColumn] = []
            for column in self.columns:
                partner = self._open.get(column.fragment)
                if partner and partner.rounds + column.rounds <= self.per_column:
                    partner.join(column)
                else:
                    columns.append(column)
                    self._open[column.fragment] = column
            self.columns = sorted(columns, key=lambda column: column.number)
            if len(self.columns) == before:  # more fragments than columns
                del self.columns[: before - MAX_MARKS]

    def part(self) -> dict[str, Any]:
        """Return the state as plain values."""
        rows = [list(vars(column).values()) for column in self.columns]
        return {"per_column": self.per_column, "columns": rows}

    def restore(self, part: Mapping[str, Any]) -> None:
        """Take over the `part` of other marks."""
        self.per_column = int(part["per_column"])
        self.columns = [MarkColumn(*row) for row in part["columns"][-MAX_MARKS:]]
        self._open = {column.fragment: column for column in self.columns}
