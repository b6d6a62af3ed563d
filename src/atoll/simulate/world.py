"""A world in virtual time, and the faults of a plan applied to it.

`SimDisk` is a disk in memory that loses unsynced bytes when the power is cut.
Rule 1: every file has content, of which a first part is durable.
Rule 2: a power cut keeps the durable part, and of the rest of each file, independently
    of the others, nothing, all, some whole appends, or a torn part.
Rule 3: a removal is not durable: the file may come back.
Rule 4: a mere crash of the process loses nothing, and makes nothing durable either.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from atoll.disk import LOCK, Data, check_name
from atoll.errors import DiskDenied, DiskFull, NoSuchFile, UsageError
from atoll.fields import nearest
from atoll.simulate import faults
from atoll.simulate.network import Corrupter, Latency, LinkConditions, Network
from atoll.simulate.plan import FaultPlan
from atoll.simulate.process import SimClock, SimProcess
from atoll.simulate.scheduler import ProcessDead, Scheduler


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

    def __exit__(self, *exc_info: object) -> None:
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


_COMPLETE_BUT_FAILED = 0.125
"""Probability that a file exists although `write_new` failed for lack of room."""


class SimDisk:
    """The disk of a process, or a disk by itself. Implements `atoll.disk.Disk`.

    It outlasts its process, and crashes whenever the process does. Calls are counted,
    and `crash_at` crashes before or after one of them; without a process, the disk
    then refuses every call until `crash` decides which bytes survive.
    """

    def __init__(
        self, process: SimProcess | None = None, *, rng: random.Random | None = None
    ) -> None:
        self.calls = 0
        self.is_full = False
        self.is_read_only = False
        self.room_bytes = 2**62
        """The result of `free_bytes`; it does not limit writes."""

        self.was_put_back = False
        """Whether it has lost durable bytes, which no invariant covers."""

        self._process = process
        self._rng = self._fate = rng or random.Random(0)
        if process is not None:
            # The survivors of a crash must not depend on earlier draws of a full disk.
            self._rng = process.scheduler.random(f"disk {process.name}")
            self._fate = process.scheduler.random(f"power {process.name}")
            process.on_crash(self.crash)
        self._files: dict[str, SimFile] = {}
        self._removed: dict[str, bytes] = {}
        """Removed files, which a power cut may bring back."""

        self._right_names: set[str] = set()
        """Names checked so far: most calls name the same few files."""

        self._crash_at: tuple[int, bool] | None = None
        self._is_down = False

    def crash_at(self, call: int, *, after: bool = False) -> None:
        """Crash just before or just after call number `call`, counted from 1."""
        self._crash_at = (call, after)

    def crash(
        self, rng: random.Random | None = None, *, is_power_cut: bool | None = None
    ) -> None:
        """Lose bytes that are not durable, if the power was cut; None draws that."""
        rng = rng or self._fate
        self._is_down = False
        if is_power_cut is None:
            is_power_cut = rng.random() < 0.75
        if not is_power_cut:
            return
        survivors = {}
        for name in sorted(self._files.keys() | self._removed.keys()):
            content = self._survivor(name, rng)
            if content is not None:
                survivors[name] = SimFile(content, is_durable=True)
        self._emit("power cut", f"{len(self._files)} files, {len(survivors)} survive")
        self._files, self._removed = survivors, {}

    def copy(self) -> Callable[[], None]:
        """Return a function that restores the disk to its present durable content."""
        files = {
            name: file.durable for name, file in self._files.items() if file.survives
        }

        def put_back() -> None:
            self._emit("put back", f"{len(files)} files, and {len(self._files)} gone")
            self._removed, self.was_put_back = {}, True
            self._files = {
                name: SimFile(content, is_durable=True)
                for name, content in files.items()
            }

        return put_back

    def append(self, name: str, data: Data) -> None:
        with self._call("append", name):
            self._check_writable(name)
            file, content = self._files.get(name) or self._make(name), bytes(data)
            if self.is_full:
                # A write that fails for lack of room may have written a part.
                file.append(content[: self._rng.randint(0, len(content))])
                raise _full(name)
            file.append(content)

    def sync(self, name: str) -> None:
        with self._call("sync", name):
            file = self._file(name)
            if not file.is_durable and (self.is_full or self.is_read_only):
                file.doubt()
                self._check_writable(name)
                raise _full(name)
            file.sync()
            self._removed.pop(name, None)

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        with self._call("write_new", name):
            self._check_writable(name)
            if name in self._files:
                raise UsageError(
                    f"{name} exists, and is never written twice. Remove it first."
                )
            content = b"".join(bytes(part) for part in parts)
            if self.is_full:
                if self._rng.random() < _COMPLETE_BUT_FAILED:
                    # Its content was synced before the rename: complete or absent.
                    self._make(name).append(content)
                    self._files[name].sync()
                    self._files[name].survives = False
                raise _full(name)
            self._make(name).append(content)
            self._files[name].sync()
            self._removed.pop(name, None)

    def read(self, name: str, first: int = 0, size: int | None = None) -> bytes:
        with self._call("read", name):
            last = None if size is None else first + size
            return bytes(self._file(name).content[first:last])

    def names(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        with self._call("names", folder or "all"):
            return sorted(name for name in self._files if name.startswith(prefix))

    def remove(self, name: str) -> None:
        with self._call("remove", name):
            self._check_writable(name)
            file = self._files.pop(name, None)
            if file is not None and file.survives:
                self._removed[name] = file.durable

    def free_bytes(self) -> int:
        return self.room_bytes

    def _call(self, action: str, name: str) -> _DiskCall:
        if self._is_down:
            raise ProcessDead("The disk is down after a crash: call crash() to reopen.")
        if self._process is not None:
            self._process.scheduler.check()
        if name not in self._right_names:
            self._check_name(name)
        self.calls += 1
        self._emit(action, name)
        if self._crash_at == (self.calls, False):
            self._die()
        return _DiskCall(self, self.calls)

    def _check_name(self, name: str) -> None:
        if check_name(name) == LOCK:
            raise UsageError(f"{name!r} is the lock of the disk. Use another name.")
        self._right_names.add(name)

    def _die(self) -> None:
        self._crash_at = None
        if self._process is None:
            self._is_down = True
        else:
            self._process.crash()
        raise ProcessDead(f"The disk's process crashed at call {self.calls}.")

    def _survivor(self, name: str, rng: random.Random) -> bytes | None:
        file = self._files.get(name)
        content = None if file is None else file.after_power_cut(rng)
        if content is None and name in self._removed and rng.random() < 0.5:
            return self._removed[name]
        return content

    def _file(self, name: str) -> SimFile:
        if name not in self._files:
            raise NoSuchFile(f"{name} does not exist.")
        return self._files[name]

    def _make(self, name: str) -> SimFile:
        parents = {name[:end] for end, character in enumerate(name) if character == "/"}
        folder = f"{name}/"
        for other in self._files:
            if other in parents or other.startswith(folder):
                raise UsageError(
                    f"{name} cannot be created: {other} is a file or directory of the "
                    "same name. Choose another name."
                )
        self._files[name] = SimFile()
        return self._files[name]

    def _check_writable(self, name: str) -> None:
        if self.is_read_only:
            raise DiskDenied(
                f"{name} cannot be written: the disk is read-only. Give this user the "
                "right to write there, or choose another directory."
            )

    def _emit(self, action: str, detail: str) -> None:
        if self._process is not None and self._process.scheduler.trace is not None:
            self._process.scheduler.emit(self._process.name, action, detail)


class _DiskCall:
    """Context of a call of a disk, after which it may crash."""

    __slots__ = ("_disk", "_number")

    def __init__(self, disk: SimDisk, number: int) -> None:
        self._disk, self._number = disk, number

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        if self._disk._crash_at == (self._number, True):
            self._disk._die()


def _full(name: str) -> DiskFull:
    return DiskFull(
        f"No room for {name}: the disk is full. Free some space there; nothing that "
        "was durable is lost."
    )


class SimFile:
    """Bytes that are durable up to a position.

    A failed sync leaves bytes in doubt: no later sync makes them durable, and after a
    power cut they may be zeros.
    """

    __slots__ = ("_doubts", "_ends", "_synced", "content", "survives")

    def __init__(self, content: bytes = b"", *, is_durable: bool = False) -> None:
        self.content = bytearray(content)
        self.survives = is_durable
        """Whether the file itself is durable, even if empty."""

        self._synced = len(content) if is_durable else 0
        self._ends: list[int] = []
        """End position of each append since the last sync."""

        self._doubts: list[tuple[int, int]] = []

    @property
    def is_durable(self) -> bool:
        return self.survives and self._synced == len(self.content)

    @property
    def durable(self) -> bytes:
        return bytes(self.content[: self._synced])

    def append(self, data: bytes) -> None:
        self.content += data
        self._ends.append(len(self.content))

    def sync(self) -> None:
        self._synced, self.survives = len(self.content), True
        self._ends.clear()

    def doubt(self) -> None:
        """Note that a sync has failed."""
        if self._synced < len(self.content):
            self._doubts.append((self._synced, len(self.content)))

    def after_power_cut(self, rng: random.Random) -> bytes | None:
        """Return the surviving content, or None if the file is lost."""
        if not self.survives and rng.random() < 0.25:
            return None
        content = self.content[: self._surviving_bytes(rng)]
        for first, last in self._doubts:
            if rng.random() < 0.5:
                content[first:last] = bytes(
                    min(last, len(content)) - min(first, len(content))
                )
        return bytes(content)

    def _surviving_bytes(self, rng: random.Random) -> int:
        match rng.choice(("nothing", "all", "appends", "torn")):
            case "nothing":
                return self._synced
            case "all":
                return len(self.content)
            case "appends":
                return rng.choice([self._synced, *self._ends])
            case _:
                return rng.randint(self._synced, len(self.content))
