"""The statistics in a heartbeat: the loss, whether it is finite, and other metrics."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import UsageError
from atoll.exchange.api.messages import STATS
from atoll.island.progress import MAX_METRICS, MAX_METRICS_BYTES, IslandCounters
from atoll.protocol import Stats


def stats_after(loss: Any, **metrics: Any) -> Stats:
    """Return the statistics after one report, as a coordinator reads them."""
    counters = IslandCounters()
    counters.note_report(7, loss, metrics, count="a number")
    text = json.dumps(STATS.write(counters.stats(1.0)), allow_nan=False)
    return STATS.read(json.loads(text), "stats")


@pytest.mark.parametrize(
    ("loss", "expected", "is_finite"),
    [(1.5, 1.5, True), (math.nan, None, False), (math.inf, None, False)],
)
def test_a_loss_that_is_no_number_is_reported(
    loss: float, expected: float | None, is_finite: bool
) -> None:
    """NaN is no loss, and differs from a loss that was never reported."""
    stats = stats_after(loss)

    assert (stats.loss, stats.loss_is_finite) == (expected, is_finite)
    assert IslandCounters().stats(1.0).loss_is_finite is None


def test_metrics_of_the_loop_are_sent() -> None:
    """Numbers with six digits; a text, a NaN or an infinite value is left out."""
    stats = stats_after(2.0, lr=1 / 3, note="warm", grad_norm=math.nan, step=4)

    assert stats.metrics == {"lr": 0.333333, "step": 4.0}


@given(st.dictionaries(st.text(), st.floats() | st.integers(), max_size=60))
def test_metrics_are_bounded(metrics: dict[str, float]) -> None:
    """So many, so long and so large that a heartbeat stays small."""
    metrics.pop("loss", None)
    counters = IslandCounters()
    counters.note_report(0, 1.0, metrics, count="a number")
    sent = counters.stats(1.0).metrics or {}

    assert len(sent) <= MAX_METRICS
    assert len(json.dumps(sent)) <= MAX_METRICS_BYTES + 2
    assert stats_after(1.0, **metrics).metrics == (sent or None)


def test_too_many_metrics_are_refused() -> None:
    """A coordinator reads no more than an island of this version sends."""
    form = STATS.write(Stats(metrics={f"m{n}": 1.0 for n in range(17)}))

    with pytest.raises(UsageError, match=r"stats\.metrics has 17 metrics"):
        STATS.read(form, "stats")
    long = STATS.write(Stats(metrics={"m" * 65: 1.0}))
    with pytest.raises(UsageError, match="the longest name 65 bytes"):
        STATS.read(long, "stats")


class Unready:
    """A value on a device: reading it would wait for the device."""

    def __float__(self) -> float:
        raise AssertionError("a report has read a value")


def test_a_report_reads_no_value() -> None:
    """Neither a loss nor a metric is converted before a heartbeat is made."""
    counters = IslandCounters()
    counters.note_report(1, Unready(), {"lr": Unready()}, count="a number")
    counters.note_anchor(3, Unready(), {"accuracy": Unready()})

    assert counters.reported.keys() == {"loss", "lr"}


def test_measurements_of_an_anchor_are_those_of_its_round() -> None:
    """Two reports of one round add up; the next round begins anew."""
    counters = IslandCounters()
    counters.note_anchor(3, 1.5, {})
    counters.note_anchor(3, None, {"accuracy": 0.5})
    both = counters.stats(1.0)
    counters.note_anchor(4, 1.25, {})
    later = counters.stats(1.0)

    assert (both.anchor_round, both.anchor_metrics) == (
        3,
        {"eval_loss": 1.5, "accuracy": 0.5},
    )
    assert (later.anchor_round, later.anchor_metrics) == (4, {"eval_loss": 1.25})


def test_overlap_hides_the_part_of_an_exchange_without_a_wait() -> None:
    """Of 8 s and 4 s all but 1 s and 4 s of waiting were hidden; each fragment once."""
    counters = IslandCounters()
    counters.note_exchange(0, 99.0, waited_s=99.0)
    counters.note_exchange(0, 8.0, waited_s=1.0)
    counters.note_exchange(1, 4.0, waited_s=4.5)
    stats = counters.stats(1.0)

    assert (stats.exchange_s, stats.hidden_s) == (12.0, 7.0)


def test_a_heartbeat_grows_by_700_bytes_at_most() -> None:
    """With as many metrics as are sent, long names and the longest numbers."""
    plain = IslandCounters(inner_steps=10**9, tokens=10**12, first_batch="x")
    full = IslandCounters(inner_steps=10**9, tokens=10**12, first_batch="x")
    long = {f"metric-{n:02}": -1.23456e-300 for n in range(40)}
    full.note_report(1, -1.23456789e-300, long, count="a number")
    full.note_anchor(10**9, -1.23456e-300, long)
    full.note_exchange(0, 123.456789, waited_s=1.23456789)
    full.machine = "é" * 500
    full.carried = full.dropped = 10**6
    link = ("up_bytes_per_s", "down_bytes_per_s", "rtt_s", "store_usd")
    full.costs = lambda: {f"atoll/{name}": 1.23456789e8 for name in link}
    plain.note_report(1, -1.23456789e-300, {}, count="a number")
    sizes = [
        len(json.dumps(STATS.write(counters.stats(1.0)), separators=(",", ":")))
        for counters in (plain, full)
    ]
    stats = STATS.read(STATS.write(full.stats(1.0)), "stats")

    assert sizes[1] - sizes[0] <= 700
    assert len(stats.metrics or {}) >= 8
    assert len(stats.anchor_metrics or {}) >= 3
    assert stats.machine == "?" * 64
