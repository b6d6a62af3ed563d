"""Metrics of a training loop reach everything that shows a run."""

from __future__ import annotations

import math
import threading
from contextlib import closing
from pathlib import Path

from atoll.island import join_run
from atoll.run_client import open_run
from atoll.telemetry import render_status
from atoll.testing import VectorView
from tests.cli import stores
from tests.run_client.conftest import END_ROUNDS, served


def train(url: str, name: str, loss: float) -> None:
    """Train one island to the end of the run; it reports before every inner step."""
    host = join_run(url, VectorView(), stores.MODEL, island=name)
    host.counters.machine = "vectors"
    while not host.has_ended:
        if host.round == 2:
            host.counters.note_anchor(2, 1.25, {})
        host.counters.note_report(7, loss, {"lr": 0.25}, count="a number")
        host.count_tokens(7)
        host.stepped()
    host.leave()


def test_metrics_and_a_diverged_loss_reach_status_events_and_history(
    tmp_path: Path, user: None
) -> None:
    """One island reports a loss of 1.5, the other NaN; both a learning rate of 0.25."""
    with served(tmp_path / "run") as url, closing(open_run(url)) as client:
        islands = [
            threading.Thread(target=train, args=(url, name, loss))
            for name, loss in (("a", 1.5), ("b", math.nan))
        ]
        for thread in islands:
            thread.start()
        for thread in islands:
            thread.join(timeout=120)
        document = client.status().document
        reports = [e for e in client.events() if e.name == "loss_reported"]
        history = client.history(columns="loss,lr")

    rows = {row["island"]: row for row in document["islands"]}
    assert (rows["a"]["loss"], rows["a"]["loss_is_finite"]) == (1.5, True)
    assert (rows["b"]["loss"], rows["b"]["loss_is_finite"]) == (None, False)
    assert rows["a"]["metrics"] == rows["b"]["metrics"] == {"lr": 0.25}
    assert "NaN" in render_status(document, width=200, is_colour=False)
    reported = [event.fields["metrics"] for event in reports]
    assert {"lr": 0.25} in reported
    assert document["anchor_metrics"] == {"eval_loss": {"round": 2, "value": 1.25}}
    assert history["curves"]["anchor"] == {"eval_loss": [[2, 1.25]]}
    measured = {"count": END_ROUNDS, "fragment": 0}
    assert document["round_seconds"][0].items() >= measured.items()
    curves = history["curves"]["islands"]
    assert 0.25 in curves["a"]["lr"]
    assert 1.5 in curves["a"]["loss"]
    assert rows["a"]["exchange_s"] >= rows["a"]["hidden_s"] >= 0.0
    assert rows["a"]["rtt_s"] > 0.0
    assert (rows["a"]["carried"], rows["a"]["dropped"]) == (0, 0)
    assert rows["a"]["machine"] == "vectors"
    assert curves["b"]["not_finite"] != []
