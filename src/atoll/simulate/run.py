"""A whole run in virtual time: islands, a coordinator, a plan of faults, one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from atoll.errors import AtollError
from atoll.exchange import CoordinatorExchange
from atoll.island import Host
from atoll.island.vectors import Vectors, vector_model
from atoll.protocol import JoinRequest
from atoll.settings import RunSettings
from atoll.simulate.apply import Armed, apply
from atoll.simulate.hosts import CoordinatorHost, Greenlets, Wire
from atoll.simulate.plan import FaultPlan
from atoll.simulate.trace import Happening
from atoll.simulate.world import World

STEP_S = 0.5
"""What an inner step takes on an island that nothing slows down."""

LIMIT_S = 6 * 3600.0
"""A run that has not ended by then hangs."""

MODEL = vector_model({"h.0.w": (70,), "h.1.w": (50,), "head": (7,)})


@dataclass
class Simulated:
    """What a run came to."""

    seconds: float = 0.0
    """Of virtual time, until the last island had left."""

    events: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    """Of every island that saw the run end."""

    coordinator_digests: list[bytes] = field(default_factory=list)
    rounds: tuple[int, ...] = ()
    deaths: dict[str, int] = field(default_factory=dict)
    failures: dict[str, AtollError] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)


def simulate(
    settings: RunSettings,
    *,
    islands: int = 4,
    faults: FaultPlan | None = None,
    seed: int = 0,
    trace: Callable[[Happening], None] | None = None,
) -> Simulated:
    """Run to the settings' `end_rounds`, and return what came of it.

    The same arguments give the same run, event for event. `trace` is told of every
    message, fault and crash as it happens.
    """
    result = Simulated()
    names = [f"i{number}" for number in range(islands)]
    with World(seed) as world:
        world.scheduler.trace = trace
        coordinator = CoordinatorHost(world, settings)
        coordinator.start()
        for name in names:
            IslandHost(world, name, result, random.Random(f"{seed} {name}")).start()
        armed = apply(faults or FaultPlan(), world)
        world.scheduler.after_event = lambda: _stop_when_over(world, armed, result)
        world.scheduler.run(LIMIT_S)
        result.seconds, result.events = world.scheduler.now_s, world.scheduler.events
        _conclude(coordinator, result)
    return result


class IslandHost:
    """Runs an island's lives, one after another; a new one has nothing of the last."""

    def __init__(
        self, world: World, name: str, result: Simulated, rng: random.Random
    ) -> None:
        self._world, self._name, self._result, self._rng = world, name, result, rng
        self._process = world.add(name)
        result.deaths[name] = 0

    def start(self) -> None:
        self._process.on_crash(self._note_death)
        self._process.start(self._live)

    def _note_death(self) -> None:
        self._result.deaths[self._name] += 1

    def _live(self) -> None:
        try:
            self._train()
        except AtollError as exc:
            self._result.failures[self._name] = exc

    def _train(self) -> None:
        wire = Wire(self._world, self._process)
        nonce = str(self._process.incarnation).encode()
        exchange = CoordinatorExchange(wire, key=self._name.encode(), nonce=nonce)
        view = Vectors()
        host = Host(
            exchange,
            view,
            JoinRequest(model=MODEL, island=self._name),
            clock=self._world.clocks[self._name],
            background=Greenlets(self._process),
        )
        noise = np.random.default_rng(self._rng.getrandbits(32))
        while not host.has_ended:
            self._process.work(STEP_S)
            for local in view.local:
                local -= noise.standard_normal(len(local), np.float32)
            host.stepped()
        self._result.digests[self._name] = host.digest
        host.leave()


def _stop_when_over(world: World, armed: Armed, result: Simulated) -> None:
    """Stop when every island has seen the end, or is dead and will not come back."""
    over = result.digests.keys() | result.failures.keys()
    left = [name for name in result.deaths if name not in over]
    is_calm = armed.calm_since_s is not None
    if not any(world.processes[name].is_alive or not is_calm for name in left):
        world.scheduler.stop()


def _conclude(coordinator: CoordinatorHost, result: Simulated) -> None:
    service = coordinator.service
    assert service is not None
    result.coordinator_digests = [state.digest for state in service.weights]
    result.rounds = tuple(round.number - 1 for round in service.state.rounds)
    if len(set(result.digests.values())) > 1:
        result.violations.append(f"islands hold other anchors: {result.digests}")
