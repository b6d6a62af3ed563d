"""A Grafana dashboard, and Prometheus rules, for the metrics of a run.

Both are made from tables, so that a test can compare their metrics and labels with
those that a coordinator exports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39
UID = "atoll-run"
WIDTH = 24
"""Columns of a dashboard."""

HEIGHT = 8
RUN = 'instance="$instance"'
ISLAND = f'{RUN},island=~"$island"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One picture of the dashboard."""

    title: str
    unit: str
    """By Grafana's name of it."""

    targets: Sequence[tuple[str, str]]
    """Expressions and the legend of each; `RUN` and `ISLAND` select."""

    kind: str = "timeseries"
    width: int = 8
    red_below: float | None = None
    red_above: float | None = None


def _rate(metric: str, by: str = ISLAND) -> str:
    return f"rate(atoll_{metric}{{{by}}}[5m])"


def _grown(metric: str) -> str:
    return f"increase(atoll_{metric}{{{ISLAND}}}[1h])"


def _of_run(metric: str) -> str:
    return f"atoll_{metric}{{{RUN}}}"


def _of_island(metric: str) -> str:
    return f"atoll_{metric}{{{ISLAND}}}"


BY_ISLAND, BY_FRAGMENT = "{{island}}", "fragment {{fragment}}"

ROWS: Mapping[str, Sequence[Panel]] = {
    "Now": (
        Panel(
            "State", "none", ((f"{_of_run('run_state')} == 1", "{{state}}"),), "stat", 4
        ),
        Panel(
            "Round",
            "none",
            ((_of_run("round"), "round"), (_of_run("last_round"), "last")),
            "stat",
            4,
        ),
        Panel(
            "Live islands",
            "none",
            (
                (f'atoll_islands{{{RUN},state="live"}}', "live"),
                (_of_run("quorum"), "quorum"),
            ),
            "stat",
            4,
        ),
        Panel(
            "Since the last commit",
            "s",
            ((f"time() - {_of_run('last_commit_time_seconds')}", "last commit"),),
            "stat",
            4,
            red_above=600,
        ),
        Panel(
            "Findings",
            "none",
            ((_of_run("findings"), "{{severity}}"),),
            "stat",
            4,
        ),
        Panel(
            "One anchor",
            "none",
            ((_of_run("anchor_agrees"), "agrees"), (_of_run("anchor_holders"), "hold")),
            "stat",
            4,
            red_below=1,
        ),
    ),
    "Learning": (
        Panel("Loss", "none", ((_of_island("island_loss"), BY_ISLAND),)),
        Panel("Anchor", "none", ((_of_run("anchor_metric"), "{{name}}"),)),
        Panel("Tokens a second", "none", ((_rate("tokens_total", RUN), "run"),)),
    ),
    "Time": (
        Panel(
            "Utilisation",
            "percentunit",
            (
                (_of_run("utilisation_ratio"), "run"),
                (_of_island("island_utilisation_ratio"), BY_ISLAND),
            ),
        ),
        Panel(
            "Waiting",
            "percentunit",
            ((_rate("island_wait_seconds_total"), BY_ISLAND),),
        ),
        Panel(
            "Median duration of rounds",
            "s",
            (
                (
                    "histogram_quantile(0.5, sum by (le, fragment) "
                    f"(rate(atoll_round_seconds_bucket{{{RUN}}}[10m])))",
                    BY_FRAGMENT,
                ),
            ),
        ),
    ),
    "Members": (
        Panel(
            "Live",
            "none",
            ((_of_island("island_up"), BY_ISLAND),),
            "state-timeline",
            12,
        ),
        Panel(
            "Deaths in an hour", "none", ((_grown("island_deaths_total"), BY_ISLAND),)
        ),
        Panel(
            "Work of an hour that did not count",
            "none",
            (
                (_grown("island_late_total"), f"{BY_ISLAND} late"),
                (_grown("island_refused_total"), f"{BY_ISLAND} refused"),
                (_grown("island_carried_total"), f"{BY_ISLAND} carried"),
                (_grown("island_dropped_total"), f"{BY_ISLAND} dropped"),
            ),
            width=12,
        ),
    ),
    "Network": (
        Panel("Up", "bps", ((f"8 * {_rate('island_bytes_up_total')}", BY_ISLAND),)),
        Panel("Down", "bps", ((f"8 * {_rate('island_bytes_down_total')}", BY_ISLAND),)),
        Panel(
            "Coordinator",
            "bps",
            (
                (f"8 * {_rate('bytes_in_total', RUN)}", "in"),
                (f"8 * {_rate('bytes_out_total', RUN)}", "out"),
            ),
        ),
        Panel(
            "Measured uploads",
            "Bps",
            ((_of_island("island_up_bytes_per_second"), BY_ISLAND),),
        ),
        Panel(
            "Exchange, and its part behind training",
            "s",
            (
                (_of_island("island_exchange_seconds"), BY_ISLAND),
                (_of_island("island_hidden_seconds"), f"{BY_ISLAND} hidden"),
            ),
            width=16,
        ),
    ),
    "Health": (
        Panel("Damage", "none", ((_of_run("damage"), "parts"),), "stat", red_above=1),
        Panel("Free disk", "bytes", ((_of_run("disk_free_bytes"), "free"),)),
        Panel(
            "Dropped events",
            "none",
            ((f"increase({_of_run('events_dropped_total')}[1h])", "{{sink}}"),),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard, for Grafana's import or its provisioning."""
    panels: list[dict[str, Any]] = []
    top = 0
    for heading, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": heading,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
            }
        )
        top += 1
        column = 0
        for panel in row:
            if column + panel.width > WIDTH:
                column, top = 0, top + HEIGHT
            panels.append(_panel(panel, len(panels) + 1, column, top))
            column += panel.width
        top += HEIGHT
    return {
        "uid": UID,
        "title": "Atoll run",
        "tags": ["atoll"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables())},
        "annotations": {"list": list(_annotations())},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, column: int, top: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    if panel.red_below is not None:
        steps = [
            {"color": "red", "value": None},
            {"color": "green", "value": panel.red_below},
        ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": column, "y": top},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for index, (expression, legend) in enumerate(panel.targets)
        ],
    }


