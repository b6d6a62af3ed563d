"""Two islands, threads of one process, train one small model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

import atoll.torch
from atoll import RunSettings
from atoll.exchange import MemoryRun

SETTINGS = {"run": {"start_islands": 2, "end_rounds": 40}, "sync": {"sync_every": 10}}


def train(model: torch.nn.Module, run: MemoryRun, name: str) -> None:
    """Train until the run ends: a plain loop, and three lines more."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with atoll.torch.join(model, optimizer, run, island=name) as island:
        for inputs, targets in batches(seed=island.seed):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            island.report(tokens=len(inputs), loss=loss)
            optimizer.step()
            optimizer.zero_grad()


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random batches of sin(x) forever; each seed gives different ones."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.rand(64, 1, generator=generator) * 6 - 3
        yield inputs, inputs.sin()


def make_model() -> torch.nn.Module:
    """Return a small model with fixed initial weights."""
    torch.manual_seed(0)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(1, 32), torch.nn.Tanh(), linear(32, 1))


if __name__ == "__main__":
    run = MemoryRun(RunSettings.from_dict(SETTINGS))
    models = [make_model(), make_model()]
    with ThreadPoolExecutor() as islands:
        list(islands.map(train, models, [run, run], ["north", "south"]))
    inputs, targets = next(batches(seed=1))
    for model in models:
        print(f"loss {(model(inputs) - targets).square().mean().item():.4f}")
