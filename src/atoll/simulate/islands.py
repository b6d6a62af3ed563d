"""An island in virtual time: it joins, trains, leaves, dies and returns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np

from atoll.data import DataSpec, batches
from atoll.errors import AtollError
from atoll.exchange import Exchange
from atoll.island import Host
from atoll.island.deal import DealtRows
from atoll.island.numpy_model import VectorView, vector_model
from atoll.protocol import JoinRequest, ModelSpec
from atoll.simulate.hosts import SimRuntime
from atoll.simulate.invariants import InvariantWatch
from atoll.simulate.invariants.watch import WatchedPorts
from atoll.simulate.network import Latency
from atoll.simulate.process import SimProcess
from atoll.simulate.world import SimWorld
from atoll.weights.layout import F32

STEP_S = 0.5
"""Time of an inner step on an island that is not slowed down."""

STORE_STEP_S = 2.0
"""The same in a bucket, where leases are longer and polls less frequent."""

STEP_TOKENS = (60, 100)
"""Range of the tokens of an inner step, drawn uniformly."""

SPIKE = 100.0
"""Factor of a change of the weights that is too large."""

_DRAWN_STEPS = 32
"""Number of inner steps whose noise is drawn in one call."""

MODEL = vector_model({"h.0.w": (70,), "h.1.w": (50,), "head": (7,)})


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Model, step time and latency of a run without faults."""

    model: ModelSpec = MODEL
    step_s: float = STEP_S
    """Time of an inner step on an island that is not slowed down."""

    paces: Mapping[str, float] = field(default_factory=dict)
    """Times `step_s` that an island takes for an inner step, without faults: 1 if it is
    not named."""

    latency: Latency = field(default_factory=Latency)
    """Of every link: each island has a separate one to the coordinator and back."""

    spike_every: int = 0
    """Inner steps from one change of the weights that is `SPIKE` times too large to
    the next; 0: there are none. Updates with one are refused once norms are known."""

    rows: int = 0
    """Length of the dataset of a run that deals out rows."""

    batch: int = 8
    """Rows of an inner step."""

    evicted_after_s: float = 0.0
    """An operator evicts an island that has been dead for longer; 0: never."""

    @property
    def slowest_step_s(self) -> float:
        """Time of an inner step on the slowest island, without faults."""
        return self.step_s * max([1.0, *self.paces.values()])

    def step_s_of(self, island: str) -> float:
        """Return the time of an inner step on an island, without faults."""
        return self.step_s * self.paces.get(island, 1.0)


@dataclass
class TimeSpent:
    """Time in which an island took part, and trained, over all its incarnations."""

    training_s: float = 0.0
    """In inner steps that it finished, without the time in which it was frozen."""

    _past_s: float = 0.0
    _since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Start counting: the island has joined."""
        self._since_s = now_s

    def end(self, now_s: float) -> None:
        """Stop counting: it has left or died. Safe to repeat."""
        self._past_s, self._since_s = self.member_s(now_s), None

    def member_s(self, now_s: float) -> float:
        """Return the time in which it has taken part until now."""
        since_s = now_s if self._since_s is None else self._since_s
        return self._past_s + now_s - since_s

    def utilisation(self, now_s: float) -> float:
        """Return the share of this time that was training; 0 if it never joined."""
        member_s = self.member_s(now_s)
        return self.training_s / member_s if member_s else 0.0


@dataclass(frozen=True, kw_only=True)
class PlannedDeparture:
    """An island leaves a run that has not ended, and may come back."""

    after_steps: int
    back_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class IslandCallbacks:
    """Callbacks of an island's death, end, departure and failure."""

    died: Callable[[str], None]
    ended: Callable[[str, str], None]
    """With the digest of its anchor at the end of the run."""

    departed: Callable[[str], None]
    """It has left before the end of the run, and does not return."""

    failed: Callable[[str, AtollError], None]


class ExchangeFactory(Protocol):
    """Makes the exchanges of a run's islands."""

    def exchange(
        self, process: SimProcess, number: int, ports: WatchedPorts
    ) -> Exchange:
        """Return the watched exchange of an island's `number`-th incarnation."""
        ...


