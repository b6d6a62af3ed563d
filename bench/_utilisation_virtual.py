"""The simulator's own figures for `utilisation.py`: islands, and a ring of two.

The model has a thirty-second of the elements, on links of as much less rate, so
that every body takes as long as a whole one would. Only the heads of messages, about
256 bytes each, then take 0.7 ms instead of 0.02 ms.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from atoll import RunSettings
from atoll.island.numpy_model import vector_model
from atoll.simulate import (
    GreenletFuture,
    Latency,
    SimProcess,
    SimWorld,
)
from atoll.simulate.network import (
    ReplyFunction,
)
from atoll.simulate.run import Conditions, simulate

SMALLER = 32


def islands(
    settings: RunSettings,
    *,
    elements: int,
    step_s: float,
    rate_bytes_per_s: float,
    delay_s: float,
) -> list[float]:
    """Return the utilisation of each of two islands, over the whole run."""
    blocks = settings.sync.num_fragments
    size = elements // blocks // SMALLER
    conditions = Conditions(
        model=vector_model({f"h.{n}.weight": (size,) for n in range(blocks)}),
        step_s=step_s,
        latency=Latency(
            base_s=delay_s, jitter_s=0.0, bytes_per_s=rate_bytes_per_s / SMALLER
        ),
    )
    result = simulate(settings, islands=2, conditions=conditions)
    assert not result.violations, result.violations
    return list(result.utilisation.values())


def ring(
    *,
    elements: int,
    step_s: float,
    steps: int,
    rate_bytes_per_s: float,
    delay_s: float,
) -> float:
    """Return the utilisation of two that reduce bf16 gradients after every step."""
    latency = Latency(base_s=delay_s, jitter_s=0.0, bytes_per_s=rate_bytes_per_s)
    with SimWorld(0, latency=latency) as world:
        sides = [_Side(world, "a", "b"), _Side(world, "b", "a")]
        half_bytes = elements  # two bytes for each of half of the elements
        for side in sides:
            side.process.start(partial(side.train, step_s, steps, half_bytes))
        world.scheduler.run()
        return steps * step_s / world.scheduler.now_s


class _Side:
    """One of two that swap halves of their gradients."""

    def __init__(self, world: SimWorld, name: str, other: str) -> None:
        self._world, self._other = world, other
        self.process: SimProcess = world.add(name)
        self._arrived = 0
        self._halves = defaultdict[int, GreenletFuture[None]](
            lambda: GreenletFuture(world.scheduler)
        )

    def train(self, step_s: float, steps: int, half_bytes: int) -> None:
        self._world.network.listen(self.process, self._hear)
        for swap in range(2 * steps):
            if swap % 2 == 0:
                self.process.work(step_s)
            network = self._world.network
            network.ask(self.process, self._other, swap, size_bytes=half_bytes)
            self._halves[swap].result()

    def _hear(self, request: object, reply: ReplyFunction) -> None:
        self._halves[self._arrived].set_result(None)
        self._arrived += 1