def _variables() -> Iterator[dict[str, Any]]:
    # A variable, not `__inputs`: those break provisioning.
    yield {"name": "datasource", "type": "datasource", "query": "prometheus"}
    queries = {
        "run": "label_values(atoll_run_info, name)",
        "instance": 'label_values(atoll_run_info{name="$run"}, instance)',
        "island": 'label_values(atoll_island_up{instance="$instance"}, island)',
    }
    for name, query in queries.items():
        yield {
            "name": name,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "hide": 2 if name == "instance" else 0,
            "multi": name == "island",
            "includeAll": name == "island",
        }


def _annotations() -> Iterator[dict[str, Any]]:
    changes = {"Settings": "epoch", "Coordinator started": "start_time_seconds"}
    for name, metric in changes.items():
        yield {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "expr": f"changes({_of_run(metric)}[1m]) > 0",
            "iconColor": "purple",
        }


@dataclass(frozen=True)
class Rule:
    """One alert."""

    name: str
    expression: str
    duration: str
    """How long the expression must hold."""

    severity: str
    summary: str
    description: str


RULES: Sequence[Rule] = (
    Rule(
        "AtollDown",
        'up{job="atoll"} == 0',
        "5m",
        "bad",
        "The coordinator does not answer",
        "Islands train on alone, and retry. Start it again: atoll serve --dir DIR.",
    ),
    Rule(
        "AtollNoProgress",
        "time() - atoll_last_commit_time_seconds > 1800 and on (instance) "
        'atoll_run_state{state="training"} == 1',
        "0m",
        "bad",
        "No round was committed for half an hour",
        "atoll status names the islands that are awaited, and since when.",
    ),
    Rule(
        "AtollQuorumLost",
        'atoll_islands{state="live"} < on (instance) atoll_quorum and on (instance) '
        'atoll_run_state{state="training"} == 1',
        "10m",
        "bad",
        "Fewer islands are live than the quorum",
        "Start islands again, or lower run.quorum: atoll control RUN set run.quorum=N.",
    ),
    Rule(
        "AtollIslandSilent",
        'atoll_islands{state="silent"} > 0',
        "15m",
        "warn",
        "An island is silent",
        "The others continue without it. atoll status names it.",
    ),
    Rule(
        "AtollFlapping",
        "increase(atoll_island_deaths_total[30m]) >= 3",
        "0m",
        "warn",
        "{{ $labels.island }} died three times in half an hour",
        "Read its log: atoll logs RUN {{ $labels.island }}.",
    ),
    Rule(
        "AtollWaiting",
        "atoll_utilisation_ratio < 0.67",
        "30m",
        "warn",
        "Islands wait for more than a third of their time",
        "atoll plan RUN lists settings that would help.",
    ),
    Rule(
        "AtollRefused",
        "increase(atoll_island_refused_total[10m]) > 0",
        "0m",
        "warn",
        "An update of {{ $labels.island }} was refused",
        "atoll events RUN has the reason.",
    ),
    Rule(
        "AtollLossNotFinite",
        "atoll_island_loss_finite == 0",
        "1m",
        "bad",
        "The loss of {{ $labels.island }} is not a number",
        "Its updates are refused. atoll control RUN evict {{ $labels.island }}.",
    ),
    Rule(
        "AtollWorkDropped",
        "increase(atoll_island_dropped_steps_total[1h]) > 0",
        "0m",
        "bad",
        "{{ $labels.island }} dropped inner steps",
        "It was late for more rounds than work is carried for.",
    ),
    Rule(
        "AtollAnchorsApart",
        "atoll_anchor_agrees == 0",
        "0m",
        "bad",
        "Islands hold different anchors of one round",
        "This has never been seen. Report it, with the output of atoll inspect.",
    ),
    Rule(
        "AtollDamage",
        "atoll_damage > 0",
        "0m",
        "bad",
        "The journal has damaged parts",
        "atoll status names the files.",
    ),
    Rule(
        "AtollDiskLow",
        "atoll_disk_free_bytes < 5e9",
        "5m",
        "warn",
        "The disk of the journal has less than 5 GB free",
        "Free room before it is full: rounds stop when it is.",
    ),
)


def rules() -> str:
    """Return the alert rules, as the YAML file that Prometheus reads."""
    lines = ["groups:", "  - name: atoll", "    rules:"]
    for rule in RULES:
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {json.dumps(rule.expression)}",
            f"        for: {rule.duration}",
            "        labels:",
            f"          severity: {rule.severity}",
            "        annotations:",
            f"          summary: {json.dumps(rule.summary)}",
            f"          description: {json.dumps(rule.description)}",
        ]
    return "\n".join(lines) + "\n"


def scrape(*, address: str, has_tls: bool, token_file: str, ca_file: str) -> str:
    """Return the scrape configuration for one coordinator."""
    lines = [
        "scrape_configs:",
        "  - job_name: atoll",
        f"    scheme: {'https' if has_tls else 'http'}",
        "    authorization:",
        f"      credentials_file: {json.dumps(token_file)}",
    ]
    if has_tls:
        lines += ["    tls_config:", f"      ca_file: {json.dumps(ca_file)}"]
    lines += ["    static_configs:", f"      - targets: [{json.dumps(address)}]"]
    return "\n".join(lines) + "\n"
