"""The past of a run: a fold over its events, in bounded memory.

Rule 1: `add` is the only change, and depends on the event alone: no clock, no file. So
a live run, a restarted one and the directory of an ended one have the same past.
Rule 2: a value that no event has reported is None, never 0.
Rule 3: an event is identified by the process of its coordinator and its number there;
one that was folded before changes nothing, and a gap in the numbers is counted.
Rule 4: an event may be of another version, or damaged: a value of a wrong type counts
as not reported, and nothing raises.

`Past.parts` and `Past.restored` write and read it piece by piece.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from atoll.telemetry.curves import (
    ABSENT,
    COUNTED,
    LATE,
    MAX_METRICS,
    REFUSED,
    TICK_S,
    UNKNOWN,
    CurveRow,
    Curves,
    MarkColumn,
    Marks,
    six,
)
from atoll.telemetry.events import Event, EventReader
from atoll.telemetry.island_past import RESET, IslandPast, milliseconds

VERSION = 2
MAX_ISLANDS = 1024
"""Islands with a past; beyond it the one that left first is forgotten."""

MAX_NOTES = 1000
MAX_ROUNDS = 200
"""Rounds with arrivals, at most."""

MAX_ARRIVALS = 20_000
"""Arrivals in all those rounds."""

MIN_ROUNDS = 20
MAX_JOINS = 4
WINDOW_ROUNDS = 10
WINDOW_S = 60.0
"""A rate is that of the last 10 rounds of the run, and of a minute at least."""

MAX_TICKS = 12
RECENT_ROUNDS = 20
DENIED_S = 600.0

_ROUTINE = frozenset(
    {
        *("island_joined", "island_left", "island_silent", "island_returned"),
        *("island_forgotten", "island_paced", "update_refused", "audit"),
    }
)
"""Notes that go first when there are too many."""

NOTED = _ROUTINE | {
    *("run_created", "run_founded", "island_taken_over", "epoch_set", "run_paused"),
    *("run_resumed", "run_moving", "run_moved", "run_stays", "run_stopped"),
    *("run_ended", "state_recovered", "journal_cut", "journal_damaged"),
    *("holding_refused", "disk_failed", "fault", "work_dropped", "events_dropped"),
    *("coordinator_started", "coordinator_stopped"),
}


@dataclass(frozen=True)
class RunTotals:
    """The totals at one round of the run."""

    at_unix_s: float
    round: int
    tokens: int
    islands: Mapping[str, tuple[float, float, float]]
    """Of each island: tokens, seconds and wait_s."""


ROUND_BOUNDS_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass
class RoundTimes:
    """Durations of the rounds of one fragment, as a histogram."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(ROUND_BOUNDS_S) + 1))
    """Rounds up to each bound and above the one before; last, those beyond all."""

    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(ROUND_BOUNDS_S, seconds)] += 1
        self.sum_s += milliseconds(seconds)


