"""A whole run in virtual time: islands, a plan of faults, one seed, and a topology.

The topology decides rounds: a coordinator, or rosters in a bucket.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from atoll.data import RowCounts
from atoll.errors import AtollError, AtollWarning, Unreachable
from atoll.exchange import CoordinatorExchange, Exchange
from atoll.exchange.bucket import BucketReader, StoreExchange, documents, keys
from atoll.exchange.bucket.documents import SettingsDocument, packed
from atoll.exchange.bucket.view import LEASE_S as BUCKET_LEASE_S
from atoll.protocol.membership import LEASE_S
from atoll.retry import STORE_OUTAGE
from atoll.settings import RunSettings
from atoll.simulate.hosts import CoordinatorHost, SimLine, SimRuntime
from atoll.simulate.invariants import InvariantWatch, Violation
from atoll.simulate.invariants.bucket import (
    BucketReferee,
    WatchedExchange,
    WatchedStore,
)
from atoll.simulate.invariants.claims import ISLANDS_CONTINUE
from atoll.simulate.invariants.coordinator import CoordinatorReferee
from atoll.simulate.invariants.incarnation import WatchedLine
from atoll.simulate.invariants.watch import (
    Referee,
    WatchedPorts,
    longest_silence_s,
    longest_wait_s,
)
from atoll.simulate.islands import (
    MODEL,
    STEP_S,
    STORE_STEP_S,
    Conditions,
    ExchangeFactory,
    IslandCallbacks,
    PlannedDeparture,
    SimIsland,
    TimeSpent,
)
from atoll.simulate.plan import FaultPlan
from atoll.simulate.process import SimProcess
from atoll.simulate.scheduler import ProcessFailed, TraceEvent
from atoll.simulate.store import Bucket, SimStore
from atoll.simulate.world import Armed, SimWorld, apply
from atoll.store import RetryingStore
from atoll.weights import lay_out

__all__ = [
    "MODEL",
    "STEP_S",
    "Conditions",
    "PlannedDeparture",
    "Simulated",
    "simulate",
    "without_warnings",
]

LIMIT_S = 6 * 3600.0
"""Limit of virtual time: a run that has not ended by then hangs."""

LOOK_S = 1.0
"""Interval between checks whether a run is over."""


@dataclass
class Simulated:
    """The result of a run."""

    seconds: float = 0.0
    """Virtual time until the last island had left."""

    events: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    """Of the anchors of all islands that saw the run end."""

    coordinator_digests: list[bytes] = field(default_factory=list)
    rounds: tuple[int, ...] = ()
    deaths: dict[str, int] = field(default_factory=dict)
    failures: dict[str, AtollError] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens by their outcome, summed over islands and fragments."""

    utilisation: dict[str, float] = field(default_factory=dict)
    """By island: the share of its time in the run that it spent in inner steps."""

    rows: RowCounts | None = None
    """Of the run's ledger at the end; None: it dealt out no rows."""

    violations: list[Violation] = field(default_factory=list)


