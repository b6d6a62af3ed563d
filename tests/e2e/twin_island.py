"""An island of torch or of JAX as a process, with a checkpoint after every round.

    python -m tests.e2e.twin_island URL NAME --framework jax --folder FOLDER

Both have the same parameters and take what they learn from numpy, so that only the
framework differs. Writes how it ended to FOLDER/NAME.json.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from atoll import kernels
from atoll.checkpoint import COMPONENTS, Policy
from tests.e2e.island_process import arguments

SHAPES = {f"blocks.{n}.weight": (5, 2 + n) for n in range(4)}
RATE = np.float32(0.125)
Arrays = dict[str, np.ndarray]


def slopes(seed: int, step: int) -> Arrays:
    """Return the gradients of an inner step, which differ for each island."""
    numbers = np.random.default_rng([seed, step])
    return {
        name: numbers.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


class Deadly:
    """Dies at one inner step of this life, as by a power cut."""

    def __init__(self, said: Any) -> None:
        self._left, self._step_s = said.dies_at, said.step_s

    def __call__(self) -> None:
        time.sleep(self._step_s)  # what computing takes
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def policy_of(said: Any) -> Policy:
    place = Path(said.folder) / f"{said.name}.checkpoints"
    return Policy(place, every_rounds=1, components=COMPONENTS)


def in_torch(said: Any, deadly: Deadly) -> tuple[Any, Arrays]:
    import torch

    import atoll.torch

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(
        torch.nn.ParameterDict({"weight": torch.ones(shape)})
        for shape in SHAPES.values()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=float(RATE), momentum=0.5)
    with atoll.torch.join(
        model, optimizer, said.url, island=said.name, checkpoint=policy_of(said)
    ) as island:
        while True:
            given = slopes(said.seed, island.inner_steps)
            for name, parameter in model.named_parameters():
                parameter.grad = torch.from_numpy(given[name])
            deadly()
            island.report(tokens=32)
            optimizer.step()
    return island, {n: p.detach().numpy() for n, p in model.named_parameters()}


def in_jax(said: Any, deadly: Deadly) -> tuple[Any, Arrays]:
    import jax
    import jax.numpy as jnp

    import atoll.jax

    @jax.jit
    def train(params: Any, moments: Any, given: Any) -> tuple[Any, Any]:
        moments = jax.tree.map(lambda m, g: 0.5 * m + g, moments, given)
        return jax.tree.map(lambda p, m: p - RATE * m, params, moments), moments

    def tree(values: Callable[[str], Any]) -> Any:
        return {"blocks": [{"weight": values(name)} for name in SHAPES]}

    params = tree(lambda name: jnp.ones(SHAPES[name]))
    moments = jax.tree.map(jnp.zeros_like, params)
    with atoll.jax.join(
        params,
        moments,
        said.url,
        island=said.name,
        checkpoint=policy_of(said),
    ) as island:
        params, moments = island.params, island.optimizer
        while True:
            given = slopes(said.seed, island.inner_steps)
            params, moments = train(params, moments, tree(given.__getitem__))
            deadly()
            island.report(tokens=32, loss=params["blocks"][0]["weight"].mean())
            params = island.stepped(params, optimizer=moments)
    ended = island.params["blocks"]
    pairs = zip(SHAPES, ended, strict=True)
    return island, {name: np.asarray(block["weight"]) for name, block in pairs}


def main() -> None:
    parser = arguments()
    parser.add_argument("--dies-at", type=int, default=-1)
    parser.add_argument("--framework", choices=("torch", "jax"), required=True)
    said = parser.parse_args()
    kernels.use("numpy")  # starts at once
    live = in_jax if said.framework == "jax" else in_torch
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        island, weights = live(said, Deadly(said))
    result = {
        "digest": island.digest,
        "round": island.round,
        "inner_steps": island.inner_steps,
        "weights": {name: value.tolist() for name, value in weights.items()},
        "told": [str(each.message) for each in told],
    }
    written = Path(said.folder) / f"{said.name}.part"
    written.write_text(json.dumps(result))
    written.rename(Path(said.folder) / f"{said.name}.json")


if __name__ == "__main__":
    main()
