"""Owns the bandwidth model: how busy devices are on a link, and which settings help.

Does not know loss, and never forecasts it; has no clock, file or network.
Start reading at `model`, then `search` and `page`.
"""

from atoll.plan.comparison import Comparison, MeasuredRun, compare
from atoll.plan.cost import Cost, Prices, cost_of
from atoll.plan.literature import table_4_lines
from atoll.plan.model import (
    ExchangeKind,
    IslandLink,
    Plan,
    Prediction,
    Workload,
    data_parallel,
    predict,
)
from atoll.plan.page import PlanReport
from atoll.plan.search import Advice, advise, marked
from atoll.plan.timeline import Timeline, judge, walk

__all__ = [
    "Advice",
    "Comparison",
    "Cost",
    "ExchangeKind",
    "IslandLink",
    "MeasuredRun",
    "Plan",
    "PlanReport",
    "Prediction",
    "Prices",
    "Timeline",
    "Workload",
    "advise",
    "compare",
    "cost_of",
    "data_parallel",
    "judge",
    "marked",
    "predict",
    "table_4_lines",
    "walk",
]
