"""An island whose inner steps take a fixed time: one process of `utilisation.py`.

    atoll join RUN -- python bench/_utilisation_island.py --results a.json ...

All that `atoll.torch` does is real; only forward and backward pass are a wait. A step
ends when its time is over, the optimizer's own work included, and what the island does
at a step comes after that. Time in compute is taken by the clock: a machine that wakes
a process late has not made it wait for the network.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch

import atoll.torch

ROWS = 500


class StandIn:
    """Computing of a fixed duration. Make it before the island's own hook is there."""

    def __init__(self, optimizer: torch.optim.Optimizer, step_s: float) -> None:
        self._step_s = step_s
        self._began_s = 0.0
        self.seconds = 0.0
        """In compute, so far."""

        optimizer.register_step_post_hook(self._end)

    def begin(self) -> None:
        self._began_s = time.monotonic()

    def _end(self, *_: object) -> None:
        ends_s = self._began_s + self._step_s
        time.sleep(max(0.0, ends_s - time.monotonic()))
        self.seconds += time.monotonic() - self._began_s


class Mark(NamedTuple):
    """Where an island is, and when."""

    at_s: float
    inner_steps: int
    compute_s: float
    wait_s: float
    bytes_up: int
    bytes_down: int


class Marks:
    """Notes when an island has come to each of its rounds."""

    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in
        self.of_round: dict[int, Mark] = {}

    def look(self, island: atoll.torch.Island) -> None:
        if island.round in self.of_round:
            return
        metrics = island.metrics()
        self.of_round[island.round] = Mark(
            time.monotonic(),
            island.inner_steps,
            self._stand_in.seconds,
            metrics["atoll/wait_s"],
            int(metrics["atoll/bytes_up"]),
            int(metrics["atoll/bytes_down"]),
        )


def make_model(elements: int, blocks: int) -> torch.nn.Module:
    """Return blocks of one matrix each, with gradients that stay as they are."""
    columns = elements // blocks // ROWS
    linear = [torch.nn.Linear(columns, ROWS, bias=False) for _ in range(blocks)]
    model = torch.nn.ModuleDict({"h": torch.nn.ModuleList(linear)})
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def train(model: torch.nn.Module, step_s: float) -> dict[int, Mark]:
    """Train until the run ends; return when each round was reached."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    stand_in = StandIn(optimizer, step_s)
    marks = Marks(stand_in)
    with atoll.torch.join(model, optimizer) as island:
        while True:
            marks.look(island)
            stand_in.begin()
            optimizer.step()
    return marks.of_round


def main() -> None:
    """Be one island, and leave what was measured where the caller looks for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    marks = train(make_model(given.elements, given.blocks), given.step_s)
    said = {round: mark._asdict() for round, mark in marks.items()}
    given.results.write_text(json.dumps(said))


if __name__ == "__main__":
    main()