class Past:
    """The past of one run. For one thread."""

    def __init__(self) -> None:
        self.process, self.number = "", 0
        """Of the last event."""

        self.folded = 0
        """Events that were folded, of all processes."""

        self.missed = 0
        self.merges = 0
        """How often rows or marks were merged: then earlier answers are void."""

        self.is_from_start: bool | None = None
        """Whether the first event was that of the run's creation."""

        self.first_unix_s: float | None = None
        self.at_unix_s: float | None = None
        self.created_unix_s: float | None = None
        self.started_unix_s: float | None = None
        """When the last process of the coordinator started."""

        self.starts = 0
        """Starts of the coordinator."""

        self.was_clean: bool | None = None
        """Whether the process before it has ended in an orderly way."""

        self.commit_unix_s: float | None = None
        self.round_seconds: dict[int, RoundTimes] = {}
        """By fragment: the durations of all its rounds."""

        self.tokens: int | None = None
        self.num_fragments = 0
        self.rounds_by_fragment: dict[int, int] = {}
        self.epochs = 0
        self.islands: dict[str, IslandPast] = {}
        self.slots: dict[int, str] = {}
        self.curves = Curves()
        self.marks = Marks()
        self.rounds: deque[dict[str, Any]] = deque(maxlen=MAX_ROUNDS)
        self.open: dict[int, dict[str, Any]] = {}
        """By fragment the round that takes updates."""

        self.notes: list[dict[str, Any]] = []
        self.anchor: dict[str, list[list[float]]] = {}
        self.ticks: deque[RunTotals] = deque(maxlen=MAX_TICKS)
        self.round_ends: deque[float] = deque(maxlen=RECENT_ROUNDS + 1)
        self.round_losses: deque[dict[str, float]] = deque(maxlen=RECENT_ROUNDS)
        self.denied: deque[list[float]] = deque(maxlen=128)
        """Time and number of denied requests."""

        self._ticked_unix_s = -math.inf
        self._has_news = False

    @property
    def round(self) -> int:
        """The lowest round committed over the fragments."""
        if len(self.rounds_by_fragment) < self.num_fragments:
            return 0
        return min(self.rounds_by_fragment.values(), default=0)

    def add(self, event: Event) -> None:
        """Fold an event."""
        if event.process == self.process and event.number <= self.number:
            return
        expected = self.number + 1 if event.process == self.process else 1
        if self.is_from_start is None:
            self.is_from_start = event.name == "run_created"
            self.first_unix_s = event.at_unix_s
        elif event.number > expected:
            self.missed += event.number - expected
        self.process, self.number = event.process, event.number
        self.folded += 1
        self.at_unix_s = event.at_unix_s
        handler = _HANDLERS.get(event.name)
        if handler is not None:
            handler(self, EventReader(event))
        if event.name in NOTED and _is_worth_noting(event):
            self._note(event)
        if event.at_unix_s - self._ticked_unix_s >= TICK_S and self._has_news:
            self._tick()

    def island(self, name: str) -> IslandPast:
        """Return the record of an island, a new one if there is none."""
        island = self.islands.get(name)
        if island is None:
            if len(self.islands) >= MAX_ISLANDS:
                self._forget_one()
            used = {island.index for island in self.islands.values()}
            index = next(n for n in range(len(used) + 1) if n not in used)
            island = self.islands[name] = IslandPast(name, index)
        return island

    def _forget_one(self) -> None:
        islands = list(self.islands.values())
        left_islands = [island for island in islands if island.state == "left"]
        oldest = min(
            left_islands or islands, key=lambda island: island.reported_unix_s or 0.0
        )
        self.forget(oldest.name)

    def forget(self, name: str) -> None:
        """Remove an island, whose slot another one takes."""
        island = self.islands.pop(name, None)
        if island is not None:
            self.curves.forget(name)
            self.marks.blank(island.index)
            self.merges += 1
            self.slots = {n: other for n, other in self.slots.items() if other != name}

    def _note(self, event: Event) -> None:
        head = {"number": self.folded, "process": event.process, "at": event.at_unix_s}
        self.notes.append({**head, "event": event.name, **event.fields})
        if len(self.notes) > MAX_NOTES:
            routine = (n for n, x in enumerate(self.notes) if x["event"] in _ROUTINE)
            del self.notes[next(routine, 0)]

    def _tick(self) -> None:
        """Make a row of the curves."""
        assert self.at_unix_s is not None
        tokens = UNKNOWN if self.tokens is None else float(self.tokens)
        rows = {}
        for name, island in self.islands.items():
            reported_unix_s = island.reported_unix_s or -math.inf
            is_news = reported_unix_s >= self._ticked_unix_s
            rows[name] = CurveRow(
                island.totals(),
                island.news[0],
                int(island.news[1]),
                island.metrics if is_news else None,
            )
            island.news = [0.0, 0.0]
        run = (round(self.at_unix_s, 3), float(self.round), tokens)
        self.merges += self.curves.tick(self.folded, run, rows)
        self._ticked_unix_s, self._has_news = self.at_unix_s, False

    def finish(self) -> None:
        """Make a row of the news since the last one: no event follows."""
        if self._has_news:
            self._tick()

    def end_round(self) -> None:
        """Note that the run's round has grown."""
        assert self.at_unix_s is not None
        at_unix_s = self.at_unix_s
        self.round_ends.append(at_unix_s)
        losses = {
            name: island.round_news[0] / island.round_news[1]
            for name, island in self.islands.items()
            if island.round_news[1]
        }
        self.round_losses.append(losses)
        for island in self.islands.values():
            island.round_news = [0.0, 0.0]
        spacing_s = WINDOW_S / WINDOW_ROUNDS
        if not self.ticks or at_unix_s - self.ticks[-1].at_unix_s >= spacing_s:
            self.ticks.append(self._totals())
        self._tick()

    def _totals(self) -> RunTotals:
        assert self.at_unix_s is not None
        islands = {}
        for name, island in self.islands.items():
            totals = island.totals()
            if {"tokens", "seconds", "wait_s"} <= totals.keys():
                times = totals["tokens"], totals["seconds"], totals["wait_s"]
                islands[name] = times
        return RunTotals(self.at_unix_s, self.round, self.tokens or 0, islands)

    def window(self) -> tuple[RunTotals, RunTotals] | None:
        """Return the totals some rounds ago and now; None before there are any.

        That is 10 rounds of the run, and a minute at least, if the run has them.
        """
        if not self.ticks:
            return None
        now = self._totals()
        first = self.ticks[0]
        for tick in reversed(self.ticks):
            is_long = now.at_unix_s - tick.at_unix_s >= WINDOW_S
            if now.round - tick.round >= WINDOW_ROUNDS and is_long:
                first = tick
                break
        return (first, now) if now.at_unix_s > first.at_unix_s else None

    def usual_round_s(self) -> float | None:
        """Return the median time of the run's last rounds."""
        ends = list(self.round_ends)
        spans = [later - end for end, later in itertools.pairwise(ends)]
        return statistics.median(spans) if spans else None

    def _scalars(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SCALARS}

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield the whole state as plain values, in small pieces."""
        yield {
            "past": VERSION,
            **self._scalars(),
            "ticked_unix_s": max(self._ticked_unix_s, 0.0),
            "has_news": self._has_news,
            "rounds_by_fragment": list(self.rounds_by_fragment.items()),
            "round_seconds": [
                [fragment, times.counts, times.sum_s]
                for fragment, times in self.round_seconds.items()
            ],
            "slots": list(self.slots.items()),
            "round_ends": list(self.round_ends),
            "round_losses": list(self.round_losses),
            "denied": list(self.denied),
            "open": list(self.open.items()),
            "anchor": self.anchor,
            "marks": self.marks.part(),
        }
        for island in self.islands.values():
            yield {"island": {name: getattr(island, name) for name in _ISLAND}}
        for tick in self.ticks:
            head = (tick.at_unix_s, tick.round, tick.tokens)
            yield {"tick": [*head, dict(tick.islands)]}
        for part in self.curves.parts():
            yield {"curves": part}
        for row in self.rounds:
            yield {"round": row}
        for note in self.notes:
            yield {"note": note}
        yield {"end": self.folded}

    @classmethod
    def restored(cls, parts: Iterable[Mapping[str, Any]]) -> Past:
        """Return the past that `parts` describe.

        Raises:
            ValueError, TypeError, LookupError: they are not whole, or of no past.
        """
        rest = iter(parts)
        head = next(rest, {})
        if head.get("past") != VERSION:
            raise ValueError(f"version {head.get('past')!r} is not {VERSION}")
        past = cls()
        past._take_head(head)
        end = None
        for part in rest:
            end = part.get("end")
            past._take(part)
        if end != past.folded:
            raise ValueError("its end is missing")
        return past

    def _take_head(self, head: Mapping[str, Any]) -> None:
        for name in _SCALARS:
            setattr(self, name, head[name])
        self._ticked_unix_s = head["ticked_unix_s"] or -math.inf
        self._has_news = bool(head["has_news"])
        self.rounds_by_fragment = {
            int(key): int(n) for key, n in _pairs(head, "rounds_by_fragment")
        }
        for fragment, counts, sum_s in head["round_seconds"]:
            times = RoundTimes([int(count) for count in counts], float(sum_s))
            if len(times.counts) != len(ROUND_BOUNDS_S) + 1:
                raise ValueError("the histogram has other bounds")
            self.round_seconds[int(fragment)] = times
        self.slots = {int(key): str(name) for key, name in _pairs(head, "slots")}
        self.open = {int(key): dict(row) for key, row in _pairs(head, "open")}
        self.round_ends.extend(map(float, head["round_ends"]))
        self.round_losses.extend(map(dict, head["round_losses"]))
        self.denied.extend(map(list, head["denied"]))
        self.anchor = dict(head["anchor"])
        self.marks.restore(head["marks"])

    def _take(self, part: Mapping[str, Any]) -> None:
        match part:
            case {"island": values}:
                island = IslandPast(**{name: values[name] for name in _ISLAND})
                self.islands[island.name] = island
            case {"tick": [at_unix_s, round, tokens, islands]}:
                rows = {name: (row[0], row[1], row[2]) for name, row in islands.items()}
                self.ticks.append(RunTotals(at_unix_s, round, tokens, rows))
            case {"curves": curves}:
                self.curves.restore(curves)
            case {"round": row}:
                self.rounds.append(dict(row))
            case {"note": note}:
                self.notes.append(dict(note))


def _pairs(head: Mapping[str, Any], key: str) -> list[tuple[Any, Any]]:
    return [(first, second) for first, second in head[key]]


_SCALARS = (
    *("process", "number", "folded", "missed", "merges", "is_from_start"),
    *("first_unix_s", "at_unix_s", "created_unix_s", "started_unix_s", "was_clean"),
    "starts",
    *("commit_unix_s", "tokens", "num_fragments", "epochs"),
)
_ISLAND = tuple(entry.name for entry in fields(IslandPast))


def _is_worth_noting(event: Event) -> bool:
    return event.name != "audit" or event.fields.get("answer") != "allowed"


def _created(past: Past, event: EventReader) -> None:
    past.created_unix_s = event.at_unix_s


def _founded(past: Past, event: EventReader) -> None:
    past.num_fragments = event.whole("fragments") or past.num_fragments


def _started(past: Past, event: EventReader) -> None:
    past.started_unix_s = event.at_unix_s
    past.starts += 1
    past.was_clean = bool(event.fields.get("was_clean"))
    past.num_fragments = event.whole("fragments") or past.num_fragments
    past.open.clear()


def _joined(past: Past, event: EventReader) -> None:
    name, incarnation = event.text("island"), event.whole("incarnation")
    if name is None:
        return
    slot = event.whole("slot")
    if slot is not None and past.slots.get(slot, name) != name:
        past.forget(past.slots[slot])
    island = past.island(name)
    if slot is not None:
        past.slots[slot] = name
    is_next = island.incarnation not in (None, incarnation)
    if is_next:
        island.deaths += island.state != "left"
        totals = island.totals()
        island.before = {key: totals.get(key, 0) for key in RESET}
        for key in RESET:
            setattr(island, key, None)
    island.incarnation, island.state = incarnation, "live"
    island.version = event.text("version") or island.version
    island.left_because = None
    if is_next or not island.joined_unix_s:
        island.joined_unix_s = [*island.joined_unix_s, event.at_unix_s][-MAX_JOINS:]


def _left(past: Past, event: EventReader) -> None:
    if name := event.text("island"):
        island = past.island(name)
        island.state, island.left_because = "left", event.text("reason")


def _silent(past: Past, event: EventReader) -> None:
    if name := event.text("island"):
        past.island(name).state = "silent"


def _returned(past: Past, event: EventReader) -> None:
    if name := event.text("island"):
        past.island(name).state = "live"


def _forgotten(past: Past, event: EventReader) -> None:
    if name := event.text("island"):
        past.forget(name)


def _paced(past: Past, event: EventReader) -> None:
    if name := event.text("island"):
        island = past.island(name)
        island.window = event.whole("window")
        island.step_s = event.number("step_s") or island.step_s


def _opened(past: Past, event: EventReader) -> None:
    fragment, number = event.whole("fragment"), event.whole("round")
    if fragment is not None and number is not None:
        past.open[fragment] = _round(fragment, number, event.at_unix_s)


def _round(fragment: int, number: int, opened_unix_s: float | None) -> dict[str, Any]:
    opened = None if opened_unix_s is None else round(opened_unix_s, 3)
    head = {"fragment": fragment, "round": number, "opened": opened}
    return {**head, "closing": None, "arrivals": {}}


def _of_round(past: Past, event: EventReader) -> dict[str, Any] | None:
    """Return the open round that an event is about; None if it names none."""
    fragment, number = event.whole("fragment"), event.whole("round")
    if fragment is None or number is None:
        return None
    row = past.open.get(fragment)
    if row is None or row["round"] != number:
        row = past.open[fragment] = _round(fragment, number, None)
    return row


def _staged(past: Past, event: EventReader) -> None:
    row, name = _of_round(past, event), event.text("island")
    if row is not None and name is not None and len(row["arrivals"]) < MAX_ISLANDS:
        seconds = event.number("seconds")
        row["arrivals"][name] = None if seconds is None else milliseconds(seconds)


def _closing(past: Past, event: EventReader) -> None:
    row = _of_round(past, event)
    if row is not None:
        row["closing"] = round(event.at_unix_s, 3)


COMMITTED = ("counted", "late", "refused", "seconds", "bytes", "digest")


def _committed(past: Past, event: EventReader) -> None:
    row = _of_round(past, event)
    if row is None:
        return
    fragment, number = row["fragment"], row["round"]
    del past.open[fragment]
    marks = _marks(past, event.text("marks") or "")
    texts = {"digest": (event.text("digest") or "")[:16], "marks": marks}
    values = {key: event.number(key) for key in COMMITTED if key not in texts}
    row |= {"number": past.folded, "committed": round(event.at_unix_s, 3)}
    past.rounds.append(row | values | texts)
    max_rounds = max(MIN_ROUNDS, MAX_ARRIVALS // max(1, len(past.islands)))
    while len(past.rounds) > max_rounds:
        past.rounds.popleft()
    past.commit_unix_s = event.at_unix_s
    seconds = event.number("seconds")
    if seconds is not None:
        past.round_seconds.setdefault(fragment, RoundTimes()).add(seconds)
    tokens = event.whole("tokens")
    past.tokens = past.tokens if tokens is None else tokens
    past._has_news = True
    past.merges += past.marks.add(
        MarkColumn(
            past.folded, fragment, number, number, round(event.at_unix_s, 3), 1, marks
        )
    )
    before = past.round
    past.rounds_by_fragment[fragment] = number
    if past.round > before:
        past.end_round()


def _marks(past: Past, by_slot: str) -> str:
    """Return the marks by an island's place; enter them for each island."""
    marks: dict[int, str] = {}
    for slot, mark in enumerate(by_slot):
        name = past.slots.get(slot)
        if name is None or mark not in (COUNTED, LATE, REFUSED, ABSENT):
            continue
        island = past.islands[name]
        marks[island.index] = mark
        island.mark(mark)
        if mark == COUNTED:
            island.counted += 1
            island.last_verdict = "counted"
    length = max(marks, default=-1) + 1
    return "".join(marks.get(index, " ") for index in range(length))


