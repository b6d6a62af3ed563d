"""Money is a sum over hours and bytes, with the user's prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import UsageError
from atoll.plan import (
    ExchangeKind,
    IslandLink,
    Plan,
    Prices,
    Workload,
    cost_of,
    predict,
)

WORKLOAD = Workload(parameters=10**6, steps_s=(1.0, 2.0), host_s=0.0)
LINK = IslandLink(up_bits_per_s=1e12, down_bits_per_s=1e12, delay_s=0.0)
PLAN = Plan(up="bf16", down="fp32", sync_every=100, overlap_steps=1)
PRICES = Prices(island_hours={"fast*": 3.6, "*": 1.8}, up_gb=0.5, down_gb=0.25)


def test_a_cost_by_hand() -> None:
    """A round of 200 s, 20,000 tokens, 2 MB up and 4 MB down for each island."""
    cost = cost_of(
        WORKLOAD,
        PLAN,
        predict(WORKLOAD, LINK, PLAN),
        PRICES,
        islands=["fast-1", "slow-1"],
        step_tokens=100,
        end_tokens=2_000_000,
    )

    # 100 rounds are 20,000 s: 20 USD for the fast island, half of it waiting, and 10
    # for the slow one. 2 islands x 100 rounds x (2 MB x 0.5 + 4 MB x 0.25) / 1e9.
    assert cost.rounds == pytest.approx(100)
    assert cost.compute_usd == pytest.approx(20)
    assert cost.wait_usd == pytest.approx(10)
    assert cost.traffic_usd == pytest.approx(0.4)
    assert cost.store_usd == 0
    assert cost.total_usd == pytest.approx(30.4)
    assert cost.usd_per_billion_tokens == pytest.approx(15_200)


@pytest.mark.parametrize(("islands", "usd"), [(2, 0.05), (4, 0.07), (20, 0.08)])
def test_a_bucket_costs_requests(islands: int, usd: float) -> None:
    """By 1,000 rounds of an island and a fragment, as docs/object-store.md lists."""
    workload = replace(WORKLOAD, steps_s=(1.0,) * islands, kind=ExchangeKind.STORE)
    cost = cost_of(
        workload,
        PLAN,
        predict(workload, LINK, PLAN),
        Prices(island_hours={}),
        islands=["i"] * islands,
        step_tokens=1,
        end_tokens=1000 * islands * 100,
    )

    assert cost.total_usd == pytest.approx(usd * islands)


def test_prices_of_a_file() -> None:
    """The first pattern that matches an island's name decides."""
    document = {"islands": {"tokyo-*": 2.49, "*": 1}, "traffic": {"up": 0.09}}
    prices = Prices.of(document, source="prices.toml")

    assert prices.hour_of("tokyo-1") == 2.49
    assert prices.hour_of("oslo-1") == 1
    assert (prices.up_gb, prices.down_gb) == (0.09, 0)
    assert Prices(island_hours={}).hour_of("oslo-1") == 0


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"island": {}}, "prices.toml has island, which is no price"),
        ({"traffic": {"uo": 1}}, "has traffic.uo"),
        ({"islands": {"*": -1}}, r"islands.\*=-1 must be a price"),
        ({"islands": {"*": True}}, "must be a price"),
        ({"islands": {"*": "2"}}, "must be a price"),
        ({"islands": 3}, "islands must be a table"),
    ],
)
def test_wrong_prices_are_refused(document: dict[str, object], message: str) -> None:
    """The message names the file and the key."""
    with pytest.raises(UsageError, match=message):
        Prices.of(document, source="prices.toml")
