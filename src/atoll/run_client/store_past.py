"""The past of a run in a store: its islands' own pasts and its rosters, folded.

A store has no process that could keep events. Its documents are made into the events
that a coordinator would have emitted, and those into the past, by the same fold.

Rule 1: a round was committed when the first island learned of it. A round that no past
has yet is as old as the one before it.
Rule 2: an object that cannot be read is left out: no decision depends on it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.coordinator.status import shares_of
from atoll.coordinator.status_fields import RECENT_AGES
from atoll.errors import CorruptError, NoSuchObject, UsageError
from atoll.exchange.bucket import keys
from atoll.exchange.bucket.documents import RosterDocument, fetch
from atoll.exchange.bucket.own_past import OWN_PAST, OwnPast, PastRow
from atoll.telemetry import Event, EventPage, Past, history, with_past
from atoll.telemetry.curves import ABSENT, COUNTED, LATE, NO_MARK, REFUSED
from atoll.telemetry.event_files import EventFilter
from atoll.telemetry.events import MAX_TEXT
from atoll.telemetry.history import history_query
from atoll.telemetry.status_past import COUNTS, recent_rounds
from atoll.wire import Verdict, blake3_digest

if TYPE_CHECKING:  # it uses this module
    from atoll.run_client.store import StoreObserver

EVERY_S = 30.0
"""Islands put their pasts every ten rounds: they are not read more often."""

MAX_PASTS = 1024
MAX_RECENT = 50
MAX_ROSTERS, MAX_ROUNDS = 256, 64
"""Rosters that are read for marks, and rounds of them."""

Rosters = Mapping[tuple[int, int], RosterDocument]
"""By fragment and round."""

_ORDER = ("run_founded", "island_joined", "loss_reported", "anchor_measured")
_MARKS = {Verdict.COUNTED: COUNTED, Verdict.LATE: LATE, Verdict.REFUSED: REFUSED}


class StorePast:
    """The past of an observed run. For one thread."""

    def __init__(self, observer: StoreObserver) -> None:
        self._observer = observer
        self._read_at_s = -math.inf
        self._rosters: dict[tuple[int, int], RosterDocument] = {}
        self._events: list[Event] = []
        self._past = Past()

    @property
    def past(self) -> Past:
        """The fold of the events."""
        self._read()
        return self._past

    @property
    def events(self) -> list[Event]:
        """The events, oldest first."""
        self._read()
        return self._events

    def page(self, before: str, *, limit: int, only: EventFilter) -> EventPage:
        """Return the events before a cursor; the last ones if it is empty.

        Raises:
            UsageError: the cursor is none, or the islands have put newer pasts since.
        """
        process, _, text = before.partition(":")
        events = self.events
        end = len(events)
        if before:
            is_number = text.isascii() and text.isdigit() and len(text) < 10
            if not is_number or process != self._past.process:
                raise UsageError(
                    f"before={before[:80]!r} is no cursor of the present past. "
                    "Begin with the newest events."
                )
            end = min(end, int(text))
        indices = [n for n in range(end) if only(events[n])][-limit:]
        has_more = bool(indices) and len(indices) == limit and indices[0] > 0
        cursor = f"{self._past.process}:{indices[0]}" if has_more else None
        return EventPage([events[n] for n in indices], cursor)

    def history(self, query: Mapping[str, str | int]) -> dict[str, Any]:
        """Return the document of `GET /history`."""
        document: dict[str, Any] = json.loads(
            history(self.past, **history_query(query))
        )
        return document

    def _read(self) -> None:
        observer = self._observer
        if observer.now_s - self._read_at_s < EVERY_S:
            return
        self._read_at_s = observer.now_s
        self._read_rosters()
        listed = [item.key for item in observer.store.items(keys.PAST)][-MAX_PASTS:]
        read = observer.gather([partial(self._own_past, key) for key in listed])
        view = observer.reader.view
        slots = {name: item.slot for name, item in view.documents.items()}
        pasts = [past for past in read if past is not None]
        story = _Story(len(view.state.rounds), slots)
        self._events = story.events(pasts, self._rosters)
        self._past = Past()
        for event in self._events:
            self._past.add(event)
        self._past.finish()

    def _own_past(self, key: str) -> OwnPast | None:
        try:
            return fetch(
                self._observer.store, OWN_PAST, key, run=self._observer.reader.run
            )
        except (NoSuchObject, CorruptError):
            return None

    def _read_rosters(self) -> None:
        view = self._observer.reader.view
        rounds = view.state.rounds
        num_rounds = min(MAX_ROUNDS, MAX_ROSTERS // max(1, len(rounds)))
        wanted = [
            (round.fragment, number)
            for round in rounds
            for number in range(max(1, round.number - num_rounds), round.number)
        ]
        missing = [key for key in wanted if key not in self._rosters]
        for roster in self._observer.read_rosters(missing):
            self._rosters[roster.fragment, roster.round] = roster


def with_store_past(
    status: dict[str, Any], past: Past, *, now_unix_s: float
) -> dict[str, Any]:
    """Return a status with the past; counts stay those of the last rosters."""
    counts = {
        row["island"]: {key: row[key] for key in COUNTS} for row in status["islands"]
    }
    document = with_past(status, past, None, now_unix_s=now_unix_s)
    rows = [row | counts[row["island"]] for row in document["islands"]]
    recent = recent_rounds(past)[-MAX_RECENT:] if past.rounds else status["recent"]
    return document | {"islands": rows, "recent": recent}


def verdicts_of(rosters: Rosters) -> Mapping[str, Mapping[str, Any]]:
    """Return the counts of verdicts on each island's updates in these rounds."""
    verdicts: dict[str, dict[str, Any]] = defaultdict(dict)
    documents = sorted(rosters.values(), key=lambda document: document.round)
    for document in documents:
        shares = shares_of([document.roster])
        for entry in document.roster.entries:
            row, verdict = verdicts[entry.island], entry.verdict.name.lower()
            row[verdict] = row.get(verdict, 0) + 1
            row["last"] = verdict
            row["share"] = shares[entry.island]
            if entry.verdict is Verdict.REFUSED:
                row["because"] = entry.reason
            is_counted = entry.verdict is Verdict.COUNTED
            if is_counted and document.outer.buffer:  # of an asynchronous run
                row.setdefault("ages", deque(maxlen=RECENT_AGES)).append(entry.age)
    if any(document.outer.buffer for document in documents):
        # One round of an asynchronous run lists few islands, often only one.
        rounds = [document.roster for document in documents]
        for island, share in shares_of(rounds).items():
            verdicts[island]["share"] = share
    return verdicts


