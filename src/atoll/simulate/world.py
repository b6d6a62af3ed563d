"""A world in virtual time, and the faults of a plan applied to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

from atoll.errors import UsageError
from atoll.settings.rules import nearest
from atoll.simulate import faults
from atoll.simulate.disk import SimDisk
from atoll.simulate.network import Corrupter, Latency, LinkConditions, Network
from atoll.simulate.plan import FaultPlan
from atoll.simulate.process import SimClock, SimProcess
from atoll.simulate.scheduler import Scheduler


@dataclass
class StoreTroubles:
    """The present faults of a store."""

    outages: list[float] = field(default_factory=list)
    """Probabilities with which requests fail, half of them after their effect."""

    list_lags: list[float] = field(default_factory=list)
    """Seconds by which lists are late at most."""

    roster_lags: list[float] = field(default_factory=list)
    """Seconds between the decision of a roster and its put."""

    damage: Callable[[str, str], object] = field(default=lambda kind, prefix: None)
    """Damages an object, given `how` and `prefix` of a `faults.Damage`."""


class SimWorld:
    """Processes by name with their clocks and disks, and the network between them."""

    def __init__(
        self,
        seed: int,
        *,
        latency: Latency | None = None,
        corrupter: Corrupter | None = None,
    ) -> None:
        self.scheduler = Scheduler(seed)
        self.network = Network(self.scheduler, latency=latency, corrupter=corrupter)
        self.processes: dict[str, SimProcess] = {}
        self.clocks: dict[str, SimClock] = {}
        self.disks: dict[str, SimDisk] = {}
        self.stores: dict[str, StoreTroubles] = {}
        """Faults of the processes that are stores."""

    def add(self, name: str, *, clock_rate: float = 1.0) -> SimProcess:
        """Add a process that has not started, with a clock and an empty disk.

        Clocks of different processes begin at different times, so that code which
        relies on equal clocks fails.
        """
        if name in self.processes:
            raise UsageError(f"Process {name!r} exists already. Choose another name.")
        origin_s = round(self.scheduler.random(f"clock {name}").uniform(0.0, 1e6), 3)
        process = SimProcess(name, self.scheduler)
        self.processes[name] = process
        self.clocks[name] = SimClock(self.scheduler, rate=clock_rate, origin_s=origin_s)
        self.disks[name] = SimDisk(process)
        return process

    def require(self, name: str) -> None:
        """Raise `UsageError` if no process has this name."""
        if name not in self.processes:
            suggestion = (
                nearest(name, self.processes) if self.processes else "add() one"
            )
            raise UsageError(
                f"The plan names {name!r}, but no process is called that. "
                f"Did you mean {suggestion!r}?"
            )

    def require_store(self, name: str) -> None:
        """Raise `UsageError` if the process of this name is no store."""
        if name not in self.stores:
            stores = ", ".join(map(repr, self.stores)) or "none in this run"
            raise UsageError(
                f"The plan has a fault of a store for {name!r}, which is not one: the "
                f"stores are {stores}. Name one of them."
            )

    def __enter__(self) -> SimWorld:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.scheduler.close()


Undo = Callable[[], object]


def apply(plan: FaultPlan, world: SimWorld) -> Armed:
    """Schedule every fault of `plan` in `world`, or begin it now if it is due.

    Faults of a round begin when the caller calls `reached` of the returned object.
    Faults that overlap act together until the last of them ends.

    Raises:
        UsageError: the plan names a process that the world does not have, or a store
            that is not one.
    """
    for fault in plan.faults:
        for name in fault.names:
            world.require(name)
            if isinstance(
                fault, faults.Outage | faults.ListLag | faults.RosterLag | faults.Damage
            ):
                world.require_store(name)
    armed = Armed(plan, world)
    for fault in plan.faults:
        if fault.at_s is None:
            continue
        if fault.at_s <= world.scheduler.now_s:
            armed.begin(fault)
        else:
            world.scheduler.at(fault.at_s, partial(armed.begin, fault))
    return armed


class Armed:
    """A plan that is applied to a world."""

    def __init__(self, plan: FaultPlan, world: SimWorld) -> None:
        self._world = world
        self._by_round: dict[int, list[faults.Fault]] = {}
        for fault in plan.faults:
            if fault.at_round is not None:
                self._by_round.setdefault(fault.at_round, []).append(fault)
        self._to_come = len(plan.faults)
        self._at_work = 0
        self._holds: dict[tuple[str, str], int] = {}
        self.calm_since_s: float | None = None if plan.faults else 0.0
        """Since when no fault is active or to come; None before."""

    def reached(self, round: int) -> None:
        """Begin the faults of this round, once, after the event that runs now."""
        for fault in self._by_round.pop(round, ()):
            scheduler = self._world.scheduler
            scheduler.at(scheduler.now_s, partial(self.begin, fault))

    def begin(self, fault: faults.Fault) -> None:
        """Begin one fault, and schedule its end."""
        self._to_come -= 1
        self._at_work += 1
        scheduler = self._world.scheduler
        scheduler.emit("fault", fault.kind, str(fault.values()))
        undo, for_s = self._perform(fault)
        if undo is None:
            self._end(fault, _do_nothing)
        elif for_s is not None:
            scheduler.at(scheduler.now_s + for_s, partial(self._end, fault, undo))

    def _end(self, fault: faults.Fault, undo: Undo) -> None:
        undo()
        self._at_work -= 1
        if self._at_work == self._to_come == 0:
            self.calm_since_s = self._world.scheduler.now_s

    def _perform(self, fault: faults.Fault) -> tuple[Undo | None, float | None]:
        """Perform `fault`; return the function that undoes it, and after which time.

        The function is None if there is nothing to undo, the time None for never.
        """
        world = self._world
        match fault:
            case faults.Kill():
                return self._kill(fault), fault.back_after_s
            case faults.Freeze() if world.processes[fault.process].is_alive:
                process = world.processes[fault.process]
                return partial(process.thaw, process.freeze()), fault.for_s
            case faults.Slow():
                slowdowns = world.processes[fault.process].slowdowns
                slowdowns.append(fault.factor)
                return partial(slowdowns.remove, fault.factor), fault.for_s
            case faults.Partition():
                return partial(world.network.heal, world.network.cut(fault.groups)), (
                    fault.for_s
                )
            case faults.FullDisk() | faults.ReadOnlyDisk():
                return self._hold(fault), fault.for_s
            case faults.Rollback():
                return self._roll_back(fault), fault.for_s
            case faults.Outage():
                return _append(world.stores[fault.process].outages, fault.rate), (
                    fault.for_s
                )
            case faults.ListLag():
                return _append(world.stores[fault.process].list_lags, fault.by_s), (
                    fault.for_s
                )
            case faults.RosterLag():
                return _append(world.stores[fault.process].roster_lags, fault.by_s), (
                    fault.for_s
                )
            case faults.Damage():
                world.stores[fault.process].damage(fault.how, fault.prefix)
            case faults.ClockJump():
                world.clocks[fault.process].jump(fault.by_s)
            case faults.ClockDrift():
                world.clocks[fault.process].set_rate(fault.rate)
            case faults.LinkFault():
                condition = conditions_of(fault)
                world.network.expose(condition)
                return partial(world.network.clear, condition), fault.for_s
        return None, None

    def _kill(self, fault: faults.Kill) -> Undo | None:
        process = self._world.processes[fault.process]
        if not process.is_alive:
            return None
        process.crash()
        if fault.back_after_s is None:
            return None
        return lambda: None if process.is_alive else process.restart()

    def _roll_back(self, fault: faults.Rollback) -> Undo:
        process = self._world.processes[fault.process]
        put_back = self._world.disks[fault.process].copy()

        def undo() -> None:
            if process.is_alive:
                process.crash()
            put_back()
            process.restart()

        return undo

    def _hold(self, fault: faults.FullDisk | faults.ReadOnlyDisk) -> Undo:
        self._set_disk(fault, by=1)
        return partial(self._set_disk, fault, by=-1)

    def _set_disk(
        self, fault: faults.FullDisk | faults.ReadOnlyDisk, *, by: int
    ) -> None:
        key = (fault.process, fault.kind)
        self._holds[key] = self._holds.get(key, 0) + by
        disk = self._world.disks[fault.process]
        if isinstance(fault, faults.FullDisk):
            disk.is_full = self._holds[key] > 0
        else:
            disk.is_read_only = self._holds[key] > 0


def conditions_of(fault: faults.LinkFault) -> LinkConditions:
    """Return the link conditions of a fault of messages."""
    match fault:
        case faults.DelayFault():
            return LinkConditions(
                link=fault.link, delay_s=fault.by_s, delay_rate=fault.rate
            )
        case faults.Reorder():
            return LinkConditions(
                link=fault.link, spread_s=fault.by_s, spread_rate=fault.rate
            )
        case faults.Loss():
            return LinkConditions(link=fault.link, loss=fault.rate)
        case faults.Duplicate():
            return LinkConditions(link=fault.link, duplicate=fault.rate)
        case faults.Corrupt():
            return LinkConditions(link=fault.link, corrupt=fault.rate)
        case faults.Throttle():
            return LinkConditions(link=fault.link, bytes_per_s=fault.bytes_per_s)
        case _:
            raise AssertionError(f"no link conditions for {fault}")


def _append(values: list[float], trouble: float) -> Undo:
    values.append(trouble)
    return partial(values.remove, trouble)


def _do_nothing() -> None:
    """Undo a fault that has nothing to undo."""