def simulate(
    settings: RunSettings,
    *,
    islands: int = 4,
    faults: FaultPlan | None = None,
    seed: int = 0,
    trace: Callable[[TraceEvent], None] | None = None,
    departures: Mapping[str, PlannedDeparture] | None = None,
    conditions: Conditions | None = None,
    store: bool = False,
) -> Simulated:
    """Run to the settings' `end_rounds`, and return the result.

    The same arguments give the same run, event for event. `trace` is called with every
    message, fault and crash as it happens. Every invariant is checked, and the run
    stops at the first violation. By default the model is tiny, an inner step takes half
    a second, and links have a delay and no rate. With `store` there is no coordinator:
    islands exchange updates in a bucket, whose process is `store`, and an inner step
    takes two seconds.
    """
    conditions = conditions or Conditions(step_s=STORE_STEP_S if store else STEP_S)
    with SimWorld(seed, latency=conditions.latency) as world:
        world.scheduler.trace = trace
        topology: Topology
        if store:
            topology = BucketTopology(world, settings, conditions, islands=islands)
        else:
            topology = CoordinatorTopology(world, settings, conditions)
        run = _Run(world, topology, settings, islands, departures or {}, conditions)
        armed = apply(faults or FaultPlan(), world)
        return run.run(armed)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Silence the warnings and log of islands, which the trace contains already."""
    log = logging.getLogger("atoll")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AtollWarning)
            yield
    finally:
        log.setLevel(level)


class _Run:
    """A run in progress, and the check whether it is over."""

    def __init__(
        self,
        world: SimWorld,
        topology: Topology,
        settings: RunSettings,
        islands: int,
        departures: Mapping[str, PlannedDeparture],
        conditions: Conditions,
    ) -> None:
        self._world, self._settings = world, settings
        self._result = Simulated()
        self._watch = InvariantWatch(
            world,
            settings,
            lay_out(conditions.model, settings),
            islands=islands,
            silence_s=topology.silence_s(step_s=conditions.slowest_step_s),
            lease_s=topology.lease_s,
        )
        self._watch.referee = self._referee = topology.referee(self._watch)
        self._names = [f"i{number}" for number in range(islands)]
        self._result.deaths = dict.fromkeys(self._names, 0)
        self._open = set(self._names)
        """Islands that have not seen the end, and may yet."""

        self._is_calm = False
        self._reached = 0
        topology.open()
        callbacks = IslandCallbacks(
            died=self._died,
            ended=self._ended,
            departed=self._close_island,
            failed=self._failed,
        )
        self._time_spent: dict[str, TimeSpent] = {}
        for name in self._names:
            island = SimIsland(
                world,
                name,
                self._watch,
                callbacks,
                exchange_factory=topology.exchange_factory,
                conditions=conditions,
                departure=departures.get(name),
            )
            self._time_spent[name] = island.time_spent
            island.start()

    def run(self, armed: Armed) -> Simulated:
        """Run all events, and return the result."""
        scheduler, watch, result = self._world.scheduler, self._watch, self._result
        watch.on_commit = lambda lowest: self._reach(armed, lowest)
        watch.on_look = lambda: self._look(armed)
        scheduler.after_event = watch.after_event
        try:
            scheduler.run(LIMIT_S)
        except ProcessFailed as exc:
            watch.report(ISLANDS_CONTINUE, "process", f"{exc}: {exc.__cause__!r}")
        result.seconds, result.events = scheduler.now_s, scheduler.events
        self._conclude()
        return result

    def _died(self, name: str) -> None:
        self._result.deaths[name] += 1

    def _ended(self, name: str, digest: str) -> None:
        self._result.digests[name] = digest
        self._close_island(name)

    def _close_island(self, name: str) -> None:
        self._open.discard(name)
        self._watch.look_s = 0.0

    def _failed(self, name: str, exc: AtollError) -> None:
        self._result.failures[name] = exc
        self._close_island(name)
        self._watch.report(ISLANDS_CONTINUE, name, f"{type(exc).__name__}: {exc}")

    def _reach(self, armed: Armed, lowest: int) -> None:
        """Begin the faults of a round when every fragment has reached it."""
        while self._reached < lowest:
            self._reached += 1
            armed.reached(self._reached)

    def _look(self, armed: Armed) -> None:
        """Stop when every island has seen the end, or will not restart."""
        scheduler = self._world.scheduler
        self._watch.look_s = scheduler.now_s + LOOK_S
        if not self._is_calm and armed.calm_since_s is not None:
            self._is_calm = True
            self._watch.calm(armed.calm_since_s)
            self._watch.progress.calm(armed.calm_since_s)
        alive = [name for name in self._open if self._world.processes[name].is_alive]
        if not self._open or (self._is_calm and not alive):
            scheduler.stop()
        elif scheduler.now_s > self._watch.progress.due_s + self._last_wait_s:
            self._overdue(len(alive))

    @property
    def _last_wait_s(self) -> float:
        """The time for which an asynchronous run waits longer for its last updates."""
        is_ending = self._settings.sync.is_async and self._referee.is_ending
        return 1.1 * self._settings.limits.deadline_max_s if is_ending else 0.0

    def _overdue(self, num_alive: int) -> None:
        """Judge a time without commits: a run without a quorum waits correctly."""
        quorum = self._settings.run.quorum
        if num_alive < quorum or not self._referee.has_started:
            self._world.scheduler.stop()
        elif self._referee.has_ended:
            names = ", ".join(sorted(self._open))
            self._watch.report(
                ISLANDS_CONTINUE, names, "the run has ended, and it continues to train"
            )
        else:
            self._watch.progress.overdue(self._world.scheduler.now_s)

    def _conclude(self) -> None:
        result, referee = self._result, self._referee
        result.tokens = self._watch.conclude()
        result.utilisation = {
            name: time_spent.utilisation(result.seconds)
            for name, time_spent in self._time_spent.items()
        }
        result.violations = self._watch.violations
        result.coordinator_digests = referee.digests
        result.rows = referee.rows
        result.rounds = tuple(number - 1 for number in referee.opened)


class Topology(Protocol):
    """Decides rounds, and connects islands to the decisions."""

    @property
    def exchange_factory(self) -> ExchangeFactory: ...

    lease_s: float

    def silence_s(self, *, step_s: float) -> float:
        """Return the longest time without a commit while a quorum is connected."""
        ...

    def referee(self, watch: InvariantWatch) -> Referee: ...

    def open(self) -> None:
        """Start it, before the first island starts."""
        ...


class CoordinatorTopology:
    """A coordinator decides. Implements `Topology` and `ExchangeFactory`."""

    lease_s = LEASE_S

    def __init__(
        self, world: SimWorld, settings: RunSettings, conditions: Conditions
    ) -> None:
        self._world, self._settings = world, settings
        self._coordinator = CoordinatorHost(
            world, settings, evicted_after_s=conditions.evicted_after_s
        )
        self.open = self._coordinator.start

    @property
    def exchange_factory(self) -> ExchangeFactory:
        return self

    def silence_s(self, *, step_s: float) -> float:
        return longest_silence_s(self._settings, step_s=step_s)

    def referee(self, watch: InvariantWatch) -> Referee:
        return CoordinatorReferee(self._world, self._coordinator, watch)

    def exchange(
        self, process: SimProcess, number: int, ports: WatchedPorts
    ) -> Exchange:
        line = WatchedLine(
            SimLine(self._world, process), ports.incarnation, ports.learn
        )
        exchange = CoordinatorExchange(
            line, key=process.name.encode(), nonce=str(number).encode()
        )
        ports.incarnation.num_unconfirmed = lambda: len(exchange.unconfirmed)
        return exchange


class BucketTopology:
    """Rosters in a store decide. Implements `Topology`."""

    lease_s = BUCKET_LEASE_S

    def __init__(
        self,
        world: SimWorld,
        settings: RunSettings,
        conditions: Conditions,
        *,
        islands: int,
    ) -> None:
        self._world, self._settings, self._islands = world, settings, islands
        self._layout = lay_out(conditions.model, settings)
        self._bucket = Bucket(world)
        self._exchange_factory = BucketExchangeFactory(world, self._bucket, settings)
        self.open = self._exchange_factory.open

    @property
    def exchange_factory(self) -> ExchangeFactory:
        return self._exchange_factory

    def silence_s(self, *, step_s: float) -> float:
        return longest_wait_s(self._settings, step_s=step_s, islands=self._islands)

    def referee(self, watch: InvariantWatch) -> Referee:
        referee = BucketReferee(
            self._world, self._bucket, self._settings, self._layout, watch
        )
        self._exchange_factory.referee = referee
        return referee


STATE_ROUNDS = 3
"""Low, so that garbage is collected even in a short run."""


class BucketExchangeFactory:
    """Attaches islands to a bucket. Implements `ExchangeFactory`."""

    def __init__(self, world: SimWorld, bucket: Bucket, settings: RunSettings) -> None:
        self._world, self._bucket, self._settings = world, bucket, settings
        self.referee: BucketReferee

    def open(self) -> None:
        """Create the run, as `atoll init` does, under a constant name."""
        document = SettingsDocument(
            run="run", fingerprint=self._settings.fingerprint, settings=self._settings
        )
        settings = packed(documents.SETTINGS, document, keys.SETTINGS)
        self._bucket.objects[keys.SETTINGS] = b"".join(settings)
        self._bucket.changed_s[keys.SETTINGS] = 0.0
        self._bucket.begin()

    def exchange(
        self, process: SimProcess, number: int, ports: WatchedPorts
    ) -> Exchange:
        runtime = SimRuntime(self._world, process)
        store = SimStore(self._world, process)
        rng = random.Random(f"{self._world.scheduler.seed} {process.name} {number}")
        retrying = RetryingStore(
            store, sleep=runtime.sleep, policy=STORE_OUTAGE, rng=rng
        )
        watched = WatchedStore(retrying, self.referee, process, self._bucket.troubles)
        reader = self._open_reader(watched, runtime)
        watched.reader = reader
        store.is_locked = reader.lock._is_owned  # type: ignore[attr-defined]
        exchange = StoreExchange(
            reader,
            key=process.name.encode(),
            nonce=f"{process.name}.{number}".encode(),
            state_rounds=STATE_ROUNDS,
        )
        ports.incarnation.num_unconfirmed = lambda: len(exchange.unconfirmed)
        return WatchedExchange(exchange, runtime, ports)

    def _open_reader(self, store: WatchedStore, runtime: SimRuntime) -> BucketReader:
        """Open the run; retry while the store does not answer."""
        while True:
            try:
                return BucketReader.open(store, runtime, url="the simulated store")
            except Unreachable:
                runtime.sleep(1.0)