@dataclass
class _Story:
    """Makes the events of a run from its documents."""

    num_fragments: int
    slots: Mapping[str, int]
    rows: list[tuple[float, int, str, dict[str, Any]]] = field(default_factory=list)
    """Time, order within it, name and fields."""

    presence: dict[str, tuple[float, float]] = field(default_factory=dict)
    """When each island joined, and when it left."""

    def events(self, pasts: Sequence[OwnPast], rosters: Rosters) -> list[Event]:
        """Return the events in order. Without any island's past there is no time."""
        if not pasts:
            return []
        begin_unix_s = min(past.joined_unix_s for past in pasts)
        self._add(begin_unix_s, "run_founded", island="", fragments=self.num_fragments)
        for island in sorted(self.slots.keys() - {past.island for past in pasts}):
            self._join(begin_unix_s, island, 1, self.slots[island], "")
        for past in sorted(pasts, key=lambda past: past.incarnation):
            self._tell_island(past)
        self._tell_rounds(pasts, rosters, begin_unix_s)
        return _numbered(self.rows)

    def _add(self, at_unix_s: float, name: str, **fields: Any) -> None:
        order = _ORDER.index(name) if name in _ORDER else len(_ORDER)
        self.rows.append((at_unix_s, order, name, fields))

    def _join(
        self, at_unix_s: float, island: str, incarnation: int, slot: int, version: str
    ) -> None:
        self._add(
            at_unix_s,
            "island_joined",
            island=island,
            incarnation=incarnation,
            version=version,
            slot=slot,
        )

    def _tell_island(self, past: OwnPast) -> None:
        island, last_unix_s = past.island, past.joined_unix_s
        self._join(
            past.joined_unix_s, island, past.incarnation, past.slot, past.version
        )
        for row in past.rows:
            last_unix_s = max(last_unix_s, row.at_unix_s)
            self._add(row.at_unix_s, "loss_reported", **_report_of(island, row))
        if past.anchor_metrics and past.anchor_round is not None:
            values = {"round": past.anchor_round, "metrics": past.anchor_metrics}
            self._add(last_unix_s, "anchor_measured", island=island, **values)
        joined_unix_s, _ = self.presence.get(island, (past.joined_unix_s, 0.0))
        left_unix_s = last_unix_s if past.has_left else math.inf
        self.presence[island] = joined_unix_s, left_unix_s
        if past.has_left:
            fields = {"incarnation": past.incarnation, "reason": "left"}
            self._add(last_unix_s, "island_left", island=island, **fields)

    def _tell_rounds(
        self, pasts: Sequence[OwnPast], rosters: Rosters, begin_unix_s: float
    ) -> None:
        seen: dict[tuple[int, int], float] = {}
        for commit in (commit for past in pasts for commit in past.commits):
            key = commit.fragment, commit.round
            seen[key] = min(seen.get(key, math.inf), commit.at_unix_s)
        before: dict[int, float] = {}
        for key in sorted(rosters, key=lambda key: (key[1], key[0])):
            fragment, _ = key
            earlier_unix_s = before.get(fragment, begin_unix_s)
            at_unix_s = max(earlier_unix_s, seen.get(key, earlier_unix_s))
            seconds = at_unix_s - earlier_unix_s if fragment in before else None
            before[fragment] = at_unix_s
            self._tell_round(rosters[key], at_unix_s, seconds)

    def _tell_round(
        self, document: RosterDocument, at_unix_s: float, seconds: float | None
    ) -> None:
        count = Counter(entry.verdict for entry in document.roster.entries)
        position = {"fragment": document.fragment, "round": document.round}
        for entry in document.roster.entries:
            if entry.verdict is Verdict.REFUSED:
                fields = {"island": entry.island, "reason": entry.reason}
                self._add(at_unix_s, "update_refused", **fields, **position)
            elif entry.verdict is Verdict.LATE:
                self._add(at_unix_s, "update_late", island=entry.island, **position)
        self._add(
            at_unix_s,
            "round_committed",
            **position,
            counted=count[Verdict.COUNTED],
            late=count[Verdict.LATE],
            refused=count[Verdict.REFUSED],
            seconds=seconds,
            marks=self._marks(document, at_unix_s),
        )

    def _marks(self, document: RosterDocument, at_unix_s: float) -> str:
        """Return a mark for each slot, as a coordinator does."""
        verdicts = {
            entry.island: _MARKS[entry.verdict] for entry in document.roster.entries
        }
        by_slot = {
            slot: verdicts.get(name, ABSENT)
            for name, slot in self.slots.items()
            if name in verdicts or self._is_member(name, at_unix_s)
        }
        length = min(MAX_TEXT, max(by_slot, default=-1) + 1)
        return "".join(by_slot.get(slot, NO_MARK) for slot in range(length))

    def _is_member(self, island: str, at_unix_s: float) -> bool:
        first_unix_s, last_unix_s = self.presence.get(island, (0.0, math.inf))
        return first_unix_s <= at_unix_s < last_unix_s


