"""A plan as text for a terminal, and as the document of `--json`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from atoll.plan import literature
from atoll.plan.cost import Cost
from atoll.plan.model import (
    DAY_S,
    ExchangeKind,
    IslandLink,
    Plan,
    Prediction,
    Workload,
    data_parallel,
)
from atoll.plan.search import GRID_RATES, Advice, grid, marked, reasons
from atoll.plan.timeline import Interval, judge, walk
from atoll.telemetry.text import Cell, format_count, format_size, format_span, table

LANE_CELLS = 60
LEVELS = "▁▂▃▄▅▆▇█"
MARK = "←"
WIDTH = 120
NOT_MODELLED = (
    "Not modelled: loss of packets, busy hours of the link, islands that come and go."
)


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """The inputs and results of a plan."""

    workload: Workload
    link: IslandLink
    target: float
    rows: Sequence[Advice]
    judged: tuple[str, Plan] | None = None
    """A run file's name and its plan."""

    costs: Sequence[Cost | None] = ()
    """By row; empty without prices."""

    @property
    def best(self) -> Advice | None:
        return marked(self.rows)

    @property
    def drawn(self) -> Plan:
        """The plan of the pictures."""
        if self.best is not None:
            return self.best.plan
        return max(self.rows, key=lambda row: row.prediction.utilisation).plan

    def document(self) -> dict[str, Any]:
        """Return the inputs and all results as plain values."""
        workload, link, best = self.workload, self.link, self.best
        chosen = best.advised if best else self.drawn
        return {
            "inputs": {
                "parameters": workload.parameters,
                "islands": workload.islands,
                "steps_s": list(workload.steps_s),
                "exchange": workload.kind.value,
                "target": self.target,
                "link": {key: _plain(value) for key, value in asdict(link).items()},
            },
            "judged": self.judged and _judged_row(workload, link, self.judged),
            "rows": [_row(self, index) for index in range(len(self.rows))],
            "data_parallel": {"utilisation": data_parallel(workload, link)},
            "reasons": reasons(workload, link, self.rows),
            "grid": {
                "link_factors": list(GRID_RATES),
                "rows": [
                    {"sync_every": sync_every, "utilisation": shares}
                    for sync_every, shares in grid(workload, link, self.drawn)
                ],
            },
            "published": published(self),
            "toml": chosen.toml(),
        }

    def lines(self) -> list[str]:
        """Return the text."""
        lines = [_heading(self), "", *_table(self), ""]
        lines += reasons(self.workload, self.link, self.rows)
        lines += _unequal(self)
        if self.best is not None:
            lines.append(
                f"{self.best.plan.wire} is marked: it moves the fewest bytes at the "
                "smallest sync_every that keeps devices busy."
            )
        lines += ["", *_lanes(self), "", *_grid_lines(self)]
        lines += ["", *_cost_lines(self)] if self.costs else []
        lines += ["", *_published_lines(self), NOT_MODELLED]
        chosen = self.best.advised if self.best else self.drawn
        return [*lines, "", *chosen.toml().splitlines()]


def _plain(value: float) -> float | None:
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _judged_row(
    workload: Workload, link: IslandLink, judged: tuple[str, Plan]
) -> dict[str, Any]:
    name, plan = judged
    return {"file": name, **_plan_fields(plan, judge(workload, link, plan))}


