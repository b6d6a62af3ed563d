"""The money that a plan costs, by prices that the user has given.

Prices are never fetched and never guessed: without them no money is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from atoll.errors import UsageError
from atoll.plan.model import ExchangeKind, Plan, Prediction, Workload

STORE_USD = ((2, 0.05), (4, 0.07), (8, 0.08))
"""Price of 1,000 rounds of an island and fragment on S3, by the number of islands.

The upper ends of the table in docs/object-store.md; the last is for larger runs too.
"""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in USD."""

    island_hours: Mapping[str, float]
    """Of an hour of an island, by a pattern of its name."""

    up_gb: float = 0.0
    down_gb: float = 0.0

    def hour_of(self, island: str) -> float:
        """Return the price of an island's hour, by the first pattern that matches."""
        for pattern, usd in self.island_hours.items():
            if fnmatchcase(island, pattern):
                return usd
        return 0.0

    @classmethod
    def of(cls, document: Mapping[str, Any], *, source: str) -> Prices:
        """Return the prices of a file's tables `[islands]` and `[traffic]`.

        Raises:
            UsageError: a key is unknown, or a price is no number of at least 0.
        """
        unknown = document.keys() - {"islands", "traffic"}
        traffic = _table(document, "traffic", source)
        unknown |= {f"traffic.{key}" for key in traffic.keys() - {"up", "down"}}
        if unknown:
            raise UsageError(
                f"{source} has {min(unknown)}, which is no price. It may have "
                '[islands] with `"NAME*" = USD an hour` and [traffic] with `up` and '
                "`down`, USD a GB."
            )
        return cls(
            island_hours=_table(document, "islands", source),
            up_gb=traffic.get("up", 0.0),
            down_gb=traffic.get("down", 0.0),
        )


def _table(document: Mapping[str, Any], name: str, source: str) -> dict[str, float]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise UsageError(f"{source}: {name} must be a table of prices.")
    for key, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < 1e6:
            raise UsageError(
                f"{source}: {name}.{key}={value!r} must be a price of at least 0 and "
                "below a million USD."
            )
    return {str(key): float(value) for key, value in table.items()}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a run in USD, by its cause."""

    hours: float
    rounds: float
    compute_usd: float
    wait_usd: float
    traffic_usd: float
    store_usd: float
    usd_per_billion_tokens: float

    @property
    def total_usd(self) -> float:
        return self.compute_usd + self.wait_usd + self.traffic_usd + self.store_usd


def cost_of(
    workload: Workload,
    plan: Plan,
    prediction: Prediction,
    prices: Prices,
    *,
    islands: Sequence[str],
    step_tokens: float,
    end_tokens: float,
) -> Cost:
    """Return the cost of training a number of tokens with a plan.

    Args:
        workload: The model and its islands.
        plan: The settings.
        prediction: The model's result for them.
        prices: Of hours and bytes.
        islands: The names of the islands.
        step_tokens: Tokens of an island's inner step.
        end_tokens: Tokens of the whole run.
    """
    round_tokens = sum(workload.windows(plan.sync_every)) * step_tokens
    rounds = end_tokens / round_tokens
    hours = rounds * prediction.cycle_s / 3600
    compute_usd = wait_usd = 0.0
    for island, share in zip(islands, prediction.utilisations, strict=True):
        usd = hours * prices.hour_of(island)
        compute_usd += usd * share
        wait_usd += usd * (1 - share)
    traffic = (
        prediction.bytes_up * prices.up_gb + prediction.bytes_down * prices.down_gb
    )
    traffic_usd = rounds * workload.islands * traffic / 1e9
    store_usd = 0.0
    if workload.kind is ExchangeKind.STORE:
        exchanges = rounds * workload.islands * plan.num_fragments
        store_usd = exchanges / 1000 * _store_price(workload.islands)
    total = compute_usd + wait_usd + traffic_usd + store_usd
    return Cost(
        hours=hours,
        rounds=rounds,
        compute_usd=compute_usd,
        wait_usd=wait_usd,
        traffic_usd=traffic_usd,
        store_usd=store_usd,
        usd_per_billion_tokens=total / (end_tokens / 1e9),
    )


def _store_price(islands: int) -> float:
    fitting = [usd for limit, usd in STORE_USD if islands <= limit]
    return fitting[0] if fitting else STORE_USD[-1][1]
