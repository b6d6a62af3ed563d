"""A small network, its data, and runs that train it."""

from __future__ import annotations

import copy
from functools import partial

import torch

import atoll.torch
from atoll.exchange import MemoryRun
from tests.torch.runs import bits, run_of, state_of, together


def networks(count: int) -> list[torch.nn.Module]:
    """Return equal networks; threads would disturb each other's random numbers."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)
    )
    return [copy.deepcopy(first) for _ in range(count)]


def fit(run: MemoryRun, name: str, model: torch.nn.Module, *, seed: int) -> None:
    """Train on the data of a seed with AdamW, until the run ends."""
    data = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with atoll.torch.join(model, optimizer, run, island=name):
        while True:
            inputs = torch.randn(4, 3, generator=data)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def streamed(**sync: object) -> tuple[bytes, list[bytes]]:
    """Return anchor and velocity of two islands' run, and their local weights."""
    run = run_of(
        2,
        every=3,
        sync=sync,
        run={"end_rounds": 3},
        outer={"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5},
    )
    models = networks(2)
    together(
        partial(fit, run, "a", models[0], seed=1),
        partial(fit, run, "b", models[1], seed=2),
    )
    parts = [state_of(run, f) for f in range(run.settings.sync.num_fragments)]
    local = [b"".join(bits(p) for p in model.parameters()) for model in models]
    return b"".join(bits(s.anchor) + bits(s.moments[0]) for s in parts), local
