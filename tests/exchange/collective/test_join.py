"""`atoll.torch.join` takes a `CollectiveRun`, and a plain loop is a rank of it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import atoll.torch
from atoll.exchange import CollectiveRun
from atoll.settings import RunSettings
from tests.coordinator.serving import serving
from tests.exchange.collective.gloo_ranks import Given, Say, start


def a_plain_loop(given: Given, run: CollectiveRun, say: Say) -> None:
    """Train a small model until the run ends, and tell where it ends."""
    os.environ["ATOLL_TOKEN_FILE"] = str(given.token)
    os.environ["XDG_CONFIG_HOME"] = str(given.meeting.parent)
    torch.manual_seed(given.rank)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    island = atoll.torch.join(model, optimizer, run, island=f"i{given.rank}")
    with island:
        for _ in range(1000):
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            island.report(tokens=16, loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    say(("digests", island.digest, island.metrics()["atoll/collective_bytes_up"]))


def test_a_plain_loop_is_a_rank_of_a_collective(tmp_path: Path) -> None:
    """Two processes end with one anchor, and moved their updates between them."""
    settings = RunSettings.from_dict(
        {"run": {"start_islands": 2, "end_rounds": 3}, "sync": {"sync_every": 5}}
    )
    with serving(tmp_path / "run", settings) as coordinator:
        ranks = start(2, tmp_path, coordinator, silence_s=15.0, live=a_plain_loop)
        found = [rank.until("digests") for rank in ranks]

    assert found[0][1] == found[1][1]
    assert all(each[2] > 0 for each in found)
