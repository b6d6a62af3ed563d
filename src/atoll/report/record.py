"""The data of a report: a run's status, settings and past, and numbers from them.

Rule: an unknown value is None. A section that has nothing to show is left out, and the
page lists the missing data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from atoll.errors import UsageError
from atoll.report.svg import Coordinates
from atoll.run_client import RunClient
from atoll.settings import RunSettings

ROWS = 512
COLUMNS = "loss,tokens,inner_steps,seconds,wait_s,bytes_up,bytes_down"
EMPTY: Mapping[str, Any] = {
    "curves": {"at": [], "round": [], "tokens": [], "islands": {}, "anchor": {}},
    "marks": {"islands": [], "columns": []},
    "rounds": [],
    "notes": [],
}
BF16_BYTES = 2


@dataclass(frozen=True)
class RunRecord:
    """A run as its reports show it."""

    status: Mapping[str, Any]
    """The document of `GET /status`."""

    settings: RunSettings
    past: Mapping[str, Any]
    """The document of `GET /history`."""

    has_past: bool = True
    baseline: Sequence[Coordinates] = field(default=())
    """Tokens and losses of another training, for comparison."""

    @property
    def name(self) -> str:
        return str(self.status["name"] or self.status["run"])

    @property
    def islands(self) -> list[Mapping[str, Any]]:
        """The rows of all islands, by name."""
        return sorted(self.status["islands"], key=lambda row: str(row["island"]))

    @property
    def started_unix_s(self) -> float | None:
        """The time of the first island's joining; None if it was not recorded."""
        joins = [n["at"] for n in self.past["notes"] if n["event"] == "island_joined"]
        return min([*joins, *self.past["curves"]["at"][:1]], default=None)

    @property
    def ended_unix_s(self) -> float | None:
        """The time of the run's end, or of the last row of the past."""
        ends = [n["at"] for n in self.past["notes"] if n["event"] == "run_ended"]
        return max(ends or self.past["curves"]["at"][-1:], default=None)

    @property
    def seconds(self) -> float | None:
        first, last = self.started_unix_s, self.ended_unix_s
        return None if first is None or last is None else last - first

    @property
    def parameters(self) -> int | None:
        value = self.status.get("parameters")
        return value if isinstance(value, int) else None

    def total(self, key: str) -> float | None:
        """Return the sum of a value over all islands; None if one is unknown."""
        values = [row.get(key) for row in self.status["islands"]]
        if not values or None in values:
            return None
        return float(sum(values))

    @property
    def utilisation(self) -> float | None:
        """The share of the islands' time that they trained."""
        trained = total = 0.0
        for columns in self.past["curves"]["islands"].values():
            seconds, wait_s = last_of(columns, "seconds"), last_of(columns, "wait_s")
            if seconds and wait_s is not None:
                trained, total = trained + seconds - wait_s, total + seconds
        return trained / total if total else None

    @property
    def bytes_each(self) -> tuple[float, float] | None:
        """Bytes that an island sent and received, the mean over islands."""
        rows = self.status["islands"]
        up, down = self.total("bytes_up"), self.total("bytes_down")
        return (up / len(rows), down / len(rows)) if up is not None and down else None

    @property
    def parallel_bytes(self) -> float | None:
        """Bytes that data parallel would have sent and received at each, in bf16.

        An all-reduce over M members takes 2(M - 1)/M gradients each way; that is
        optimal.
        """
        rows = self.status["islands"]
        steps = max((row["inner_steps"] or 0 for row in rows), default=0)
        if self.parameters is None or len(rows) < 2 or not steps:
            return None
        gradients = 2 * (len(rows) - 1) / len(rows) * self.parameters * BF16_BYTES
        return 2 * gradients * steps

    def losses(self) -> dict[str, list[Coordinates]]:
        """Return each island's losses by the tokens of the run."""
        curves = self.past["curves"]
        losses = {}
        for island, columns in curves["islands"].items():
            points = _points(curves["tokens"], columns.get("loss", ()))
            if points:
                losses[island] = points
        return losses

    def anchor_losses(self) -> tuple[str, list[Coordinates]] | None:
        """Return the first metric of the anchor, and its values by tokens."""
        curves = self.past["curves"]
        for name, values in curves.get("anchor", {}).items():
            tokens_at = dict(zip(curves["round"], curves["tokens"], strict=False))
            points = [
                (tokens_at[round], value)
                for round, value in values
                if tokens_at.get(round) is not None and math.isfinite(value)
            ]
            if len(points) > 1:
                return name, points
        return None

    @property
    def loss(self) -> tuple[str, float] | None:
        """The subject of the last loss, and its value."""
        anchor = self.anchor_losses()
        if anchor is not None:
            return anchor[0], anchor[1][-1][1]
        rows = [
            row["loss"] for row in self.status["islands"] if _is_finite(row["loss"])
        ]
        return (
            ("mean of the islands' own batches", statistics.fmean(rows))
            if rows
            else None
        )

    def joined(self, island: str) -> list[tuple[float, float, str]]:
        """Return the begin and the end of each incarnation, and why it ended."""
        end = self.ended_unix_s or 0.0
        incarnations: list[tuple[float, float, str]] = []
        for note in self.past["notes"]:
            if note.get("island") != island:
                continue
            if note["event"] == "island_joined":
                incarnations.append((note["at"], end, ""))
            elif note["event"] == "island_left" and incarnations:
                reason = str(note.get("reason", "left"))
                incarnations[-1] = (incarnations[-1][0], min(note["at"], end), reason)
        for earlier, later in pairwise(range(len(incarnations))):
            begin, last, reason = incarnations[earlier]
            incarnations[earlier] = (begin, min(last, incarnations[later][0]), reason)
        return incarnations


def record_of(client: RunClient, baseline: Sequence[Coordinates] = ()) -> RunRecord:
    """Read a run: live, ended, in a store or in a directory."""
    status = client.status(watch=True).document
    past: Mapping[str, Any] = EMPTY
    has_past = True
    try:
        past = client.history(columns=COLUMNS, rows=ROWS)
    except UsageError:
        has_past = False
    return RunRecord(status, client.settings(), past, has_past, baseline)


def last_of(columns: Mapping[str, Sequence[Any]], name: str) -> float | None:
    """Return the last known value of a column."""
    return next((v for v in reversed(columns.get(name, ())) if v is not None), None)


def thin(points: Sequence[Coordinates], max_points: int = 160) -> list[Coordinates]:
    """Return at most `max_points` points: means of consecutive parts of the curve."""
    size = max(1, math.ceil(len(points) / max_points))
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [
        (statistics.fmean(x for x, _ in part), statistics.fmean(y for _, y in part))
        for part in parts
    ]


def _points(xs: Sequence[Any], ys: Sequence[Any]) -> list[Coordinates]:
    pairs = zip(xs, ys, strict=False)
    return [(x, y) for x, y in pairs if x is not None and _is_finite(y)]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