def _report_of(island: str, row: PastRow) -> dict[str, Any]:
    is_finite = row.loss is not None if row.losses else None
    return {
        "island": island,
        "round": row.round,
        "inner_steps": row.inner_steps,
        "tokens": row.tokens,
        "loss": row.loss,
        "loss_is_finite": is_finite,
        "seconds": row.seconds,
        "wait_s": row.wait_s,
        "bytes_up": row.bytes_up,
        "bytes_down": row.bytes_down,
    }


def _numbered(rows: Iterable[tuple[float, int, str, dict[str, Any]]]) -> list[Event]:
    """Return the events in order; rounds get the tokens that islands had reported."""
    tokens: dict[str, int] = {}
    events = []
    for number, (at_unix_s, _, name, fields) in enumerate(
        sorted(rows, key=lambda row: row[:2]), start=1
    ):
        if name == "loss_reported":
            tokens[fields["island"]] = fields["tokens"]
        if name == "round_committed":
            fields = {**fields, "tokens": sum(tokens.values())}
        events.append(Event(number, at_unix_s, name, fields))
    # The same documents have the same name, so that cursors continue.
    text = json.dumps([event.as_dict() for event in events])
    process = blake3_digest(text.encode()).hex()[:8]
    return [replace(event, process=process) for event in events]
