"""A loop over rows that a run in a bucket deals out needs no change."""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll
import atoll.torch
from atoll import RunSettings
from atoll.errors import UsageError
from atoll.run_client.store import StoreRunClient
from atoll.torch import shard
from tests.torch.runs import Weights, sgd, together, train

pytestmark = pytest.mark.torch

ROWS = 60


def bucket(folder: Path, islands: int) -> str:
    url = str(folder / "bucket")
    settings = RunSettings.from_dict(
        {
            "run": {"start_islands": islands},
            "sync": {"sync_every": 3},
            "data": {"order": "run", "unit_rows": 4, "shuffle": False},
        }
    )
    atoll.init(url, settings)
    return url


def train_on(url: str, name: str) -> list[int]:
    model = Weights(1.0)
    optimizer = sgd(model, lr=0.1)
    seen: list[int] = []
    with atoll.torch.join(model, optimizer, url, island=name) as island:
        for row in shard(list(range(ROWS)), island):
            seen.append(int(row))
            train(model, optimizer)
    return seen


def test_two_islands_train_on_each_row_once(tmp_path: Path) -> None:
    """And the run ends with its data."""
    url = bucket(tmp_path, 2)

    seen = together(lambda: train_on(url, "a"), lambda: train_on(url, "b"))

    assert sorted(seen[0] + seen[1]) == list(range(ROWS))
    client = StoreRunClient(url)
    data = client.status().document["data"]
    client.close()
    assert (data["trained"], data["free"]) == (ROWS, 0)


def test_another_dataset_is_refused(tmp_path: Path) -> None:
    """The message of the run reaches the loop."""
    url = bucket(tmp_path, 1)
    model = Weights(1.0)
    with atoll.torch.join(model, sgd(model), url, island="a") as island:
        shard(list(range(ROWS)), island)
    with (
        atoll.torch.join(model, sgd(model), url, island="b") as island,
        pytest.raises(UsageError, match="has 61 rows, and the run's has 60"),
    ):
        shard(list(range(ROWS + 1)), island)
