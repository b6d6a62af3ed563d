"""A small training with torchft's own classes, the same with whatever manager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torchft.local_sgd import DiLoCo, LocalSGD  # type: ignore[import-untyped] # no stubs

from atoll.exchange import Exchange
from atoll.integrations.torchft import Manager
from tests.torch.runs import together

INNER_LR, OUTER_LR, MOMENTUM = 0.05, 0.7, 0.9


def network(seed: int = 0) -> torch.nn.Sequential:
    """Return two blocks, which streaming syncs one after the other."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh()),
        torch.nn.Linear(8, 2),
    )


class Training:
    """One island's model, optimizers and data; the data differ by its number."""

    def __init__(self, number: int, *, fragments: int = 1, seed: int = 0) -> None:
        self.name = f"island-{number}"
        self.model = network(seed)
        self.modules = [*self.model] if fragments == 2 else [self.model]
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=INNER_LR)
        self.outer = [
            torch.optim.SGD(
                each.parameters(), lr=OUTER_LR, momentum=MOMENTUM, nesterov=True
            )
            for each in self.modules
        ]
        self.inner_steps = 0
        self._data = torch.Generator().manual_seed(100 + number)

    def step(self) -> None:
        """Make one inner step on the next batch."""
        self.inner_steps += 1
        rows = torch.randn(16, 4, generator=self._data)
        wanted = torch.stack([rows.sum(1), rows.prod(1)], 1)
        self.inner.zero_grad()
        loss: Any = torch.nn.functional.mse_loss(self.model(rows), wanted)
        loss.backward()
        self.inner.step()

    def diloco(self, manager: Any, *, every: int, **how: Any) -> Any:
        """Return torchft's own class around this training."""
        self._diloco = DiLoCo(
            manager, self.modules, self.inner, self.outer, sync_every=every, **how
        )
        return self._diloco

    def agreed(self) -> torch.Tensor:
        """Return the weights of every fragment as they were last agreed."""
        kept = [each.original_parameters for each in self._diloco._fragments]
        return torch.cat([p.flatten() for each in kept for p in each.values()])

    def local_sgd(self, manager: Any, *, every: int) -> Any:
        """Return torchft's own class around this training."""
        return LocalSGD(manager, self.model, self.inner, sync_every=every)

    def weights(self) -> torch.Tensor:
        """Return a copy of all parameters, one after the other."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "inner": self.inner.state_dict(),
        }

    def manager(self, run: Exchange | str, **how: Any) -> Manager:
        """Return ours, with this training's weights and inner optimizer registered."""
        return Manager(
            run,
            reduces=self.modules,
            load_state_dict=self.load,
            state_dict=self.save,
            replica_id=self.name,
            **how,
        )


Wrap = Callable[[Training, Any], Any]


def diloco(every: int, **how: Any) -> Wrap:
    """Return a wrapper of `DiLoCo` with these arguments."""
    return lambda training, manager: training.diloco(manager, every=every, **how)


def local_sgd(every: int) -> Wrap:
    """Return a wrapper of `LocalSGD` with this period."""
    return lambda training, manager: training.local_sgd(manager, every=every)


@dataclass(frozen=True)
class Case:
    """One way to use torchft's classes."""

    wrap: Wrap
    fragments: int = 1


STEPS = 24
CASES = {
    "diloco": Case(diloco(4)),
    "streaming": Case(diloco(8), fragments=2),
    "overlapped and mixed": Case(
        diloco(8, fragment_sync_delay=2, fragment_update_alpha=0.5), fragments=2
    ),
    "bucketized": Case(diloco(4, use_bucketization=True)),
    "local SGD": Case(local_sgd(4)),
}
"""What must end with the same bits over gloo and over ours, after so many steps."""


def train_island(
    run: Exchange | str, training: Training, wrap: Wrap, *, steps: int
) -> torch.Tensor:
    """Train one island of a run from equal weights, and return what it ends with."""
    with training.manager(run, init_sync=False) as manager, wrap(training, manager):
        for _ in range(steps):
            training.step()
    return training.weights()


def train_all(
    run: Exchange | str, wrap: Wrap, *, steps: int, fragments: int = 1, islands: int = 2
) -> list[torch.Tensor]:
    """Train islands as threads of this process, and return what each ends with."""
    # Made here, one after the other: a seed is the whole process's.
    trainings = [Training(number, fragments=fragments) for number in range(islands)]
    return together(
        *(partial(train_island, run, each, wrap, steps=steps) for each in trainings)
    )
