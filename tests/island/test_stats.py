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
