"""Runs in virtual time under one way to say who is late, and what they came to.

Islands, coordinator, protocol and journal are the real ones, as in `atoll.simulate`.
Only the way to be late differs: learned, or a fixed timeout.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from atoll import RunSettings
from atoll.algorithm.pace import deadline_s
from atoll.exchange import CoordinatorExchange
from atoll.exchange.calls import Call, Reply, size_of
from atoll.island import Host
from atoll.island.numpy_model import VectorView, vector_model
from atoll.island.progress import IslandCounters
from atoll.protocol import JoinRequest
from atoll.protocol.coordinator_state import CoordinatorState
from atoll.protocol.events import SettingsChanged
from atoll.simulate import (
    FaultPlan,
    SimProcess,
    SimWorld,
    apply,
)
from atoll.simulate.hosts import (
    CoordinatorHost,
    SimRuntime,
)
from atoll.simulate.storms import COORDINATOR
from atoll.wire import Roster, Verdict

NUM_ISLANDS = 4
SYNC_EVERY = 30
WINDOW_S = 60.0
"""What a window takes on an island that nothing slows down."""

JITTER = 0.2
"""An inner step takes up to so much more or less, drawn anew each time."""

UPDATE_BYTES = 10_000
MODEL = vector_model({"w": (UPDATE_BYTES // 2,)})

ANSWER_S = 120.0
"""How long a call waits for its answer: longer than any link here needs."""

NEVER_S, AT_ONCE_S = 1e6, 1e-6
SEED = 0


@dataclass
class Ran:
    """What a run came to."""

    seconds: float
    rosters: list[Roster] = field(default_factory=list)
    """Of every committed round."""

    opened_s: list[float] = field(default_factory=list)
    """When each round opened, and the one that is open at the end."""

    learned_s: list[dict[str, float]] = field(default_factory=list)
    """Each island's learned deadline in each of these rounds."""

    lives: list[Life] = field(default_factory=list)

    @property
    def rounds_per_hour(self) -> float:
        return len(self.rosters) / self.seconds * 3600

    @property
    def num_late(self) -> int:
        entries = [entry for roster in self.rosters for entry in roster.entries]
        return sum(entry.verdict is Verdict.LATE for entry in entries)

    @property
    def num_dropped(self) -> int:
        return sum(life.counters.dropped for life in self.lives)

    @property
    def windows_per_hour(self) -> float:
        """Windows of work that counted, of all islands together."""
        counted = sum(life.counted_steps for life in self.lives)
        return counted / SYNC_EVERY / self.seconds * 3600

    @property
    def lost(self) -> float:
        """The share of inner steps that the run dropped; deaths are not its doing."""
        steps = sum(life.counters.inner_steps for life in self.lives)
        return sum(life.dropped_steps for life in self.lives) / steps

    @property
    def waiting(self) -> float:
        """The share of the islands' time that training stood still for an outcome."""
        lived_s = sum(life.seconds(self.seconds) for life in self.lives)
        return sum(life.counters.wait_s for life in self.lives) / lived_s


@dataclass
class Life:
    """One life of an island, and what became of its inner steps."""

    island: str
    born_s: float
    counters: IslandCounters
    died_s: float | None = None
    counted_steps: int = 0
    dropped_steps: int = 0
    steps_in_hand: int = 0

    def seconds(self, now_s: float) -> float:
        return (now_s if self.died_s is None else self.died_s) - self.born_s

    def settle(self, before: tuple[int, int]) -> None:
        """Note a step; without overlap, all in hand share the fate of the last seal."""
        self.steps_in_hand += 1
        if self.counters.dropped > before[1]:
            self.dropped_steps += self.steps_in_hand
        elif self.counters.counted > before[0]:
            self.counted_steps += self.steps_in_hand
        else:
            return
        self.steps_in_hand = 0


def run(
    plan: FaultPlan,
    *,
    timeout_s: float | None = None,
    since: str = "first",
    deadline_max_s: float = 600.0,
    window_s: float = WINDOW_S,
    hours: float = 1.0,
) -> Ran:
    """Let islands train under `plan`; with `timeout_s` nothing is learned.

    A fixed timeout counts from the `first` update of a round, or from its `opening`.
    """
    settings = RunSettings.from_dict(
        {
            "run": {"start_islands": NUM_ISLANDS},
            "sync": {"sync_every": SYNC_EVERY},
            "limits": {"deadline_max_s": deadline_max_s},
        }
    )
    ran = Ran(hours * 3600)
    with SimWorld(SEED) as world:
        coordinator = CoordinatorHost(world, settings)
        coordinator.start()
        for number in range(NUM_ISLANDS):
            _Island(world, f"i{number}", ran, window_s / SYNC_EVERY).start()
        apply(plan, world)
        fixed = None
        if timeout_s is not None:
            fixed = _Fixed(world, coordinator, timeout_s, since == "opening")
        world.scheduler.after_event = _Watch(world, coordinator, ran, fixed)
        world.scheduler.run(ran.seconds)
        assert coordinator.service is not None
        rosters = coordinator.service.journal.recorded.rosters
        ran.rosters = [rosters[key] for key in sorted(rosters)]
    return ran


