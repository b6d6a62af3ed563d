"""A run's measured values beside the model, and the effect of other settings.

Where the two differ by more than five points the model does not know what slows the run
down, and there is no advice.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atoll.errors import UsageError
from atoll.plan.model import ExchangeKind, IslandLink, Plan, Prediction, Workload
from atoll.plan.page import percent
from atoll.plan.timeline import judge
from atoll.settings import RunSettings
from atoll.telemetry.text import format_span, printable

AGREEMENT = 0.05
"""Difference of utilisation beyond which there is no advice."""

MIN_GAIN = 0.005
MAX_ROUNDS = 80
"""Rows of the history: the last rounds of all fragments."""

UNEQUAL = 1.2
"""Pace of the slowest island to the median beyond which a run without it is shown."""

Document = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The values of a run that the model needs, and its measured utilisation."""

    name: str
    islands: tuple[str, ...]
    workload: Workload
    plan: Plan
    utilisation: float
    patience: float
    spread_s: float | None
    """Median time between the first and the last update of a round."""

    first_round: int | None = None
    last_round: int | None = None

    @classmethod
    def of(
        cls,
        status: Document,
        settings: RunSettings,
        *,
        kind: ExchangeKind,
        history: Document | None = None,
        parameters: int | None = None,
    ) -> MeasuredRun:
        """Return the measured values of a status document.

        Args:
            status: The document of `GET /status`.
            settings: The settings in force.
            kind: The exchange of the run.
            history: Its past: rounds with arrivals, and curves of seconds.
            parameters: Of the model, if the status cannot tell.

        Raises:
            UsageError: the run has not reported enough yet.
        """
        plan = Plan.of(settings)
        history = history or {}
        rounds = history.get("rounds", ())[-MAX_ROUNDS:]
        paces = _paces_s(status, history)
        rows = [
            row
            for row in status["islands"]
            if row["island"] in paces and row.get("utilisation") is not None
        ]
        if not rows:
            raise UsageError(
                "No island of the run has reported its pace and its waits yet. Repeat "
                "this after some rounds, or give --params, --link, --delay and --step."
            )
        numbers = [row["round"] for row in rounds]
        recent = status.get("recent") or ()
        if parameters is None:
            parameters = _parameters(recent, plan, len(rows))
        return cls(
            name=str(status["name"]),
            islands=tuple(str(row["island"]) for row in rows),
            workload=Workload(
                parameters=parameters,
                steps_s=tuple(paces[row["island"]] for row in rows),
                max_fragments=plan.num_fragments,
                is_dynamic=settings.sync.dynamic_local_updates,
                kind=kind,
            ),
            plan=plan,
            utilisation=statistics.fmean(row["utilisation"] for row in rows),
            patience=settings.run.patience,
            spread_s=_spread_s(rounds),
            first_round=min(numbers, default=None),
            last_round=max(numbers, default=None),
        )


def _paces_s(status: Document, history: Document) -> dict[str, float]:
    """Return the seconds of an inner step of each island.

    An ended run has no pace in its status; its history has the seconds, the waits and
    the inner steps of each island.
    """
    paces = {
        str(row["island"]): float(row["step_s"])
        for row in status["islands"]
        if row.get("step_s")
    }
    curves = history.get("curves", {}).get("islands", {})
    for island, columns in curves.items():
        last = [_last(columns[name]) for name in ("seconds", "wait_s", "inner_steps")]
        if island not in paces and None not in last:
            seconds, wait_s, inner_steps = map(float, last)
            if inner_steps and seconds > wait_s:
                paces[island] = (seconds - wait_s) / inner_steps
    return paces


def _last(column: Sequence[float | None]) -> Any:
    return next((value for value in reversed(column) if value is not None), None)


def _parameters(recent: Sequence[Document], plan: Plan, islands: int) -> int:
    """Return the values of the model, by the size of each fragment's last outcome."""
    sizes = {row["fragment"]: int(row["bytes"]) for row in recent if row.get("bytes")}
    if len(sizes) < plan.num_fragments:
        raise UsageError(
            f"The status has outcomes of {len(sizes)} of {plan.num_fragments} "
            "fragments, so that the size of the model is not known. Give --params."
        )
    _, down_bits = plan.bits(islands)
    return max(1, round(sum(sizes.values()) * 8 / down_bits))


def _spread_s(rounds: Sequence[Document]) -> float | None:
    spreads = [
        max(arrivals) - min(arrivals)
        for row in rounds
        if len(arrivals := _known(row.get("arrivals") or {})) > 1
    ]
    return statistics.median(spreads) if spreads else None


def _known(arrivals: Document) -> list[float]:
    return [float(late_s) for late_s in arrivals.values() if late_s is not None]


@dataclass(frozen=True)
class WhatIf:
    """A change of a run, and its effect."""

    change: str
    utilisation: float | None
    """None: the model does not know."""

    remark: str


