"""Everything a run in virtual time is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from atoll.errors import UsageError
from atoll.settings.rules import nearest
from atoll.simulate.clock import SimClock
from atoll.simulate.disk import SimDisk
from atoll.simulate.network import Corrupter, Latency, Network
from atoll.simulate.process import (
    SimProcess,
)
from atoll.simulate.scheduler import Scheduler


@dataclass
class StoreTroubles:
    """What a store suffers from now."""

    outages: list[float] = field(default_factory=list)
    """While one lasts, requests fail with this chance, each half after the effect."""

    list_lags: list[float] = field(default_factory=list)
    """While one lasts, lists are up to so many seconds late."""

    roster_lags: list[float] = field(default_factory=list)
    """While one lasts, rosters are sent so many seconds after their decision."""

    damage: Callable[[str, str], object] = field(default=lambda how, prefix: None)
    """Damages an object, as `faults.Damage` says."""


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
        """Of those processes that are stores."""

    def add(self, name: str, *, clock_rate: float = 1.0) -> SimProcess:
        """Add a process that has not started, with a clock and an empty disk.

        Clocks of different processes begin at different times: what only works when
        they agree should not work here.
        """
        if name in self.processes:
            raise UsageError(f"Process {name!r} is there already. Choose another name.")
        origin_s = round(self.scheduler.random(f"clock {name}").uniform(0.0, 1e6), 3)
        process = SimProcess(name, self.scheduler)
        self.processes[name] = process
        self.clocks[name] = SimClock(self.scheduler, rate=clock_rate, origin_s=origin_s)
        self.disks[name] = SimDisk(process)
        return process

    def require(self, name: str) -> None:
        """Raise `UsageError` if no process has this name."""
        if name not in self.processes:
            known = nearest(name, self.processes) if self.processes else "add() one"
            raise UsageError(
                f"The plan names {name!r}, but no process is called that. "
                f"Did you mean {known!r}?"
            )

    def require_store(self, name: str) -> None:
        """Raise `UsageError` if the process of this name is no store."""
        if name not in self.stores:
            known = ", ".join(map(repr, self.stores)) or "none in this run"
            raise UsageError(
                f"The plan lets {name!r} fail as a store does, but it is none: the "
                f"stores are {known}. Name one of them."
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
