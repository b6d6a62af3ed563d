"""Tiny runs whose every number can be worked out by head.

`Weights` has a constant gradient, so that inner SGD with lr 1 moves each weight by the
slope, once per inner step. Runs made here are exact unless a test asks otherwise: fp32
both ways and outer SGD with lr 1, so that the anchor is the mean of the islands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch

from atoll import RunSettings
from atoll.exchange import Exchange, MemoryRun
from atoll.island import Host
from atoll.protocol import JoinRequest
from atoll.torch import Island
from atoll.torch.model import HostWeights, TorchModel, TorchView
from atoll.weights import FragmentState

T = TypeVar("T")
Table = Mapping[str, object]

PLAIN: dict[str, Table] = {
    "wire": {"up": "fp32", "down": "fp32"},
    "outer": {"optimizer": "sgd", "lr": 1.0},
}
TIMEOUT_S = 90.0
"""The first round of a fresh machine compiles kernels, which takes its time."""


class Weights(torch.nn.Module):
    """One parameter `w`; the loss is its sum times a slope."""

    def __init__(self, *values: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, slope: float = 1.0) -> torch.Tensor:
        return (self.w * slope).sum()


class Quadratic(torch.nn.Module):
    """Half the squared distance from a centre: the gradient is w minus the centre."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(values))

    def forward(self, centre: float) -> torch.Tensor:
        return (self.w - centre).square().sum() / 2


class Blocks(torch.nn.Module):
    """Blocks of one weight each, named as transformers name them."""

    def __init__(self, count: int, value: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterDict({"w": torch.full((1,), value)}) for _ in range(count)
        )

    def forward(self, slope: float) -> torch.Tensor:
        return torch.stack([p.sum() for p in self.parameters()]).sum() * slope

    def values(self) -> list[float]:
        return [parameter.item() for parameter in self.parameters()]


def settings_of(islands: int = 1, *, every: int = 1, **tables: Table) -> RunSettings:
    """Return exact settings; `tables` override them key by key."""
    base: dict[str, Table] = {
        "run": {"start_islands": islands},
        "sync": {"sync_every": every},
        **PLAIN,
    }
    merged = {name: {**table, **tables.get(name, {})} for name, table in base.items()}
    return RunSettings.from_dict({**tables, **merged})


def run_of(islands: int = 1, *, every: int = 1, **tables: Table) -> MemoryRun:
    """Return an empty run with `settings_of` these."""
    return MemoryRun(settings_of(islands, every=every, **tables))


def sgd(model: torch.nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    """Return plain inner descent on all that the model trains."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 1,
    slope: float = 1.0,
) -> None:
    """Make inner steps of a constant gradient: a loop that knows no island."""
    for _ in range(steps):
        model(slope).backward()
        optimizer.step()
        optimizer.zero_grad()


def together(*islands: Callable[[], T]) -> list[T]:
    """Run each island as a thread and return what they return, in order.

    The first error is raised here; an island that never comes back is one.
    """
    returned: dict[int, T] = {}
    errors: list[BaseException] = []

    def live(number: int, island: Callable[[], T]) -> None:
        try:
            returned[number] = island()
        except BaseException as exc:  # it belongs to the thread of the test
            errors.append(exc)

    threads = [
        threading.Thread(target=live, args=pair, daemon=True)
        for pair in enumerate(islands)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "an island is stuck"
    return [returned[number] for number in range(len(islands))]


def join_exchange(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    exchange: Exchange,
    *,
    island: str,
) -> Island:
    """Join any exchange, which `atoll.torch.join` will offer when there are others."""
    torch_model = TorchModel.of(model)
    view = TorchView(torch_model)
    request = JoinRequest(model=torch_model.spec, island=island)
    host = Host(exchange, view, request)
    weights = HostWeights(host, view)
    return Island(host, weights, [model], optimizer, on_end="raise")


def state_of(run: Exchange, fragment: int = 0) -> FragmentState:
    """Return what the run itself holds of a fragment."""
    frame = run.state(fragment)
    return FragmentState.from_frame(frame.header, frame.body)


def anchor_of(run: Exchange, fragment: int = 0) -> list[float]:
    """Return a fragment's anchor, as the run itself holds it."""
    return [float(value) for value in state_of(run, fragment).anchor]


def bits(values: torch.Tensor | np.ndarray) -> bytes:
    """Return the very bytes, so that -0.0 is not 0.0 and NaN is itself."""
    if isinstance(values, np.ndarray):
        return values.tobytes()
    return values.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
