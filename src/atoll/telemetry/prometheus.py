"""A run's status as Prometheus reads it: text format 0.0.4, from values alone.

Rule 1: names and labels are promises, as those of events.
Rule 2: what is not known has no sample; it is never zero instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.telemetry.hub import Counters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

RUN_STATES = ("founding", "waiting", "training", "paused", "draining", "ended")
ISLAND_STATES = ("live", "silent", "left")

Status = Mapping[str, Any]
Labels = Mapping[str, object]
Sample = tuple[Labels, Any]
Read = Callable[[Status, Counters], Iterable[Sample]]

COUNTER, GAUGE = "counter", "gauge"


@dataclass(frozen=True)
class Metric:
    """One name, what it means, and where its samples are."""

    name: str
    type: str
    about: str
    labels: tuple[str, ...]
    read: Read


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
            lines.append(f"# HELP {metric.name} {_escaped_help(metric.about)}")
            lines.append(f"# TYPE {metric.name} {metric.type}")
            lines += samples
    return "\n".join([*lines, ""])


def _lines(metric: Metric, status: Status, counters: Counters) -> Iterator[str]:
    # A name twice would cost the reader the whole page; the last one stands.
    found = {
        _labelled(labels): value for labels, value in metric.read(status, counters)
    }
    for labels, value in found.items():
        if value is not None:
            yield f"{metric.name}{labels} {_number(value)}"


def _labelled(labels: Labels) -> str:
    listed = ",".join(f'{key}="{_escaped(str(v))}"' for key, v in labels.items())
    return f"{{{listed}}}" if listed else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: Any) -> str:
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _of_run(name: str, type: str, about: str, key: str) -> Metric:
    return Metric(name, type, about, (), lambda status, _: [({}, status[key])])


def _of_island(name: str, type: str, about: str, key: str) -> Metric:
    def read(status: Status, _: Counters) -> Iterator[Sample]:
        for each in status["islands"]:
            yield {"island": each["island"]}, each[key]

    return Metric(f"atoll_island_{name}", type, about, ("island",), read)


def _of_last_round(name: str, about: str, key: str) -> Metric:
    def read(status: Status, _: Counters) -> Iterator[Sample]:
        for each in status["recent"]:
            yield {"fragment": each["fragment"]}, each[key]

    return Metric(f"atoll_last_round_{name}", GAUGE, about, ("fragment",), read)


def _info(status: Status, _: Counters) -> Iterator[Sample]:
    yield {key: status[key] for key in ("run", "name", "version")}, 1


def _run_state(status: Status, _: Counters) -> Iterator[Sample]:
    for state in dict.fromkeys((*RUN_STATES, status["state"])):
        yield {"state": state}, status["state"] == state


def _open_rounds(status: Status, _: Counters) -> Iterator[Sample]:
    for fragment, number in enumerate(status["rounds"]):
        yield {"fragment": fragment}, number


def _islands(status: Status, _: Counters) -> Iterator[Sample]:
    states = [each["state"] for each in status["islands"]]
    for state in ISLAND_STATES:
        yield {"state": state}, states.count(state)


def _awaited(status: Status, _: Counters) -> Iterator[Sample]:
    yield {}, len({each["island"] for each in status["waits_for"]})


def _longest_wait(status: Status, _: Counters) -> Iterator[Sample]:
    yield {}, max((each["since_s"] for each in status["waits_for"]), default=0.0)


def _damage(status: Status, _: Counters) -> Iterator[Sample]:
    yield {}, len(status["damage"])


def _island_info(status: Status, _: Counters) -> Iterator[Sample]:
    for each in status["islands"]:
        yield {key: each[key] for key in ("island", "version")}, each["incarnation"]


def _island_up(status: Status, _: Counters) -> Iterator[Sample]:
    for each in status["islands"]:
        yield {"island": each["island"]}, each["state"] == "live"


def _emitted(_: Status, counters: Counters) -> Iterator[Sample]:
    for name, count in sorted(counters.events.items()):
        yield {"event": name}, count


def _dropped(_: Status, counters: Counters) -> Iterator[Sample]:
    for sink, count in sorted(counters.dropped.items()):
        yield {"sink": sink}, count


METRICS: tuple[Metric, ...] = (
    Metric(
        "atoll_run_info",
        GAUGE,
        "Always 1; its labels say which run this is.",
        ("run", "name", "version"),
        _info,
    ),
    Metric(
        "atoll_run_state",
        GAUGE,
        "1 for the state that the run is in, 0 for the others.",
        ("state",),
        _run_state,
    ),
    _of_run(
        "atoll_round", GAUGE, "The lowest round committed over fragments.", "round"
    ),
    _of_run("atoll_last_round", GAUGE, "The round it will end with.", "last_round"),
    Metric(
        "atoll_open_round",
        GAUGE,
        "The open round of a fragment.",
        ("fragment",),
        _open_rounds,
    ),
    _of_run("atoll_tokens_total", COUNTER, "Tokens the run has trained on.", "tokens"),
    _of_run("atoll_epoch", GAUGE, "The epoch of the settings.", "epoch"),
    _of_run("atoll_quorum", GAUGE, "Updates that may close a round.", "quorum"),
    _of_run(
        "atoll_start_islands",
        GAUGE,
        "Islands that the first round waits for.",
        "start_islands",
    ),
    _of_run(
        "atoll_start_time_seconds",
        GAUGE,
        "When the coordinator started, in Unix time.",
        "started_unix_s",
    ),
    _of_run(
        "atoll_stall_ratio",
        GAUGE,
        "Share of the islands' time spent waiting, over the last rounds.",
        "stall_share",
    ),
    Metric(
        "atoll_islands",
        GAUGE,
        "Islands in a state.",
        ("state",),
        _islands,
    ),
    Metric("atoll_awaited_islands", GAUGE, "Islands the run waits for.", (), _awaited),
    Metric(
        "atoll_longest_wait_seconds",
        GAUGE,
        "Since when the run waits for the island it waits for longest.",
        (),
        _longest_wait,
    ),
    _of_run("atoll_bytes_in_total", COUNTER, "Bytes received.", "bytes_in"),
    _of_run("atoll_bytes_out_total", COUNTER, "Bytes sent.", "bytes_out"),
    Metric(
        "atoll_damage",
        GAUGE,
        "Things that the journal had to do without.",
        (),
        _damage,
    ),
    _of_last_round("counted", "Updates that counted in the last round.", "counted"),
    _of_last_round("late", "Islands that were late for the last round.", "late"),
    _of_last_round("refused", "Updates refused in the last round.", "refused"),
    _of_last_round("seconds", "From opening to commit of the last round.", "seconds"),
    _of_last_round("bytes", "Bytes of the last round.", "bytes"),
    Metric(
        "atoll_island_incarnation",
        GAUGE,
        "Which life of the island this is.",
        ("island", "version"),
        _island_info,
    ),
    Metric(
        "atoll_island_up",
        GAUGE,
        "1 while the island is live, 0 when it is silent or has left.",
        ("island",),
        _island_up,
    ),
    _of_island("seen_seconds", GAUGE, "Since the island was heard of last.", "seen_s"),
    _of_island("round", GAUGE, "The lowest round the island holds.", "round"),
    _of_island("pace_seconds", GAUGE, "From opening to its update.", "pace_s"),
    _of_island("loss", GAUGE, "As the island's loop reported it.", "loss"),
    _of_island("tokens_total", COUNTER, "Tokens it has trained on.", "tokens"),
    _of_island("inner_steps_total", COUNTER, "Inner steps made.", "inner_steps"),
    _of_island("wait_seconds_total", COUNTER, "Time that it stood still.", "wait_s"),
    _of_island("wait_ratio", GAUGE, "Share of time that it stood still.", "wait_share"),
    _of_island("bytes_up_total", COUNTER, "Bytes the island sent.", "bytes_up"),
    _of_island("bytes_down_total", COUNTER, "Bytes the island got.", "bytes_down"),
    _of_island("counted_total", COUNTER, "Its updates that counted.", "counted"),
    _of_island("late_total", COUNTER, "Rounds that it was late for.", "late"),
    _of_island("refused_total", COUNTER, "Its updates that were refused.", "refused"),
    Metric(
        "atoll_events_total",
        COUNTER,
        "Events emitted since the coordinator started.",
        ("event",),
        _emitted,
    ),
    Metric(
        "atoll_events_dropped_total",
        COUNTER,
        "Events that a sink missed.",
        ("sink",),
        _dropped,
    ),
)
