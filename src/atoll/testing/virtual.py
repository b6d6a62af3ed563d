"""Your own loop in virtual time: real islands, a real coordinator, planned faults.

A loop runs in a greenlet. It must not wait outside of virtual time: no threads, no
sleep, no sockets. The same seed gives the same run, event for event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.errors import AtollError
from atoll.exchange import CoordinatorExchange
from atoll.island import Host
from atoll.island.base import ParameterView
from atoll.island.saved_state import SavedIsland
from atoll.protocol import JoinRequest, ModelSpec
from atoll.runtime import Clock
from atoll.settings import RunSettings
from atoll.simulate import Armed, FaultPlan, SimProcess, SimWorld, apply
from atoll.simulate.hosts import CoordinatorHost, SimLine, SimRuntime


class VirtualIsland:
    """The argument of a loop: its name, its clock, and `join`."""

    def __init__(self, name: str, world: SimWorld, process: SimProcess) -> None:
        self.name = name
        self.clock: Clock = world.clocks[name]
        self.incarnation = process.incarnation_number
        """1 at first, and one higher after every death."""

        self._world, self._process = world, process

    def join(
        self,
        model: ModelSpec,
        view: ParameterView,
        *,
        saved: SavedIsland | None = None,
    ) -> Host:
        """Join the run; afterwards `view` holds its weights.

        `saved` is the island of a checkpoint, which an earlier incarnation has made.

        Call `stepped()` of the host after every inner step until it `has_ended`, and
        then `leave()`.
        """
        exchange = CoordinatorExchange(
            SimLine(self._world, self._process),
            key=self.name.encode(),
            nonce=str(self.incarnation).encode(),
        )
        return Host(
            exchange,
            view,
            JoinRequest(model=model, island=self.name),
            runtime=SimRuntime(self._world, self._process),
            saved=saved,
        )

    def work(self, seconds: float) -> None:
        """Let `seconds` pass, or more if the plan slows this island down."""
        self._process.work(seconds)


Loop = Callable[[VirtualIsland], Any]


@dataclass
class VirtualRun:
    """The result of a run."""

    seconds: float = 0.0
    """Virtual time until the last loop was over."""

    rounds: tuple[int, ...] = ()
    """The last committed round of each fragment."""

    returned: dict[str, Any] = field(default_factory=dict)
    """The return value of each loop, by island."""

    failures: dict[str, AtollError] = field(default_factory=dict)
    """The error that ended a loop, by island."""


def virtual_run(
    loop: Loop,
    settings: RunSettings,
    *,
    islands: int = 4,
    faults: FaultPlan | None = None,
    seed: int = 0,
    limit_s: float = 6 * 3600.0,
) -> VirtualRun:
    """Run `loop` once for each incarnation of islands i0, i1, ...; return the result.

    The coordinator's process is called `coordinator`. A run that has not ended after
    `limit_s` is stopped: `returned` lacks the islands whose loop is not over. An error
    that is not Atoll's ends the run, and is the cause of the `ProcessFailed` raised.
    """
    result = VirtualRun()
    with SimWorld(seed) as world:
        coordinator = CoordinatorHost(world, settings)
        coordinator.start()
        names = [f"i{number}" for number in range(islands)]
        for name in names:
            process = world.add(name)
            process.start(_life(name, world, process, loop, result))
        armed = apply(faults or FaultPlan(), world)
        world.scheduler.after_event = lambda: _stop_when_over(
            world, names, armed, result
        )
        world.scheduler.run(limit_s)
        result.seconds = world.scheduler.now_s
        if coordinator.service is not None:
            rounds = coordinator.service.state.rounds
            result.rounds = tuple(round.number - 1 for round in rounds)
    return result


def _life(
    name: str, world: SimWorld, process: SimProcess, loop: Loop, result: VirtualRun
) -> Callable[[], None]:
    def live() -> None:
        try:
            result.returned[name] = loop(VirtualIsland(name, world, process))
        except AtollError as exc:
            result.failures[name] = exc

    return live


def _stop_when_over(
    world: SimWorld, names: list[str], armed: Armed, result: VirtualRun
) -> None:
    """Stop when every loop is over, or its island is dead and will not restart."""
    over = result.returned.keys() | result.failures.keys()
    is_calm = armed.calm_since_s is not None
    running = (world.processes[name] for name in names if name not in over)
    if not any(process.is_alive or not is_calm for process in running):
        world.scheduler.stop()