@dataclass(frozen=True)
class Comparison:
    """A run beside the model."""

    run: MeasuredRun
    prediction: Prediction
    what_ifs: Sequence[WhatIf]
    """Empty if the model and the run differ by more than `AGREEMENT`."""

    @property
    def modelled(self) -> float:
        return statistics.fmean(self.prediction.utilisations)

    @property
    def is_explained(self) -> bool:
        return abs(self.run.utilisation - self.modelled) <= AGREEMENT

    def document(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {
            "run": self.run.name,
            "measured": self.run.utilisation,
            "modelled": self.modelled,
            "agrees": self.is_explained,
            "parameters": self.run.workload.parameters,
            "islands": dict(
                zip(self.run.islands, self.run.workload.steps_s, strict=True)
            ),
            "unexplained": None if self.is_explained else _unexplained(self),
            "what_ifs": [
                {
                    "change": row.change,
                    "utilisation": row.utilisation,
                    "remark": row.remark,
                }
                for row in self.what_ifs
            ],
        }

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        run = self.run
        span = ""
        if run.first_round is not None:
            span = f", measured over rounds {run.first_round} to {run.last_round}"
        apart = 100 * abs(run.utilisation - self.modelled)
        lines = [
            printable(f"{run.name}{span}"),
            f"busy      {percent(run.utilisation)} measured, "
            f"{percent(self.modelled)} by the model: {apart:.1f} points apart",
        ]
        if not self.is_explained:
            return [*lines, _unexplained(self)]
        if not self.what_ifs:
            return [*lines, "No change of these settings would gain half a point."]
        wide = max(len(row.change) for row in self.what_ifs)
        for index, row in enumerate(self.what_ifs):
            label = "what if" if index == 0 else ""
            share = "" if row.utilisation is None else percent(row.utilisation)
            change = printable(row.change).ljust(wide)
            lines.append(f"{label:<9} {change}  {share:>7}  {row.remark}")
        return lines


def compare(run: MeasuredRun, link: IslandLink) -> Comparison:
    """Return a run beside the model, with other settings if they agree."""
    prediction = judge(run.workload, link, run.plan)
    comparison = Comparison(run, prediction, ())
    if not comparison.is_explained:
        return comparison
    return replace(comparison, what_ifs=_what_ifs(run, link, comparison.modelled))


def _what_ifs(run: MeasuredRun, link: IslandLink, present: float) -> list[WhatIf]:
    rows = []
    for change, plan in _other_plans(run.plan):
        share = statistics.fmean(judge(run.workload, link, plan).utilisations)
        if share >= present + MIN_GAIN:
            rows.append(WhatIf(change, share, "next run (settings of a run stay)"))
    rows += _without_slowest(run, link)
    if rows and run.spread_s:
        change = f"run.patience {run.patience:g} → {max(1.0, run.patience - 1):g}"
        rows.append(
            WhatIf(change, None, "changes waits, which the model does not know")
        )
    return rows


def _other_plans(plan: Plan) -> list[tuple[str, Plan]]:
    plans = []
    overlap = max(1, 2 * plan.overlap_steps)
    if overlap < plan.sync_every:
        change = f"sync.overlap_steps {plan.overlap_steps} → {overlap}"
        plans.append((change, replace(plan, overlap_steps=overlap)))
    for direction, other in (("down", "int8"), ("up", "e3m0")):
        codec = getattr(plan, direction)
        if codec in ("fp32", "bf16", "bf16-stochastic"):
            change = f"wire.{direction} {codec} → {other}"
            plans.append((change, _with_codec(plan, direction, other)))
    change = f"sync.sync_every {plan.sync_every} → {2 * plan.sync_every}"
    plans.append((change, replace(plan, sync_every=2 * plan.sync_every)))
    return plans


def _with_codec(plan: Plan, direction: str, codec: str) -> Plan:
    return replace(plan, down=codec) if direction == "down" else replace(plan, up=codec)


def _without_slowest(run: MeasuredRun, link: IslandLink) -> list[WhatIf]:
    steps_s = run.workload.steps_s
    if len(steps_s) < 2 or run.workload.is_dynamic:
        return []
    slowest = max(range(len(steps_s)), key=steps_s.__getitem__)
    others = (*steps_s[:slowest], *steps_s[slowest + 1 :])
    if steps_s[slowest] < UNEQUAL * statistics.median(others):
        return []
    workload = replace(run.workload, steps_s=others)
    share = statistics.fmean(judge(workload, link, run.plan).utilisations)
    name = run.islands[slowest]
    pace = f"step {steps_s[slowest]:.2g} s, others {statistics.median(others):.2g}"
    dynamic = replace(run.workload, is_dynamic=True)
    windows = statistics.fmean(judge(dynamic, link, run.plan).utilisations)
    return [
        WhatIf(f"without {name} ({pace})", share, "its tokens are lost"),
        WhatIf("sync.dynamic_local_updates = true", windows, "next run"),
    ]


def _unexplained(comparison: Comparison) -> str:
    """Return the largest part of the waits that the model does not have."""
    run = comparison.run
    compute_s = run.plan.sync_every * statistics.fmean(run.workload.steps_s)
    measured_s = compute_s / max(run.utilisation, 1e-3)
    extra_s = measured_s - compute_s / comparison.modelled
    text = "That is more than 5 points, so there is no advice: something else decides. "
    if extra_s < 0:
        return text + (
            "The run waits less than the model expects: the given link is slower than "
            "the real one."
        )
    text += f"About {format_span(extra_s)} of a round are not explained. "
    if run.spread_s is not None and run.spread_s >= extra_s / 2:
        return text + (
            f"The updates of a round arrive within {format_span(run.spread_s)}: "
            "islands wait for late ones."
        )
    return text + (
        "Updates arrive close together, so the link is slower than given, or the "
        "coordinator's machine is busy: `atoll doctor RUN` measures the link from here."
    )
