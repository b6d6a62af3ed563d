"""An island in virtual time: it joins, trains, leaves, dies and returns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from atoll.errors import AtollError
from atoll.exchange import Exchange
from atoll.island import Host
from atoll.island.numpy_model import VectorView, vector_model
from atoll.protocol import JoinRequest, ModelSpec
from atoll.simulate.hosts import (
    GreenletBackground,
)
from atoll.simulate.invariants import (
    InvariantWatch,
)
from atoll.simulate.invariants.watch import WatchedPorts
from atoll.simulate.network import Latency
from atoll.simulate.process import (
    SimProcess,
)
from atoll.simulate.world import (
    SimWorld,
)
from atoll.weights.layout import F32

STEP_S = 0.5
"""What an inner step takes on an island that nothing slows down."""

STORE_STEP_S = 2.0
"""The same in a bucket, where leases are longer and looks further apart."""

STEP_TOKENS = (60, 100)
"""An inner step trains on so many tokens, drawn evenly."""

_DRAWN_STEPS = 32
"""Of this many inner steps the noise is drawn at once."""

MODEL = vector_model({"h.0.w": (70,), "h.1.w": (50,), "head": (7,)})


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a run is like while nothing fails."""

    model: ModelSpec = MODEL
    step_s: float = STEP_S
    """What an inner step takes on an island that nothing slows down."""

    latency: Latency = field(default_factory=Latency)
    """Of every link, each way; an island and the coordinator have one of their own."""


@dataclass
class TimeSpent:
    """How an island spent the time in which it took part, over all its lives."""

    training_s: float = 0.0
    """In inner steps that it finished; what froze it meanwhile is no training."""

    _past_s: float = 0.0
    _since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Take note that the island has joined."""
        self._since_s = now_s

    def end(self, now_s: float) -> None:
        """Take note that it has left or died. Safe to repeat."""
        self._past_s, self._since_s = self.member_s(now_s), None

    def member_s(self, now_s: float) -> float:
        """Return how long it has taken part until now."""
        since_s = now_s if self._since_s is None else self._since_s
        return self._past_s + now_s - since_s

    def utilisation(self, now_s: float) -> float:
        """Return which part of this time was training; 0 if it never joined."""
        member_s = self.member_s(now_s)
        return self.training_s / member_s if member_s else 0.0


@dataclass(frozen=True, kw_only=True)
class PlannedDeparture:
    """An island leaves a run that has not ended, and may come back."""

    after_steps: int
    back_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class IslandCallbacks:
    """Whom an island tells what becomes of it."""

    died: Callable[[str], None]
    ended: Callable[[str, str], None]
    """With the digest that it holds at the end of the run."""

    left: Callable[[str], None]
    """For good, before the end of the run."""

    failed: Callable[[str, AtollError], None]


class ExchangeFactory(Protocol):
    """How the islands of a run reach it."""

    def exchange(
        self, process: SimProcess, number: int, ports: WatchedPorts
    ) -> Exchange:
        """Return the exchange of an island's `number`-th life, which is watched."""
        ...


class SimIsland:
    """Runs an island's lives, one after another; a new one has nothing of the last."""

    def __init__(
        self,
        world: SimWorld,
        name: str,
        watch: InvariantWatch,
        story: IslandCallbacks,
        *,
        way: ExchangeFactory,
        conditions: Conditions,
        departure: PlannedDeparture | None = None,
    ) -> None:
        self._world, self._name, self._watch, self._story = world, name, watch, story
        self._way, self._conditions, self._departure = way, conditions, departure
        self.hours = TimeSpent()
        self._rng = random.Random(f"{world.scheduler.seed} {name}")
        self._process = world.add(name)
        self._lives = 0

    def start(self) -> None:
        self._process.on_crash(self._die)
        self._process.start(self._live)

    def _die(self) -> None:
        at_s = self._world.scheduler.now_s
        self.hours.end(at_s)
        self._watch.gone(self._name, fate=f"died at {at_s:.3f} s")
        self._story.died(self._name)

    def _live(self) -> None:
        try:
            while not self._train():
                assert self._departure is not None
                back_after_s, self._departure = self._departure.back_after_s, None
                if back_after_s is None:
                    self._story.left(self._name)
                    return
                self._world.scheduler.sleep(back_after_s)
        except AtollError as exc:
            self.hours.end(self._world.scheduler.now_s)
            self._story.failed(self._name, exc)

    def _train(self) -> bool:
        """Live once; return whether the run has ended."""
        host, view = self._join()
        rng = np.random.default_rng(self._rng.getrandbits(32))
        tokens = rng.integers(*STEP_TOKENS, size=64).tolist()
        noise = _noise(rng, [len(local) for local in view.local])
        while not host.has_ended:
            self._work()
            for local, change in zip(view.local, next(noise), strict=True):
                local -= change
            host.tally.tokens += tokens[host.tally.inner_steps % 64]
            host.stepped()
            if (
                self._departure
                and host.tally.inner_steps == self._departure.after_steps
            ):
                break
        has_ended, digest = host.has_ended, host.digest
        host.leave()
        self.hours.end(self._world.scheduler.now_s)
        self._watch.gone(self._name, fate="saw the end" if has_ended else "left")
        if has_ended:
            self._story.ended(self._name, digest)
        return has_ended

    def _work(self) -> None:
        """Make an inner step's time pass."""
        step_s = self._conditions.step_s
        takes_s = step_s * math.prod(self._process.slowdowns)
        self._process.work(step_s)
        self.hours.training_s += takes_s

    def _join(self) -> tuple[Host, VectorView]:
        self._lives += 1
        # Founders differ: whose weights a run starts from must not be lost.
        view = VectorView(fill=self._rng.random())
        ports = self._watch.begin(self._name, view)
        exchange = self._way.exchange(self._process, self._lives, ports)
        host = Host(
            exchange,
            ports.view,
            JoinRequest(model=self._conditions.model, island=self._name),
            clock=self._world.clocks[self._name],
            background=GreenletBackground(self._process),
        )
        self._watch.joined(ports.life, host)
        self.hours.begin(self._world.scheduler.now_s)
        return host, view


def _noise(rng: np.random.Generator, sizes: list[int]) -> Iterator[list[F32]]:
    """Yield what each inner step changes: numbers in a row, drawn for many at once."""
    ends = list(accumulate(sizes, initial=0))
    parts = [slice(*ends_of) for ends_of in pairwise(ends)]
    while True:
        for step in rng.standard_normal((_DRAWN_STEPS, ends[-1]), np.float32):
            yield [step[part] for part in parts]
