"""One island of a run with a coordinator: `atoll join RUN -- island.py`."""

from collections.abc import Iterator

import torch

import atoll.torch


def train(model: torch.nn.Module) -> None:
    """Train until the run ends: a plain loop, and three lines more."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with atoll.torch.join(model, optimizer) as island:
        for inputs, targets in batches(seed=island.seed):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            island.report(tokens=len(inputs), loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    print(f"{island.name}: round {island.round}, digest {island.digest}")


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random batches of sin(x) forever; each seed gives different ones."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.rand(64, 1, generator=generator) * 6 - 3
        yield inputs, inputs.sin()


if __name__ == "__main__":
    linear = torch.nn.Linear
    train(torch.nn.Sequential(linear(1, 32), torch.nn.Tanh(), linear(32, 1)))
