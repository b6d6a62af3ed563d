"""A run's status as Prometheus reads it: text format 0.0.4, from values alone.

Rule 1: names and labels are promises, as those of events.
Rule 2: an unknown value has no sample; it is never zero instead.
Rule 3: names that end with `_total` are counters and only grow; others are gauges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.telemetry.bus import Counters
from atoll.telemetry.findings import Severity

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

HISTOGRAM = "upto"
"""The key of pairs of a bound and the number of values up to it."""

Status = Mapping[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class SampleSet:
    """The rows that have one sample each, and the labels that distinguish them."""

    labels: tuple[str, ...]
    rows: Callable[[Status, Counters], Iterable[Row]]


@dataclass(frozen=True)
class Metric:
    """One metric: its name, its description and the source of its samples."""

    per: SampleSet
    name: str
    key: str
    """Key of the value in each row."""

    description: str

    @property
    def type(self) -> str:
        if self.key == HISTOGRAM:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def labels(self) -> tuple[str, ...]:
        return self.per.labels


def render(status: Status, counters: Counters) -> str:
    """Return every metric of a run, each with its HELP and TYPE.

    Args:
        status: The status document.
        counters: The counters of the event bus.
    """
    lines: list[str] = []
    for metric in METRICS:
        samples = list(_lines(metric, status, counters))
        if samples:
            lines.append(f"# HELP {metric.name} {_escaped(metric.description)}")
            lines.append(f"# TYPE {metric.name} {metric.type}")
            lines += samples
    return "\n".join([*lines, ""])


def _lines(metric: Metric, status: Status, counters: Counters) -> Iterator[str]:
    rows = metric.per.rows(status, counters)
    if metric.type == "histogram":
        for row in rows:
            yield from _histogram(metric, row)
        return
    # Prometheus rejects a page with a duplicate sample: keep the last one.
    samples = {_labelled(metric.labels, row): row[metric.key] for row in rows}
    for labels, value in samples.items():
        if value is not None:
            yield f"{metric.name}{labels} {_number(value)}"


def _histogram(metric: Metric, row: Row) -> Iterator[str]:
    labels = (*metric.labels, "le")
    for bound, count in [*row[HISTOGRAM], (math.inf, row["count"])]:
        le = "+Inf" if math.isinf(bound) else f"{bound:g}"
        yield f"{metric.name}_bucket{_labelled(labels, {**row, 'le': le})} {count}"
    labelled = _labelled(metric.labels, row)
    yield f"{metric.name}_sum{labelled} {_number(row['sum_s'])}"
    yield f"{metric.name}_count{labelled} {row['count']}"


def _labelled(labels: tuple[str, ...], row: Row) -> str:
    listed = ",".join(f'{key}="{_quoted(str(row[key]))}"' for key in labels)
    return f"{{{listed}}}" if listed else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _number(value: Any) -> str:
    return str(int(value)) if isinstance(value, int) else repr(float(value))


_RUN_RATES = ("stall_share_mean", "utilisation", "tokens_per_s", "last_commit_unix_s")
"""Keys that the status of an older coordinator, or of a run in a store, lacks."""


def _run(status: Status, _: Counters) -> Iterator[Row]:
    waits = status["waits_for"]
    yield {
        **dict.fromkeys(_RUN_RATES),
        **status,
        "one": 1,
        "awaited": len({wait["island"] for wait in waits}),
        "longest_wait_s": max((wait["since_s"] for wait in waits), default=0.0),
        "damaged": len(status["damage"]),
        "disk_free_bytes": (status.get("disk") or {}).get("free_bytes"),
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


DATA_STATES = ("trained", "partly", "refused", "in_hand", "free")


def _data_rows(status: Status, _: Counters) -> Iterator[Row]:
    data = status.get("data") or {}
    for state in DATA_STATES if data else ():
        yield {"state": state, "count": data[state]}


def _fragments(status: Status, _: Counters) -> Iterator[Row]:
    for fragment, number in enumerate(status["rounds"]):
        yield {"fragment": fragment, "number": number, "commits": number - 1}


def _round_seconds(status: Status, _: Counters) -> Iterable[Row]:
    rows: Iterable[Row] = status.get("round_seconds", ())
    return rows


def _anchor_metrics(status: Status, _: Counters) -> Iterator[Row]:
    for name, row in (status.get("anchor_metrics") or {}).items():
        yield {"name": name, "value": row["value"]}


def _island_states(status: Status, _: Counters) -> Iterator[Row]:
    states = [island["state"] for island in status["islands"]]
    for state in ISLAND_STATES:
        yield {"state": state, "count": states.count(state)}


def _recent(status: Status, _: Counters) -> Iterable[Row]:
    rounds: Iterable[Row] = status["recent"]
    return rounds


def _islands(status: Status, _: Counters) -> Iterator[Row]:
    for island in status["islands"]:
        is_live = island["state"] == "live"
        rates = {key: island.get(key) for key in _ISLAND_RATES}
        yield {**island, **rates, "is_live": is_live}


def _own_metrics(status: Status, _: Counters) -> Iterator[Row]:
    for island in status["islands"]:
        for name, value in (island.get("metrics") or {}).items():
            yield {"island": island["island"], "name": name, "value": value}


def _findings(status: Status, _: Counters) -> Iterator[Row]:
    severities = [row["severity"] for row in status.get("findings", ())]
    for severity in Severity:
        yield {"severity": severity.value, "count": severities.count(severity.value)}


def _agreement(status: Status, _: Counters) -> Iterator[Row]:
    agreement = status.get("agreement")
    if agreement:
        yield {**agreement, "is_same": not agreement["apart"]}


def _emitted(_: Status, counters: Counters) -> Iterator[Row]:
    for name, count in sorted(counters.events.items()):
        yield {"event": name, "count": count}


def _dropped(_: Status, counters: Counters) -> Iterator[Row]:
    for sink, count in sorted(counters.dropped.items()):
        yield {"sink": sink, "count": count}


_ISLAND_RATES = (
    *("loss_is_finite", "utilisation", "tokens_per_s", "deaths", "late_after_s"),
    *("carried", "dropped", "exchange_s", "hidden_s", "up_bytes_per_s"),
    *("down_bytes_per_s", "rtt_s", "store_usd"),
)
"""Keys that the status of an older coordinator, or of a run in a store, lacks."""

# By sample set: name, key in the status, description.
_ROWS: Mapping[SampleSet, tuple[tuple[str, str, str], ...]] = {
    SampleSet(("run", "name", "version"), _run): (
        ("run_info", "one", "Always 1; the labels identify the run."),
    ),
    SampleSet(("state",), _run_states): (
        ("run_state", "is_in_it", "1 for the state the run is in, 0 for the others."),
    ),
    SampleSet((), _run): (
        ("round", "round", "The lowest round committed over fragments."),
        ("last_round", "last_round", "The last round of the run."),
        ("tokens_total", "tokens", "Tokens the run has trained on."),
        ("end_tokens", "end_tokens", "Tokens with which the run ends."),
        ("overshoot_tokens", "overshoot", "Tokens that counted beyond that."),
        ("rounds_per_window", "rounds_per_window", "Rounds in the shortest window."),
        ("bytes_down_factor", "bytes_down_factor", "Bytes down, to a synchronous run."),
        ("epoch", "epoch", "The epoch of the settings."),
        ("quorum", "quorum", "Updates needed to close a round."),
        ("start_islands", "start_islands", "Islands that the first round waits for."),
        ("start_time_seconds", "started_unix_s", "Start time, as Unix time."),
        ("stall_ratio", "stall_share", "The largest share of time an island waits."),
        ("stall_mean_ratio", "stall_share_mean", "Share of all time islands wait."),
        ("utilisation_ratio", "utilisation", "Share of all time islands compute."),
        ("tokens_per_second", "tokens_per_s", "Tokens counted in a second, of late."),
        (
            "last_commit_time_seconds",
            "last_commit_unix_s",
            "Unix time of the last commit.",
        ),
        ("awaited_islands", "awaited", "Islands the run waits for."),
        ("longest_wait_seconds", "longest_wait_s", "The longest current wait."),
        ("bytes_in_total", "bytes_in", "Bytes received."),
        ("bytes_out_total", "bytes_out", "Bytes sent."),
        ("damage", "damaged", "Damaged parts of the journal."),
        ("disk_free_bytes", "disk_free_bytes", "Free bytes on the journal's disk."),
    ),
    SampleSet((), _connections): (
        ("connections", "open", "Open connections."),
        ("connections_unverified", "unverified", "Those without a verified token."),
        ("parked_answers", "parked_answers", "Responses waiting for a slow reader."),
        ("parked_bytes", "parked_bytes", "Bytes of such responses."),
        ("bulk_active", "bulk_active", "Bulk bodies in transfer."),
        ("bulk_waiting", "bulk_waiting", "Bulk bodies that wait for a slot."),
        ("long_polls", "long_polls", "Open long polls for an outcome."),
    ),
    SampleSet(("reason",), _shed): (
        ("connections_shed_total", "count", "Connections closed to free room."),
    ),
    SampleSet(("state",), _data_rows): (
        ("data_rows", "count", "Rows of the run's data in a state."),
    ),
    SampleSet(("fragment",), _fragments): (
        ("open_round", "number", "The open round of a fragment."),
        ("commits_total", "commits", "Committed rounds of a fragment."),
    ),
    SampleSet(("fragment",), _round_seconds): (
        ("round_seconds", HISTOGRAM, "Duration of the rounds of a fragment."),
    ),
    SampleSet(("fragment",), _recent): (
        ("last_round_counted", "counted", "Updates that counted in the last round."),
        ("last_round_late", "late", "Islands that were late for the last round."),
        ("last_round_refused", "refused", "Updates refused in the last round."),
        ("last_round_seconds", "seconds", "Duration of the last round."),
        ("last_round_bytes", "bytes", "Size of its agreed mean."),
    ),
    SampleSet(("state",), _island_states): (
        ("islands", "count", "Islands in a state."),
    ),
    SampleSet(("island", "version"), _islands): (
        ("island_incarnation", "incarnation", "The island's incarnation."),
    ),
    SampleSet(("island",), _islands): (
        ("island_up", "is_live", "1 while it is live, otherwise 0."),
        ("island_seen_seconds", "seen_s", "Time since its last message."),
        ("island_round", "round", "The lowest round it has adopted."),
        ("island_pace_seconds", "pace_s", "Time from opening to its update."),
        ("island_step_seconds", "step_s", "Its pace: the time of an inner step."),
        ("island_window_steps", "window", "Its inner steps per window."),
        ("island_age_rounds", "age", "The mean age of its updates."),
        ("island_loss", "loss", "The loss that it reported."),
        ("island_loss_finite", "loss_is_finite", "0 if its loss is not a number."),
        ("island_utilisation_ratio", "utilisation", "Share of time it computes."),
        ("island_tokens_per_second", "tokens_per_s", "Tokens in a second, of late."),
        ("island_deaths_total", "deaths", "Incarnations that ended without a leave."),
        ("island_tokens_total", "tokens", "Tokens it has trained on."),
        ("island_inner_steps_total", "inner_steps", "Inner steps made."),
        ("island_dropped_steps_total", "dropped_steps", "Inner steps dropped."),
        ("island_wait_seconds_total", "wait_s", "Time that it waited."),
        ("island_wait_ratio", "wait_share", "Share of time that it waited."),
        ("island_bytes_up_total", "bytes_up", "Bytes the island sent."),
        ("island_bytes_down_total", "bytes_down", "Bytes the island received."),
        ("island_counted_total", "counted", "Its updates that counted."),
        ("island_late_total", "late", "Rounds that it was late for."),
        ("island_refused_total", "refused", "Its updates that were refused."),
        ("island_carried_total", "carried", "Its updates carried into a next round."),
        ("island_dropped_total", "dropped", "Its updates that were dropped."),
        ("island_late_after_seconds", "late_after_s", "When a round gives it up."),
        ("island_exchange_seconds", "exchange_s", "From seal to outcome."),
        ("island_hidden_seconds", "hidden_s", "The part in which it trained."),
        ("island_up_bytes_per_second", "up_bytes_per_s", "Rate of its uploads."),
        ("island_down_bytes_per_second", "down_bytes_per_s", "Rate of its downloads."),
        ("island_rtt_seconds", "rtt_s", "Round trip to the run."),
        ("island_store_usd_total", "store_usd", "Price of its requests to a store."),
    ),
    SampleSet(("island", "name"), _own_metrics): (
        ("island_metric", "value", "A metric that its training loop reports."),
    ),
    SampleSet(("name",), _anchor_metrics): (
        ("anchor_metric", "value", "A metric of the anchor, as last evaluated."),
    ),
    SampleSet(("severity",), _findings): (
        ("findings", "count", "Findings of a severity."),
    ),
    SampleSet((), _agreement): (
        ("anchor_holders", "holding", "Islands that hold the newest anchor."),
        ("anchor_agrees", "is_same", "0 if anchors of one round differ."),
    ),
    SampleSet(("event",), _emitted): (
        ("events_total", "count", "Events emitted since the coordinator started."),
    ),
    SampleSet(("sink",), _dropped): (
        ("events_dropped_total", "count", "Events that a sink missed."),
    ),
}

METRICS: tuple[Metric, ...] = tuple(
    Metric(per, f"atoll_{name}", key, description)
    for per, rows in _ROWS.items()
    for name, key, description in rows
)