def _refused(past: Past, event: EventReader) -> None:
    if name := event.text("island"):
        island = past.island(name)
        island.refused += 1
        island.last_verdict, island.refused_because = "refused", event.text("reason")
        island.refused_unix_s = event.at_unix_s


def _late(past: Past, event: EventReader) -> None:
    if name := event.text("island"):
        island = past.island(name)
        island.late += 1
        island.last_verdict = "late"


LINK = ("exchange_s", "hidden_s", "up_bytes_per_s", "down_bytes_per_s", "rtt_s")


def _reported(past: Past, event: EventReader) -> None:
    name = event.text("island")
    if name is None:
        return
    island = past.island(name)
    for key in ("round", "tokens", "inner_steps", "bytes_up", "bytes_down"):
        value = event.whole(key)
        if value is not None:
            setattr(island, key, value)
    for key in ("seconds", "wait_s"):
        seconds = event.number(key)
        if seconds is not None:
            setattr(island, key, seconds)
    for key in LINK:
        if (value_now := event.number(key)) is not None:
            setattr(island, key, value_now)
    island.carried = event.whole("carried") or 0
    island.dropped = event.whole("dropped") or 0
    island.machine = event.text("machine") or island.machine
    island.version = event.text("version") or island.version
    _take_loss(island, event)
    metrics = event.numbers("metrics").items()
    island.metrics = {
        key: six(value) for key, value in metrics if past.curves.metric(key)
    }
    island.reported_unix_s = event.at_unix_s
    past._has_news = True


