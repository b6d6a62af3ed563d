"""The rows of a run as people see them: a part of the status, events, and a table.

A run that deals out rows has a ledger. The status has how many of them are in each
state, and as spans of turns all that are neither trained nor free.

A line of the table is an interval of turns in one update of one round. So a turn has a
line for each fragment that lists it, and two if an update of it was refused before.
pandas and polars read the table: `pandas.read_csv(FILE)`.
"""

from __future__ import annotations

import csv
import io
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from atoll.coordinator.service import Service
from atoll.coordinator.spool import nameless, write_all
from atoll.coordinator.states import StateFile, try_lock
from atoll.coordinator.threads import ThreadedService
from atoll.data import RowLedger, Spans
from atoll.data.spans import union
from atoll.errors import Refused
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.telemetry import EventBus
from atoll.wire import Roster, RosterEntry

MAX_SPANS = 1024
"""Largest number of intervals listed for one state, so that a status stays small."""

RATE_S = 300.0
"""The rate of trained rows is that of the rounds within this time."""

LEAST_MARKS = 2


def rows_of(
    state: CoordinatorState, *, rows_per_s: float | None = None
) -> dict[str, Any] | None:
    """Return the part of the status about rows; None if the run deals out none."""
    data, ledger = state.settings.data, state.ledger
    if not data.is_dealt:
        return None
    described = {
        "is_open": ledger is not None and ledger.is_open,
        "rows": ledger.rows if ledger else None,
        "fingerprint": ledger.fingerprint if ledger else "",
        "unit_rows": data.unit_rows,
        "passes": data.passes,
        "shuffle": data.shuffle,
        "seed": data.seed,
    }
    return described | _counts_of(ledger, rows_per_s)


def _counts_of(ledger: RowLedger | None, rows_per_s: float | None) -> dict[str, Any]:
    ledger = ledger or RowLedger(unit_rows=1, passes=1, num_fragments=1)
    counts, states = ledger.counts, ledger.states
    eta_s = None
    if ledger.total is not None and rows_per_s:
        eta_s = (ledger.total - counts.trained) / rows_per_s
    return {
        "total": ledger.total,
        "trained": counts.trained,
        "partly": counts.partly,
        "refused": counts.refused,
        "in_hand": counts.in_hand,
        "free": counts.free,
        "trained_share": counts.trained / ledger.total if ledger.total else None,
        "by_island": {name: len(spans) for name, spans in states.in_hand.items()},
        "partly_by_island": {
            name: len(spans) for name, spans in states.partly_of.items()
        },
        "rows_per_s": rows_per_s,
        "eta_s": eta_s,
        "spans": {
            "in_hand": {name: _listed(spans) for name, spans in states.in_hand.items()},
            "partly": _listed(states.partly),
            "refused": _listed(states.refused),
        },
    }


def _listed(spans: Spans) -> list[list[int]]:
    """Return intervals as JSON has them; the last one covers all that are too many."""
    listed = [[first, last] for first, last in spans]
    if len(listed) > MAX_SPANS:
        listed[MAX_SPANS - 1 :] = [[listed[MAX_SPANS - 1][0], listed[-1][1]]]
    return listed


class RowWatcher:
    """Emits events about rows, and measures how fast they are trained."""

    def __init__(self, events: EventBus) -> None:
        self._events = events
        self._marks: deque[tuple[float, int]] = deque()
        """Time and trained rows at changes of the last `RATE_S` seconds."""

    @property
    def rows_per_s(self) -> float | None:
        """Trained rows per second; None before two rounds have been seen."""
        if len(self._marks) < LEAST_MARKS:
            return None
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None

    def look(
        self, before: RowLedger | None, after: RowLedger | None, now_s: float
    ) -> None:
        """Emit events for the changes of a ledger, and note the trained rows."""
        if after is None or after is before:
            return
        if after.is_open and (before is None or before.data != after.data):
            self._events.emit(
                "data_opened", rows=after.rows, fingerprint=after.fingerprint
            )
        if before is not None:
            self._tell_claims(before, after)
            self._tell_releases(before, after)
            if after.counted is not before.counted or not self._marks:
                self._note(after.counts.trained, now_s)

    def _tell_claims(self, before: RowLedger, after: RowLedger) -> None:
        for island, claims in after.claims.items():
            number, spans = claims[-1]
            if number > before.last_claim(island):
                self._events.emit(
                    "rows_claimed", island=island, claim=number, rows=len(spans)
                )

    def _tell_releases(self, before: RowLedger, after: RowLedger) -> None:
        for island in before.holdings.keys() - after.holdings.keys():
            returned = after.free & before.holdings[island]
            if returned:
                self._events.emit("rows_released", island=island, rows=len(returned))

    def _note(self, trained: int, now_s: float) -> None:
        marks = self._marks
        marks.append((now_s, trained))
        while len(marks) > LEAST_MARKS and marks[0][0] < now_s - RATE_S:
            marks.popleft()