def _plan_fields(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    return {
        "up": plan.up,
        "down": plan.down,
        "sync_every": plan.sync_every,
        "num_fragments": plan.num_fragments,
        "overlap_steps": plan.overlap_steps,
        "utilisation": prediction.utilisation,
        "utilisations": list(prediction.utilisations),
        "round_s": prediction.cycle_s,
        "wait_s": prediction.stall_s,
        "bytes_up": prediction.bytes_up,
        "bytes_down": prediction.bytes_down,
    }


def _row(report: PlanReport, index: int) -> dict[str, Any]:
    row = report.rows[index]
    cost = report.costs[index] if report.costs else None
    return {
        **_plan_fields(row.plan, row.prediction),
        "advised_overlap_steps": row.advised_overlap,
        "reaches_target": row.reaches_target,
        "is_marked": row is report.best,
        "cost": None if cost is None else {**asdict(cost), "total_usd": cost.total_usd},
    }


def published(report: PlanReport) -> list[str]:
    """Return the published losses beside the plan, as sentences."""
    plan = report.best.advised if report.best else report.drawn
    return literature.published_losses(
        islands=report.workload.islands,
        sync_every=plan.sync_every,
        overlap_steps=plan.overlap_steps,
    )


def _heading(report: PlanReport) -> str:
    workload, link = report.workload, report.link
    rate = f"{rate_text(link.up_bits_per_s)} each way"
    if link.up_bits_per_s != link.down_bits_per_s:
        up, down = rate_text(link.up_bits_per_s), rate_text(link.down_bits_per_s)
        rate = f"{up} up and {down} down"
    if link.is_shared:
        rate += " on one medium"
    steps = " and ".join(
        [
            ", ".join(f"{s:g}" for s in workload.steps_s[:-1]),
            f"{workload.steps_s[-1]:g}",
        ]
        if len(set(workload.steps_s)) > 1
        else [f"{workload.slowest_s:g}"]
    )
    through = {
        ExchangeKind.COORDINATOR: "",
        ExchangeKind.STORE: f", a bucket with requests of {link.request_s * 1e3:g} ms",
        ExchangeKind.COLLECTIVE: ", a collective",
    }[workload.kind]
    return (
        f"{_billions(workload.parameters)} parameters, {workload.islands} islands, "
        f"{rate}, {link.delay_s * 1e3:g} ms{through}, steps of {steps} s; "
        f"target {100 * report.target:g} %"
    )


def _billions(parameters: int) -> str:
    """Return a number of parameters, in billions where others count in G."""
    return format_count(parameters).replace("G", "B")


def rate_text(bits_per_s: float) -> str:
    """Return a rate in bits.

    >>> rate_text(1e8), rate_text(2.5e9)
    ('100 Mbit/s', '2.5 Gbit/s')
    """
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:g} {unit}"
    return f"{bits_per_s / 1e3:g} kbit/s"


def percent(share: float) -> str:
    """Return a share with one decimal, without one if it is whole.

    >>> percent(0.9932), percent(0.99999)
    ('99.3 %', '100 %')
    """
    text = f"{100 * share:.1f}"
    return "100 %" if text == "100.0" else f"{text} %"


HEAD = ("wire", "", "sync_every", "fragments", "overlap", "busy", "up/down a round")
LAST_HEADS = ("per island and day", "round lasts")


def _table(report: PlanReport) -> list[str]:
    rows = [[*HEAD, *LAST_HEADS]]
    if report.judged is not None:
        name, plan = report.judged
        prediction = judge(report.workload, report.link, plan)
        rows.append(_cells(plan, prediction, str(plan.overlap_steps), name))
    for advice in report.rows:
        overlap = f"{advice.plan.overlap_steps} ({advice.advised_overlap})"
        mark = "" if advice.reaches_target else "too slow"
        mark = MARK if advice is report.best else mark
        rows.append(_cells(advice.plan, advice.prediction, overlap, mark))
    parallel = percent(data_parallel(report.workload, report.link))
    rows.append(["data parallel", "", "1", "", "", parallel, "bf16 gradients", "", ""])
    cells = [[Cell(text) for text in row] for row in rows]
    grid_rows = table(cells, left_columns=2, min_width=4, width=WIDTH)
    return ["  ".join(cell.text for cell in row).rstrip() for row in grid_rows]


def _cells(plan: Plan, prediction: Prediction, overlap: str, mark: str) -> list[str]:
    rounds = DAY_S / prediction.cycle_s
    up, down = prediction.bytes_up, prediction.bytes_down
    return [
        plan.wire,
        mark,
        str(plan.sync_every),
        str(plan.num_fragments),
        overlap,
        percent(prediction.utilisation),
        f"{format_size(up)} / {format_size(down)}",
        f"{format_size(up * rounds)} / {format_size(down * rounds)}",
        format_span(prediction.cycle_s),
    ]