def _take_loss(island: IslandPast, event: EventReader) -> None:
    loss, is_finite = event.number("loss"), event.fields.get("loss_is_finite")
    island.loss = loss
    island.loss_is_finite = is_finite if isinstance(is_finite, bool) else None
    if loss is not None or is_finite is False:
        value = math.inf if is_finite is False or loss is None else loss
        for news in (island.news, island.round_news):
            news[0] += value
            news[1] += 1


def _dropped(past: Past, event: EventReader) -> None:
    if name := event.text("island"):
        island = past.island(name)
        island.dropped_steps = event.whole("total_steps")
        island.dropped_unix_s = event.at_unix_s


def _measured(past: Past, event: EventReader) -> None:
    number = event.whole("round")
    for name, value in event.numbers("metrics").items():
        if name in past.anchor or len(past.anchor) < MAX_METRICS:
            points = past.anchor.setdefault(name, [])
            if number is not None and (not points or points[-1][0] < number):
                points.append([number, six(value)])
            if len(points) > 512:
                del points[1:-1:2]


def _set(past: Past, event: EventReader) -> None:
    past.epochs = event.whole("epoch") or past.epochs + 1


def _audited(past: Past, event: EventReader) -> None:
    if event.text("answer") != "allowed":
        number = 1 + (event.whole("untold") or 0)
        past.denied.append([event.at_unix_s, number])
        while past.denied and event.at_unix_s - past.denied[0][0] > DENIED_S:
            past.denied.popleft()


_HANDLERS: Mapping[str, Callable[[Past, EventReader], None]] = {
    "run_created": _created,
    "run_founded": _founded,
    "coordinator_started": _started,
    "island_joined": _joined,
    "island_left": _left,
    "island_silent": _silent,
    "island_returned": _returned,
    "island_forgotten": _forgotten,
    "island_paced": _paced,
    "round_opened": _opened,
    "update_staged": _staged,
    "round_closing": _closing,
    "round_committed": _committed,
    "update_refused": _refused,
    "update_late": _late,
    "loss_reported": _reported,
    "work_dropped": _dropped,
    "anchor_measured": _measured,
    "epoch_set": _set,
    "audit": _audited,
}