class SimIsland:
    """Runs an island's incarnations, one after another, which share no state."""

    def __init__(
        self,
        world: SimWorld,
        name: str,
        watch: InvariantWatch,
        callbacks: IslandCallbacks,
        *,
        exchange_factory: ExchangeFactory,
        conditions: Conditions,
        departure: PlannedDeparture | None = None,
    ) -> None:
        self._world, self._name, self._watch, self._callbacks = (
            world,
            name,
            watch,
            callbacks,
        )
        self._exchange_factory, self._conditions, self._departure = (
            exchange_factory,
            conditions,
            departure,
        )
        self.time_spent = TimeSpent()
        self._rng = random.Random(f"{world.scheduler.seed} {name}")
        self._process = world.add(name)
        self._incarnations = 0

    def start(self) -> None:
        self._process.on_crash(self._die)
        self._process.start(self._live)

    def _die(self) -> None:
        at_s = self._world.scheduler.now_s
        self.time_spent.end(at_s)
        self._watch.withdraw(self._name, fate=f"died at {at_s:.3f} s")
        self._callbacks.died(self._name)

    def _live(self) -> None:
        try:
            while not self._train():
                back_after_s = None
                if self._departure is not None:
                    back_after_s, self._departure = self._departure.back_after_s, None
                if back_after_s is None:
                    self._callbacks.departed(self._name)
                    return
                self._world.scheduler.sleep(back_after_s)
        except AtollError as exc:
            self.time_spent.end(self._world.scheduler.now_s)
            self._callbacks.failed(self._name, exc)

    def _train(self) -> bool:
        """Join, train and leave once; return whether the run has ended.

        An island also leaves when the run has no more rows for it, and does not return.
        """
        host, view, draw = self._join()
        rng = np.random.default_rng(self._rng.getrandbits(32))
        tokens = rng.integers(*STEP_TOKENS, size=64).tolist()
        noise = _noise(rng, [len(local) for local in view.local])
        while not host.has_ended:
            if not draw():
                self._departure = None
                break
            self._work()
            factor = np.float32(SPIKE if self._has_spike(host) else 1.0)
            for local, change in zip(view.local, next(noise), strict=True):
                local -= factor * change
            host.counters.tokens += tokens[host.counters.inner_steps % 64]
            host.stepped()
            if (
                self._departure
                and host.counters.inner_steps == self._departure.after_steps
            ):
                break
        has_ended, digest = host.has_ended, host.digest
        host.leave()
        self.time_spent.end(self._world.scheduler.now_s)
        self._watch.withdraw(self._name, fate="saw the end" if has_ended else "left")
        if has_ended:
            self._callbacks.ended(self._name, digest)
        return has_ended

    def _has_spike(self, host: Host) -> bool:
        """Return whether the next inner step changes the weights too much."""
        every = self._conditions.spike_every
        return every > 0 and host.counters.inner_steps % every == every - 1

    def _work(self) -> None:
        """Let the time of an inner step pass."""
        step_s = self._conditions.step_s_of(self._name)
        takes_s = step_s * math.prod(self._process.slowdowns)
        self._process.work(step_s)
        self.time_spent.training_s += takes_s

    def _join(self) -> tuple[Host, VectorView, Callable[[], bool]]:
        self._incarnations += 1
        # First weights differ by island: a run must keep those of its founder.
        view = VectorView(fill=self._rng.random())
        ports = self._watch.begin(self._name, view)
        exchange = self._exchange_factory.exchange(
            self._process, self._incarnations, ports
        )
        host = Host(
            exchange,
            ports.view,
            JoinRequest(model=self._conditions.model, island=self._name),
            runtime=SimRuntime(self._world, self._process),
        )
        self._watch.joined(ports.incarnation, host)
        self.time_spent.begin(self._world.scheduler.now_s)
        return host, view, self._draw_of(host, ports)

    def _draw_of(self, host: Host, ports: WatchedPorts) -> Callable[[], bool]:
        """Return a function that draws a batch; it returns False if there is none."""
        if host.deal is None:
            return lambda: True
        conditions, given_rows = self._conditions, ports.incarnation.rows
        given_rows.begin(host.settings, conditions.rows)
        source = batches(DealtHost(host), rows=conditions.rows, batch=conditions.batch)

        def draw() -> bool:
            with self._watch.drawing(ports.incarnation):
                rows = next(source, None)
            if rows is not None:
                given_rows.steps.append(rows)
            return rows is not None

        return draw


@dataclass(frozen=True)
class DealtHost:
    """A host as `atoll.data.batches` takes it."""

    host: Host

    def deal(self, data: DataSpec) -> DealtRows:
        """Describe the data to the run, and return the rows that it deals out."""
        return self.host.open_data(data, may_sync=True)


def _noise(rng: np.random.Generator, sizes: list[int]) -> Iterator[list[F32]]:
    """Yield the noise of each inner step by fragment, drawn for many steps together."""
    ends = list(accumulate(sizes, initial=0))
    parts = [slice(*ends_of) for ends_of in pairwise(ends)]
    while True:
        for step in rng.standard_normal((_DRAWN_STEPS, ends[-1]), np.float32):
            yield [step[part] for part in parts]