def _unequal(report: PlanReport) -> list[str]:
    """Return sentences about islands of several paces."""
    workload = report.workload
    if len(set(workload.steps_s)) == 1:
        return []
    prediction = judge(workload, report.link, report.drawn)
    shares = ", ".join(
        f"{step_s:g} s: {percent(share)}"
        for step_s, share in zip(workload.steps_s, prediction.utilisations, strict=True)
    )
    lines = [f"Busy by an island's step, since rounds wait for the slowest: {shares}."]
    if not workload.is_dynamic:
        dynamic = judge(replace(workload, is_dynamic=True), report.link, report.drawn)
        after, before = min(dynamic.utilisations), min(prediction.utilisations)
        if after > before:
            lines.append(
                "With sync.dynamic_local_updates=true slower islands make shorter "
                f"windows, and the least busy island is at {percent(after)} instead of "
                f"{percent(before)}."
            )
    return lines


def _lanes(report: PlanReport) -> list[str]:
    plan = report.drawn
    timeline = walk(report.workload, report.link, plan)
    round_s, waited_s = timeline.round_s, sum(_length(w) for w in timeline.waits)
    waits = shares_of(timeline.waits, round_s)
    compute = [1 - share for share in waits]
    up, down = (shares_of(lane, round_s) for lane in (timeline.up, timeline.down))
    return [
        f"one round of {plan.wire}, overlap {plan.overlap_steps}",
        f"compute  {_bar(compute)}  {format_span(round_s - waited_s)}",
        f"up       {_bar(up)}  {percent(sum(up) / LANE_CELLS)}",
        f"down     {_bar(down)}  {percent(sum(down) / LANE_CELLS)}",
        f"waits    {_bar(waits)}  {format_span(waited_s)}",
    ]


def shares_of(spans: Sequence[Interval], round_s: float) -> list[float]:
    """Return the share of each cell of a lane that spans fill."""
    cell_s = round_s / LANE_CELLS
    shares = [0.0] * LANE_CELLS
    for span in spans:
        first = int(span.start_s / cell_s)
        last = min(LANE_CELLS - 1, int(span.end_s / cell_s))
        for index in range(first, last + 1):
            start_s, end_s = index * cell_s, (index + 1) * cell_s
            covered_s = min(span.end_s, end_s) - max(span.start_s, start_s)
            shares[index] += max(0.0, covered_s) / cell_s
    return shares


def _length(span: Interval) -> float:
    return span.end_s - span.start_s


def _bar(shares: Sequence[float]) -> str:
    """Return one character per share; an empty cell is a space."""
    return "".join(
        " " if share < 0.01 else LEVELS[min(7, int(share * 8))] for share in shares
    )


def _grid_lines(report: PlanReport) -> list[str]:
    plan, link = report.drawn, report.link
    rates = [_short_rate(link.scaled(factor)) for factor in GRID_RATES]
    lines = [
        f"busy %, by sync_every and link ({plan.wire}, {plan.num_fragments} fragments, "
        "overlap up to a quarter of a round)",
        " " * 12 + "".join(f"{rate:>12}" for rate in rates),
    ]
    for sync_every, shares in grid(report.workload, link, plan):
        cells = "".join(f"{100 * share:>12.0f}" for share in shares)
        lines.append(f"{sync_every:>12}{cells}")
    return lines


def _short_rate(link: IslandLink) -> str:
    return rate_text(min(link.up_bits_per_s, link.down_bits_per_s))


def _cost_lines(report: PlanReport) -> list[str]:
    rows = [["cost in USD", "computing", "waiting", "traffic", "store", "in all"]]
    rows[0].append("a billion tokens")
    for row, cost in zip(report.rows, report.costs, strict=True):
        if cost is None:
            continue
        parts = (cost.compute_usd, cost.wait_usd, cost.traffic_usd, cost.store_usd)
        amounts = (*parts, cost.total_usd, cost.usd_per_billion_tokens)
        rows.append([row.plan.wire, *(f"{usd:,.2f}" for usd in amounts)])
    cells = [[Cell(text) for text in row] for row in rows]
    grid_rows = table(cells, left_columns=1, min_width=4, width=WIDTH)
    return ["  ".join(cell.text for cell in row).rstrip() for row in grid_rows]


def _published_lines(report: PlanReport) -> list[str]:
    return [
        "Possible cost in loss (published for other models and data; not a forecast)",
        *(f"  {line}" for line in published(report)),
    ]
