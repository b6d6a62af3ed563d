"""The example's model and text, in runs that are small enough for a test."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from torch.optim import AdamW, Optimizer

from atoll import RunSettings
from atoll.exchange import MemoryRun
from atoll.torch import Island
from examples import minimal

WIDTH = 32
"""60 thousand parameters: a step costs milliseconds."""

Prepare = Callable[[int, minimal.TinyGPT, Optimizer], object]


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    loss: float
    """Of the last anchor on held-out text, in nats per byte."""

    islands: list[Island]
    run: MemoryRun


def vanilla(*, islands: int, rounds: int) -> RunSettings:
    """Return the example's outer optimizer, all at once and in fp32."""
    return RunSettings.from_dict(
        {
            "run": {"start_islands": islands, "end_rounds": rounds},
            "sync": {"sync_every": minimal.SYNC["sync_every"]},
            "wire": {"up": "fp32", "down": "fp32"},
            "outer": minimal.OUTER,
        }
    )


def streaming(*, islands: int, rounds: int) -> RunSettings:
    """Return the example's own settings: fragments, overlap, 4 bits up and 8 down."""
    return RunSettings.from_dict(
        {
            "run": {"start_islands": islands, "end_rounds": rounds},
            "sync": minimal.SYNC,
            "wire": minimal.WIRE,
            "outer": minimal.OUTER,
        }
    )


def train(
    settings: RunSettings,
    *,
    seed: int = 0,
    prepare: Prepare | None = None,
    last_first: bool = False,
) -> Trained:
    """Train islands as threads until the run ends.

    Args:
        prepare: is given number, model and optimizer of an island before it joins.
        last_first: start the threads in the opposite order.
    """
    eras, held_out = minimal.read_eras(settings.run.start_islands)
    run = MemoryRun(settings)
    numbers = range(len(eras))
    models = [minimal.TinyGPT(WIDTH, seed=seed) for _ in eras]

    def live(number: int) -> Island:
        model, data_seed = models[number], len(eras) * seed + number
        optimizer = AdamW(model.parameters(), minimal.INNER_LR, fused=True)
        if prepare is not None:
            prepare(number, model, optimizer)
        data = minimal.batches(eras[number], seed=data_seed)
        return minimal.train(model, optimizer, data, run, f"era-{number}")

    with ThreadPoolExecutor(len(eras)) as threads:
        islands = list(threads.map(live, reversed(numbers) if last_first else numbers))
    islands.sort(key=lambda island: island.name)
    with islands[0].evaluating():
        return Trained(minimal.evaluate(models[0], held_out), islands, run)
