"""A training loop with a checkpoint, as a process that may kill itself at a step.

    python -m tests.e2e.resuming_island URL NAME --folder FOLDER --dies-at 17

It trains numpy arrays, so that it starts at once, and writes to FOLDER/NAME.json what
it led to, to the bit.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np

from atoll import kernels
from atoll.checkpoint import COMPONENTS, Policy
from atoll.island import Host, join_run
from atoll.island.checkpoints import IslandCheckpoints
from atoll.testing import vector_model
from atoll.weights import Layout
from atoll.weights.layout import F32
from tests.e2e.island_process import arguments

SHAPES = {f"blocks.{n}.weight": (50 + n,) for n in range(4)}


class Arrays:
    """Named vectors: weights as a view of them, or an optimizer's moments."""

    def __init__(self, fill: float) -> None:
        self.values = {
            name: np.full(shape, fill, np.float32) for name, shape in SHAPES.items()
        }
        self._names: list[list[str]] = []

    def lay_out(self, layout: Layout) -> None:
        self._names = [[each.name for each in part.tensors] for part in layout]

    def read(self, fragment: int, out: F32) -> None:
        np.concatenate([self.values[n] for n in self._names[fragment]], out=out)

    def write(self, fragment: int, values: F32) -> None:
        names = self._names[fragment]
        ends = np.cumsum([self.values[name].size for name in names])
        for name, part in zip(names, np.split(values, ends[:-1]), strict=True):
            self.values[name][:] = part

    def state_dict(self) -> dict[str, F32]:
        return self.values

    def load_state_dict(self, state: dict[str, F32]) -> None:
        for name, value in state.items():
            self.values[name][:] = value


class Rows:
    """Data with a cursor; what is in a row depends on the island and the row."""

    def __init__(self, seed: int) -> None:
        self.seed, self.next = seed, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Loop:
    """Weights, momentum, a learning rate that falls, and noise from the process."""

    def __init__(self, said: Any) -> None:
        self.said = said
        np.random.seed(said.seed)
        self.weights, self.momentum = Arrays(1.0), Arrays(0.0)
        self.rows, self.rate = Rows(said.seed), {"rate": 0.1}
        self.trained: list[int] = []

    def live(self) -> Host:
        policy = Policy(
            self.said.folder / f"{self.said.name}.checkpoints",
            every_rounds=2,
            components=None if self.said.rejoins else COMPONENTS,
            extra={"scheduler": self.rate, "data": self.rows},
        )
        objects = {"model": self.weights, "optimizer": self.momentum}
        checkpointing = IslandCheckpoints(policy, objects, is_alone=False)
        model = vector_model(SHAPES)
        host = join_run(
            self.said.url,
            self.weights,
            model,
            island=self.said.name,
            checkpointing=checkpointing,
        )
        checkpointing.begin(host)
        for row in self.rows:
            self.step(host, checkpointing, row)
            if host.has_ended:
                break
        checkpointing.leave()
        host.leave()
        checkpointing.close()
        return host

    def step(self, host: Host, checkpointing: IslandCheckpoints, row: int) -> None:
        self.trained.append(row)
        noise = np.random.normal(size=1).astype(np.float32)
        numbers = np.random.default_rng([self.said.seed, row])
        checkpointing.finish()
        host.counters.tokens += 32
        if len(self.trained) == self.said.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for name, weight in self.weights.values.items():
            slope = weight + numbers.normal(size=weight.size).astype(np.float32) + noise
            moment = self.momentum.values[name]
            moment[:] = np.float32(0.5) * moment + slope
            weight -= np.float32(self.rate["rate"]) * moment
        host.stepped()
        if not host.has_ended:
            checkpointing.stepped()
        self.rate["rate"] *= 0.99
        time.sleep(self.said.step_s)  # what computing takes

    def bits(self) -> str:
        digest = sha256()
        for arrays in (self.weights, self.momentum):
            for value in arrays.values.values():
                digest.update(value.tobytes())
        return digest.hexdigest()


def main() -> None:
    parser = arguments()
    parser.add_argument("--dies-at", type=int, default=-1)
    parser.add_argument("--rejoins", action="store_true")
    said = parser.parse_args()
    kernels.use("numpy")  # starts at once
    loop = Loop(said)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        host = loop.live()
    result = {
        "bits": loop.bits(),
        "anchor": host.digest,
        "round": host.round,
        "inner_steps": host.counters.inner_steps,
        "rows": loop.trained,
        "told": [str(each.message) for each in told],
    }
    written = said.folder / f"{said.name}.part"
    written.write_text(json.dumps(result))
    written.rename(said.folder / f"{said.name}.json")


if __name__ == "__main__":
    main()