CONTENT_TYPE = "text/csv"
COLUMNS = (
    "first_turn",
    "end_turn",
    "state",
    "fragment",
    "round",
    "island",
    "incarnation",
    "verdict",
)
BATCH = 64
"""Rosters that are read in one turn of the service."""

ListedRoster = tuple[int, int, Roster]
"""Fragment, round, and the roster of that round."""


@dataclass(frozen=True)
class LedgerTable:
    """The lines of a run's ledger."""

    ledger: RowLedger

    def lines(self, rosters: Iterable[ListedRoster]) -> Iterator[bytes]:
        """Yield the head, then the lines of each roster in order."""
        yield _csv([COLUMNS])
        for fragment, round, roster in rosters:
            rows = [
                (first, last, state, fragment, round, *_update_of(entry))
                for entry in roster.entries
                if entry.spans
                for state, spans in self._split(Spans.unpack(entry.spans))
                for first, last in spans
            ]
            if rows:
                yield _csv(rows)

    def _split(self, spans: Spans) -> Iterator[tuple[str, Spans]]:
        """Yield the turns of an update by their state now."""
        for state, turns in self._turns_by_state:
            if spans & turns:
                yield state, spans & turns
            spans = spans - turns
        if spans:
            yield "free", spans

    @cached_property
    def _turns_by_state(self) -> list[tuple[str, Spans]]:
        states = self.ledger.states
        return [
            ("trained", states.trained),
            ("partly", states.partly),
            ("refused", states.refused),
            ("in hand", union(states.in_hand.values())),
        ]


def _update_of(entry: RosterEntry) -> tuple[str, int, str]:
    return entry.island, entry.incarnation, entry.verdict.name.lower()


def _csv(rows: Iterable[tuple[object, ...]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def require_ledger(ledger: RowLedger | None) -> RowLedger:
    """Return the ledger of a run that deals out rows.

    Raises:
        Refused: the run does not, or has no weights yet.
    """
    if ledger is None:
        raise Refused(
            "The run has no ledger of rows: data.order is 'islands', or it has no "
            "weights yet. A run with data.order='run' has one."
        )
    return ledger


class LedgerFiles:
    """Writes the table of a coordinator's run, one at a time."""

    def __init__(self, threaded: ThreadedService, directory: Path) -> None:
        self._threaded, self._directory = threaded, directory
        self._lock = threading.Lock()

    def write(self) -> StateFile:
        """Return an anonymous file with the present table.

        The service answers other calls between two batches of rosters.

        Raises:
            Refused: the run has no ledger.
            Unreachable: another table is being written: ask again.
        """
        with try_lock(self._lock, "copy of the ledger"):
            state, _ = self._threaded.look()
            table = LedgerTable(require_ledger(state.ledger))
            handle, size_bytes = nameless(self._directory), 0
            try:
                for lines in table.lines(_all_rosters(self._threaded)):
                    write_all(handle, memoryview(lines))
                    size_bytes += len(lines)
            except BaseException:
                os.close(handle)
                raise
        return StateFile(round=0, digest="", handle=handle, size_bytes=size_bytes)


def _all_rosters(threaded: ThreadedService) -> Iterator[ListedRoster]:
    """Yield the rosters of a service, a batch at a time."""
    keys = threaded.change_by(
        lambda service, _: sorted(service.journal.recorded.rosters)
    )
    for start in range(0, len(keys), BATCH):
        read = partial(_read, keys[start : start + BATCH])
        yield from threaded.change_by(read)


def _read(
    keys: list[tuple[int, int]], service: Service, now_s: float
) -> list[ListedRoster]:
    rosters = service.journal.recorded.rosters
    return [(*key, rosters[key]) for key in keys]
