"""The page that Prometheus reads, through Prometheus's own parser."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.telemetry import (
    METRICS,
    Counters,
    EventBus,
    render,
)
from tests.telemetry.statuses import island, status, trouble

parser = pytest.importorskip("prometheus_client.parser")

NOTHING = Counters({}, {})
Key = tuple[str, tuple[tuple[str, str], ...]]


def samples(text: str) -> dict[Key, float]:
    """Return every sample by its name and labels; each is there once."""
    found: dict[Key, float] = {}
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


def of_island(name: str, found: dict[Key, float], island: str = "i0") -> float:
    """Return the sample of one island."""
    return found[f"atoll_island_{name}", (("island", island),)]


def test_a_run_is_told_in_numbers() -> None:
    """What the status says of the run is there under its name."""
    found = samples(render(status(), NOTHING))

    assert found["atoll_round", ()] == 6
    assert found["atoll_last_round", ()] == 40
    assert found["atoll_tokens_total", ()] == 123_456
    assert found["atoll_stall_ratio", ()] == 0.12
    assert found["atoll_open_round", (("fragment", "2"),)] == 6
    assert found["atoll_run_state", (("state", "training"),)] == 1
    assert found["atoll_run_state", (("state", "paused"),)] == 0


def test_an_island_is_told_in_numbers() -> None:
    """Each of its numbers has its name as a label."""
    found = samples(render(status(island("i0")), NOTHING))

    assert of_island("loss", found) == 1.93
    assert of_island("up", found) == 1
    assert of_island("bytes_up_total", found) == 12_345_678
    assert of_island("wait_seconds_total", found) == 3.4


def test_durations_of_rounds_are_a_histogram() -> None:
    """Counts are cumulative, and the last bound is infinite."""
    row = {"fragment": 1, "upto": [(1.0, 2), (5.0, 3)], "count": 4, "sum_s": 12.5}
    found = samples(render(status(round_seconds=[row]), NOTHING))
    name, label = "atoll_round_seconds", ("fragment", "1")

    buckets = [
        found[f"{name}_bucket", (label, ("le", le))] for le in ("1", "5", "+Inf")
    ]
    assert buckets == [2, 3, 4]
    assert found[f"{name}_sum", (label,)] == 12.5
    assert found[f"{name}_count", (label,)] == 4


def test_the_anchor_and_the_link_are_measured() -> None:
    """What is unknown has no sample."""
    measured = {"eval_loss": {"round": 5, "value": 1.5}}
    rows = (
        island("i0", up_bytes_per_s=1e6, carried=3),
        island("i1", up_bytes_per_s=None),
    )
    found = samples(render(status(*rows, anchor_metrics=measured), NOTHING))

    assert found["atoll_anchor_metric", (("name", "eval_loss"),)] == 1.5
    assert of_island("up_bytes_per_second", found) == 1e6
    assert of_island("carried_total", found) == 3
    assert ("atoll_island_up_bytes_per_second", (("island", "i1"),)) not in found
    assert found["atoll_commits_total", (("fragment", "2"),)] == 5


def test_who_is_waited_for_is_counted() -> None:
    """An alarm can go off when a run waits too long."""
    found = samples(render(trouble(4), NOTHING))

    assert found["atoll_awaited_islands", ()] == 1
    assert found["atoll_longest_wait_seconds", ()] == 75.0
    assert found["atoll_islands", (("state", "live"),)] == 2
    assert found["atoll_islands", (("state", "silent"),)] == 1


def test_the_last_round_of_a_fragment_stands() -> None:
    """Of three rounds of fragment 0 the newest is shown."""
    recent = status()["recent"]
    recent[-1]["seconds"] = 9.5

    found = samples(render(status(recent=recent), NOTHING))

    assert found["atoll_last_round_seconds", (("fragment", "0"),)] == 9.5


def test_what_is_not_known_has_no_sample() -> None:
    """An island without a loss has none, rather than a loss of zero."""
    nothing_yet = island("i0", loss=None, pace_s=None, step_s=None)
    text = render(status(nothing_yet), NOTHING)

    assert "atoll_island_loss{" not in text
    assert "atoll_island_pace_seconds" not in text
    assert "atoll_island_step_seconds" not in text


def test_a_pace_and_a_window_are_gauges() -> None:
    """Their product is the time of a window, which is to be alike on all islands."""
    found = samples(render(status(island("i0", step_s=0.57, window=17)), NOTHING))

    assert of_island("step_seconds", found) == 0.57
    assert of_island("window_steps", found) == 17


def test_a_loss_that_is_not_finite_is_shown_as_such() -> None:
    """A diverged island can be seen on a graph."""
    found = samples(render(status(island("i0", loss=math.nan)), NOTHING))

    assert math.isnan(of_island("loss", found))


def test_events_are_counted_on_the_page() -> None:
    """What the hub counted is there, by name and by sink."""
    events = EventBus()
    events.subscribe(lambda event: None, name="jsonl")
    events.emit("run_created")
    events.close(within_s=60.0)

    found = samples(render(status(), events.counters()))

    assert found["atoll_events_total", (("event", "run_created"),)] == 1
    assert found["atoll_events_dropped_total", (("sink", "jsonl"),)] == 0


def test_a_name_twice_does_not_spoil_the_page() -> None:
    """The later of two islands of one name is shown."""
    found = samples(render(status(island("i0", loss=1.0), island("i0")), NOTHING))

    assert of_island("loss", found) == 1.93


@given(st.text())
def test_no_name_can_break_its_label(name: str) -> None:
    """Whatever an island is called, its samples are its own and read back."""
    found = samples(render(status(island(name)), NOTHING))

    assert of_island("loss", found, name) == 1.93


def test_every_metric_has_help_and_type() -> None:
    """Prometheus knows what each name means and whether it only grows."""
    document = trouble(4) | {
        "end_tokens": 9,
        "overshoot": 1,
        "rounds_per_window": 3.5,
        "bytes_down_factor": 2.5,
    }
    document["islands"] = [row | {"age": 1.5} for row in document["islands"]]
    text = render(document, Counters({"run_created": 1}, {"jsonl": 0}))

    families: dict[str, Any] = {
        each.name: each for each in parser.text_string_to_metric_families(text)
    }
    for metric in METRICS:
        name = metric.name
        if metric.type == "counter":
            assert name.endswith("_total")
            name = name.removesuffix("_total")
        assert families[name].type == metric.type
        assert families[name].documentation == metric.description
        for sample in families[name].samples:
            labels = (label for label in sample.labels if label != "le")
            assert tuple(labels) == metric.labels
