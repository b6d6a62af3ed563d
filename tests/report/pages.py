"""Reads a page, and a record of a run to write one of."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from atoll import RunSettings
from atoll.report import RunRecord

VOID = {"meta"}
HOSTILE = "<script>alert('1')</script>\"&"


class Reader(HTMLParser):
    """Notes every element, and what was not closed in its order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.misplaced: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.misplaced.append(tag)


def status_row(island: str, **values: Any) -> dict[str, Any]:
    """Return an island's row of a status document."""
    row = {
        **{"island": island, "state": "left", "loss": 2.0, "tokens": 1000},
        **{"counted": 4, "late": 0, "refused": 0, "dropped_steps": 0, "deaths": 0},
        **{"wait_share": 0.25, "bytes_up": 1000, "bytes_down": 3000},
        **{"inner_steps": 100, "version": "0.1.0"},
    }
    return row | values


def record(
    names: list[str], *, rows: int = 40, columns: int = 40, **status: Any
) -> RunRecord:
    """Return the record of a run of these islands, with curves, marks and events."""
    at = [1_000_000.0 + 10 * n for n in range(rows)]
    curve = {
        "loss": [4.0 / (n + 1) for n in range(rows)],
        "tokens": [100 * n for n in range(rows)],
        "inner_steps": [10 * n for n in range(rows)],
        "seconds": [10.0 * n for n in range(rows)],
        "wait_s": [2.5 * n for n in range(rows)],
        "bytes_up": [10 * n for n in range(rows)],
        "bytes_down": [30 * n for n in range(rows)],
    }
    joins = [
        {"event": "island_joined", "island": name, "at": at[0], "incarnation": 1}
        for name in names
    ]
    marks = "".join("#~!."[n % 4] for n in range(len(names)))
    past = {
        "curves": {
            "at": at,
            "round": list(range(rows)),
            "tokens": [len(names) * 100 * n for n in range(rows)],
            "anchor": {},
            "islands": {name: curve for name in names},
        },
        "marks": {
            "islands": names,
            "columns": [[n + 1, 0, at[0], marks, 1] for n in range(columns)],
        },
        "rounds": [],
        "notes": [*joins, {"event": "run_ended", "round": rows, "at": at[-1]}],
    }
    document = {
        **{"run": "reef-0123456789ab", "name": "reef", "state": "ended"},
        **{"round": rows, "tokens": 100_000, "findings": []},
        "islands": [status_row(name) for name in names],
    }
    return RunRecord(document | status, RunSettings(), past)
