"""The dashboard and the rules name metrics and labels that a coordinator exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.telemetry import METRICS, grafana
from tests.cli.runs import as_user, run, serving

LABELS = {metric.name: set(metric.labels) for metric in METRICS}
ALWAYS = {"instance", "job"}
SELECTOR = re.compile(r"(atoll_\w+)(?:\{([^}]*)\})?")


def expressions() -> Iterator[str]:
    """Yield every expression of the dashboard and of the rules."""
    document = grafana.dashboard()
    for panel in document["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (entry["expr"] for entry in document["annotations"]["list"])
    for entry in document["templating"]["list"]:
        if entry["type"] == "query":
            yield entry["query"]["query"]
    yield from (rule.expression for rule in grafana.RULES)


def test_every_metric_exists_with_its_labels() -> None:
    """Histograms are exported with `_bucket`."""
    used = set()
    for expression in expressions():
        for name, selector in SELECTOR.findall(expression):
            metric = name.removesuffix("_bucket")
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert metric in LABELS, expression
            assert labels <= LABELS[metric] | ALWAYS, expression
            used.add(metric)
    assert len(used) > 35


def test_every_legend_is_a_label() -> None:
    """`{{island}}` in a legend is a label of the panel's metrics."""
    for panel in grafana.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            metrics = [
                m.removesuffix("_bucket") for m, _ in SELECTOR.findall(target["expr"])
            ]
            labels = set.intersection(*(LABELS[metric] for metric in metrics))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_panels_do_not_overlap_and_have_units() -> None:
    """Every panel lies within 24 columns, with an id of its own."""
    cells: set[tuple[int, int]] = set()
    panels = grafana.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        position = panel["gridPos"]
        own_cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert not own_cells & cells, panel["title"]
        assert position["x"] + position["w"] <= grafana.WIDTH
        cells |= own_cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"] == grafana.DATASOURCE


def test_the_rules_are_what_prometheus_reads() -> None:
    """One group; each rule has an expression, a duration, labels and annotations."""
    (group,) = yaml.safe_load(grafana.rules())["groups"]

    assert len(group["rules"]) == len(grafana.RULES)
    for rule in group["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("bad", "warn")
        assert re.fullmatch(r"\d+m", rule["for"])


def test_the_scrape_configuration_of_a_served_run_is_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files that exist."""
    with serving(tmp_path) as served:
        as_user(monkeypatch, served.home)
        code, text, _ = run(capsys, "telemetry", "scrape", served.directory)
    (job,) = yaml.safe_load(text)["scrape_configs"]

    assert code == 0
    (target,) = job["static_configs"][0]["targets"]
    assert target in served.url
    assert Path(job["authorization"]["credentials_file"]).is_file()
    assert Path(job["tls_config"]["ca_file"]).is_file()


def test_the_command_prints_the_dashboard_and_the_rules(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As JSON, and as YAML; a run is asked for where it is needed only."""
    _, text, _ = run(capsys, "telemetry", "grafana")
    document: dict[str, Any] = json.loads(text)
    assert document["uid"] == grafana.UID
    assert yaml.safe_load(run(capsys, "telemetry", "rules")[1])
    assert run(capsys, "telemetry", "scrape")[0] == 2
    assert run(capsys, "telemetry", "rules", "lagoon")[0] == 2