class _Watch:
    """Sees rounds open and get their first update."""

    def __init__(
        self,
        world: SimWorld,
        coordinator: CoordinatorHost,
        ran: Ran,
        fixed: _Fixed | None,
    ) -> None:
        self._scheduler, self._coordinator = world.scheduler, coordinator
        self._ran, self._fixed = ran, fixed
        self._seen = (0, False)

    def __call__(self) -> None:
        service = self._coordinator.service
        if service is None or not service.state.has_started:
            return
        round = service.state.rounds[0]
        seen, before = (round.number, bool(round.staged)), self._seen
        if seen == before:
            return
        self._seen = seen
        if before[0] != round.number:
            self._note(service.state)
        if self._fixed:
            self._fixed.see(round.number, has_update=bool(round.staged))

    def _note(self, state: CoordinatorState) -> None:
        limits = state.settings.limits
        self._ran.opened_s.append(self._scheduler.now_s)
        self._ran.learned_s.append(
            {
                name: deadline_s(
                    member.arrivals_of(0),
                    patience=state.settings.run.patience,
                    lower_s=limits.deadline_min_s,
                    upper_s=limits.deadline_max_s,
                )
                for name, member in state.members.known.items()
            }
        )


class _Fixed:
    """Nobody is late before the timeout of a round, and everybody after it."""

    def __init__(
        self,
        world: SimWorld,
        coordinator: CoordinatorHost,
        timeout_s: float,
        is_since_opening: bool,
    ) -> None:
        self._scheduler, self._clock = world.scheduler, world.clocks[COORDINATOR]
        self._coordinator, self._timeout_s = coordinator, timeout_s
        self._is_since_opening = is_since_opening
        self._number = 0

    def see(self, number: int, *, has_update: bool) -> None:
        """Begin to count, at the opening of a round or at its first update."""
        if number != self._number:
            self._number = number
            self._set(NEVER_S)
        if has_update != self._is_since_opening:
            at_s = self._scheduler.now_s + self._timeout_s
            self._scheduler.at(at_s, partial(self._expire, number))

    def _expire(self, number: int) -> None:
        if number == self._number:
            self._set(AT_ONCE_S)

    def _set(self, limit_s: float) -> None:
        assert self._coordinator.service is not None
        keys = "limits.deadline_min_s", "limits.deadline_max_s"
        event = SettingsChanged(dict.fromkeys(keys, limit_s))
        self._coordinator.service.change(event, self._clock.now_s())


class _Island:
    """Lives one life after another, each noted in what the run came to."""

    def __init__(self, world: SimWorld, name: str, ran: Ran, step_s: float) -> None:
        self._world, self._name, self._ran = world, name, ran
        self._step_s = step_s
        self._process = world.add(name)
        self._rng = random.Random(f"{world.scheduler.seed} {name}")
        self._life: Life | None = None

    def start(self) -> None:
        self._process.on_crash(self._die)
        self._process.start(self._train)

    def _die(self) -> None:
        if self._life is not None:
            self._life.died_s = self._world.scheduler.now_s
            self._life = None

    def _train(self) -> None:
        born_s = self._world.scheduler.now_s
        nonce = str(self._process.incarnation).encode()
        line = _PatientLine(self._world, self._process)
        host = Host(
            CoordinatorExchange(line, key=self._name.encode(), nonce=nonce),
            VectorView(),
            JoinRequest(model=MODEL, island=self._name),
            runtime=SimRuntime(self._world, self._process),
        )
        self._life = life = Life(self._name, born_s, host.counters)
        self._ran.lives.append(life)
        while True:
            pace = self._rng.uniform(1 - JITTER, 1 + JITTER)
            self._process.work(self._step_s * pace)
            before = host.counters.counted, host.counters.dropped
            host.stepped()
            life.settle(before)


class _PatientLine:
    """A `Line` that lets a slow link finish instead of sending all of it again."""

    def __init__(self, world: SimWorld, process: SimProcess) -> None:
        self._network, self._process = world.network, process
        self.runtime = SimRuntime(world, process)

    def call(self, call: Call) -> Reply:
        answer = self._network.call(
            self._process,
            COORDINATOR,
            call,
            size_bytes=size_of(call),
            timeout_s=ANSWER_S,
        )
        return cast(Reply, answer)
