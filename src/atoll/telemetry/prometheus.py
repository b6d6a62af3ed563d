"""A run's status as Prometheus reads it: text format 0.0.4, from values alone.

Rule 1: names and labels are promises, as those of events.
Rule 2: what is not known has no sample; it is never zero instead.
Rule 3: what ends with `_total` only grows, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.telemetry.hub import Counters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

RUN_STATES = (
    "founding",
    "waiting",
    "training",
    "paused",
    "moving",
    "moved",
    "ended",
)
ISLAND_STATES = ("live", "silent", "left")

Status = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Per:
    """Of what there is one sample each, and the labels that tell them apart."""

    labels: tuple[str, ...]
    rows: Callable[[Status, Counters], Iterable[Row]]


@dataclass(frozen=True)
class Metric:
    """One name, what it means, and where its samples are."""

    per: Per
    name: str
    key: str
    """Of the value, in each row."""

    about: str

    @property
    def type(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def labels(self) -> tuple[str, ...]:
        return self.per.labels


def render(status: Status, counters: Counters) -> str:
    """Return every metric of a run, each with its HELP and TYPE.

    Args:
        status: The status document.
        counters: What the hub of events has counted.
    """
    lines: list[str] = []
    for metric in METRICS:
        samples = list(_lines(metric, status, counters))
        if samples:
            lines.append(f"# HELP {metric.name} {_escaped(metric.about)}")
            lines.append(f"# TYPE {metric.name} {metric.type}")
            lines += samples
    return "\n".join([*lines, ""])


def _lines(metric: Metric, status: Status, counters: Counters) -> Iterator[str]:
    rows = metric.per.rows(status, counters)
    # A name twice would cost the reader the whole page; the last one stands.
    found = {_labelled(metric.labels, row): row[metric.key] for row in rows}
    for labels, value in found.items():
        if value is not None:
            yield f"{metric.name}{labels} {_number(value)}"


def _labelled(labels: tuple[str, ...], row: Row) -> str:
    listed = ",".join(f'{key}="{_quoted(str(row[key]))}"' for key in labels)
    return f"{{{listed}}}" if listed else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _number(value: Any) -> str:
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _run(status: Status, _: Counters) -> Iterator[Row]:
    waits = status["waits_for"]
    yield {
        **status,
        "one": 1,
        "awaited": len({each["island"] for each in waits}),
        "longest_wait_s": max((each["since_s"] for each in waits), default=0.0),
        "damaged": len(status["damage"]),
    }


def _run_states(status: Status, _: Counters) -> Iterator[Row]:
    for state in dict.fromkeys((*RUN_STATES, status["state"])):
        yield {"state": state, "is_in_it": status["state"] == state}


def _connections(status: Status, _: Counters) -> Iterator[Row]:
    if "connections" in status:
        yield status["connections"]


def _shed(status: Status, _: Counters) -> Iterator[Row]:
    for reason, count in status.get("connections", {}).get("shed", {}).items():
        yield {"reason": reason, "count": count}


def _fragments(status: Status, _: Counters) -> Iterator[Row]:
    for fragment, number in enumerate(status["rounds"]):
        yield {"fragment": fragment, "number": number}


def _island_states(status: Status, _: Counters) -> Iterator[Row]:
    states = [each["state"] for each in status["islands"]]
    for state in ISLAND_STATES:
        yield {"state": state, "count": states.count(state)}


def _recent(status: Status, _: Counters) -> Iterable[Row]:
    rounds: Iterable[Row] = status["recent"]
    return rounds


def _islands(status: Status, _: Counters) -> Iterator[Row]:
    for each in status["islands"]:
        yield {**each, "is_live": each["state"] == "live"}


def _emitted(_: Status, counters: Counters) -> Iterator[Row]:
    for name, count in sorted(counters.events.items()):
        yield {"event": name, "count": count}


def _dropped(_: Status, counters: Counters) -> Iterator[Row]:
    for sink, count in sorted(counters.dropped.items()):
        yield {"sink": sink, "count": count}


# By what there is one of each, then: name, key in the status, what it says.
_ROWS: Mapping[Per, tuple[tuple[str, str, str], ...]] = {
    Per(("run", "name", "version"), _run): (
        ("run_info", "one", "Always 1; its labels say which run this is."),
    ),
    Per(("state",), _run_states): (
        ("run_state", "is_in_it", "1 for the state the run is in, 0 for the others."),
    ),
    Per((), _run): (
        ("round", "round", "The lowest round committed over fragments."),
        ("last_round", "last_round", "The round it will end with."),
        ("tokens_total", "tokens", "Tokens the run has trained on."),
        ("epoch", "epoch", "The epoch of the settings."),
        ("quorum", "quorum", "Updates that may close a round."),
        ("start_islands", "start_islands", "Islands that the first round waits for."),
        ("start_time_seconds", "started_unix_s", "When it started, in Unix time."),
        ("stall_ratio", "stall_share", "The largest share of time an island waits."),
        ("awaited_islands", "awaited", "Islands the run waits for."),
        ("longest_wait_seconds", "longest_wait_s", "Of all waits, the longest."),
        ("bytes_in_total", "bytes_in", "Bytes received."),
        ("bytes_out_total", "bytes_out", "Bytes sent."),
        ("damage", "damaged", "Things that the journal had to do without."),
    ),
    Per((), _connections): (
        ("connections", "open", "Open connections."),
        ("connections_unverified", "unverified", "Of them, without a verified token."),
        ("parked_answers", "parked_answers", "Responses waiting for a slow reader."),
        ("parked_bytes", "parked_bytes", "Bytes of such responses."),
        ("bulk_active", "bulk_active", "Bulk bodies on their way."),
        ("bulk_waiting", "bulk_waiting", "Bulk bodies that wait for a lane."),
        ("long_polls", "long_polls", "Questions for an outcome that stay open."),
    ),
    Per(("reason",), _shed): (
        ("connections_shed_total", "count", "Connections closed for room."),
    ),
    Per(("fragment",), _fragments): (
        ("open_round", "number", "The open round of a fragment."),
    ),
    Per(("fragment",), _recent): (
        ("last_round_counted", "counted", "Updates that counted in the last round."),
        ("last_round_late", "late", "Islands that were late for the last round."),
        ("last_round_refused", "refused", "Updates refused in the last round."),
        ("last_round_seconds", "seconds", "From opening to commit of the last round."),
        ("last_round_bytes", "bytes", "Bytes of its agreed mean."),
    ),
    Per(("state",), _island_states): (("islands", "count", "Islands in a state."),),
    Per(("island", "version"), _islands): (
        ("island_incarnation", "incarnation", "Which life of the island this is."),
    ),
    Per(("island",), _islands): (
        ("island_up", "is_live", "1 while it is live, otherwise 0."),
        ("island_seen_seconds", "seen_s", "Since the island was heard of last."),
        ("island_round", "round", "The lowest round the island holds."),
        ("island_pace_seconds", "pace_s", "From opening to its update."),
        ("island_loss", "loss", "As the island's loop reported it."),
        ("island_tokens_total", "tokens", "Tokens it has trained on."),
        ("island_inner_steps_total", "inner_steps", "Inner steps made."),
        ("island_dropped_steps_total", "dropped_steps", "Inner steps dropped."),
        ("island_wait_seconds_total", "wait_s", "Time that it stood still."),
        ("island_wait_ratio", "wait_share", "Share of time that it stood still."),
        ("island_bytes_up_total", "bytes_up", "Bytes the island sent."),
        ("island_bytes_down_total", "bytes_down", "Bytes the island got."),
        ("island_counted_total", "counted", "Its updates that counted."),
        ("island_late_total", "late", "Rounds that it was late for."),
        ("island_refused_total", "refused", "Its updates that were refused."),
    ),
    Per(("event",), _emitted): (
        ("events_total", "count", "Events emitted since the coordinator started."),
    ),
    Per(("sink",), _dropped): (
        ("events_dropped_total", "count", "Events that a sink missed."),
    ),
}

METRICS: tuple[Metric, ...] = tuple(
    Metric(per, f"atoll_{name}", key, about)
    for per, rows in _ROWS.items()
    for name, key, about in rows
)
