"""Faults as data: what goes wrong, to whom, when and for how long.

A fault's moment is `at_s`, an instant of virtual time, or `at_round`, when the run
first reaches that round. What lasts, lasts `for_s`, or to the end without it.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from atoll.errors import UsageError
from atoll.simulate.fault_rules import checked
from atoll.simulate.links import ARROW


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong. Abstract; `FaultPlan` has a method for each kind."""

    kind: ClassVar[str]
    is_condition: ClassVar[bool] = False
    """Whether it holds from the start of the run when no moment is given."""

    at_s: float | None = None
    at_round: int | None = None

    def __post_init__(self) -> None:
        if self.at_s is None and self.at_round is None and self.is_condition:
            object.__setattr__(self, "at_s", 0.0)
        if (self.at_s is None) == (self.at_round is None):
            raise UsageError(
                f"A {self.kind} has at_s={self.at_s!r} and at_round={self.at_round!r}. "
                "Give exactly one of them."
            )
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            value = checked(self.kind, each.name, value)
            object.__setattr__(self, each.name, value)

    @property
    def names(self) -> tuple[str, ...]:
        """The processes this fault names."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """Return what differs from its default: subject, moment, then the rest."""
        default = {each.name: each.default for each in fields(self)}
        subject, *needed = [name for name in default if default[name] is MISSING]
        order = dict.fromkeys([subject, "at_s", "at_round", *needed, *default])
        values = {name: getattr(self, name) for name in order}
        return {name: v for name, v in values.items() if v != default[name]}


@dataclass(frozen=True, kw_only=True)
class OfProcess(Fault):
    """A fault of one process, its disk or its clock. Abstract."""

    process: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.process,)


@dataclass(frozen=True, kw_only=True)
class OfLink(Fault):
    """A fault of messages: `a->b` is one direction, `a` all of a's, `*` all. Abstract.

    It acts on messages sent while it lasts.
    """

    is_condition: ClassVar[bool] = True
    link: str
    for_s: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.link == "*" else tuple(self.link.split(ARROW))


@dataclass(frozen=True, kw_only=True)
class Kill(OfProcess):
    """The process dies, and its disk loses what was not synced.

    It comes back after `back_after_s`, or never. A process that is dead already stays
    as it is.
    """

    kind: ClassVar[str] = "kill"
    back_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Freeze(OfProcess):
    """The process stands still with all it has, and then goes on."""

    kind: ClassVar[str] = "freeze"
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Slow(OfProcess):
    """Work takes `factor` times as long."""

    kind: ClassVar[str] = "slow"
    is_condition: ClassVar[bool] = True
    factor: float
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Delay(OfLink):
    """Messages take `by_s` longer, each with chance `rate`."""

    kind: ClassVar[str] = "delay"
    by_s: float
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Loss(OfLink):
    """Messages are lost, each with chance `rate`."""

    kind: ClassVar[str] = "loss"
    rate: float


@dataclass(frozen=True, kw_only=True)
class Duplicate(OfLink):
    """Messages arrive twice, each with chance `rate`."""

    kind: ClassVar[str] = "duplicate"
    rate: float


@dataclass(frozen=True, kw_only=True)
class Reorder(OfLink):
    """Messages take up to `by_s` longer, each with chance `rate`, and so overtake."""

    kind: ClassVar[str] = "reorder"
    by_s: float
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Corrupt(OfLink):
    """Messages arrive changed, each with chance `rate`."""

    kind: ClassVar[str] = "corrupt"
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Throttle(OfLink):
    """A direction carries at most `bytes_per_s`."""

    kind: ClassVar[str] = "throttle"
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Partition(Fault):
    """Nothing passes between groups; processes that none names are one more group."""

    kind: ClassVar[str] = "partition"
    groups: tuple[tuple[str, ...], ...]
    for_s: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)


@dataclass(frozen=True, kw_only=True)
class FullDisk(OfProcess):
    """Whatever adds to the process's disk fails."""

    kind: ClassVar[str] = "disk_full"
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReadOnlyDisk(OfProcess):
    """Whatever changes the process's disk fails."""

    kind: ClassVar[str] = "disk_read_only"
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rollback(OfProcess):
    """A copy of the disk is made, and put back `for_s` later: the process restarts.

    What became durable in between is lost: only islands still have it.
    """

    kind: ClassVar[str] = "rollback"
    for_s: float


@dataclass(frozen=True, kw_only=True)
class ClockJump(OfProcess):
    """The clock jumps ahead by `by_s`; below 0 it stands still for as long."""

    kind: ClassVar[str] = "clock_jump"
    by_s: float


@dataclass(frozen=True, kw_only=True)
class ClockDrift(OfProcess):
    """The clock shows `rate` seconds per true second, from the moment on."""

    kind: ClassVar[str] = "clock_drift"
    is_condition: ClassVar[bool] = True
    rate: float


@dataclass(frozen=True, kw_only=True)
class Outage(OfProcess):
    """A store fails requests, each with chance `rate`, done before that or not."""

    kind: ClassVar[str] = "outage"
    is_condition: ClassVar[bool] = True
    rate: float = 1.0
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ListLag(OfProcess):
    """A store's lists are up to `by_s` late, for each object anew."""

    kind: ClassVar[str] = "list_lag"
    is_condition: ClassVar[bool] = True
    by_s: float
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RosterLag(OfProcess):
    """Who closes a round stands still for `by_s` before its roster goes to a store.

    Others go on meanwhile, and may close the round, publish, leave or return.
    """

    kind: ClassVar[str] = "roster_lag"
    is_condition: ClassVar[bool] = True
    by_s: float
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Damage(OfProcess):
    """An object of a store is damaged for good; which one is drawn from the seed.

    `how` is "flip" (one bit), "cut" (its end is gone), "swap" (another object of its
    kind stands there) or "remove". `prefix` is what its key begins with; without such
    an object, the next one that is put is damaged.
    """

    kind: ClassVar[str] = "damage"
    how: str
    prefix: str = ""


KINDS: dict[str, type[Fault]] = {
    each.kind: each
    for each in (
        *(Kill, Freeze, Slow, Delay, Loss, Duplicate, Reorder, Corrupt, Throttle),
        *(Partition, FullDisk, ReadOnlyDisk, Rollback, ClockJump, ClockDrift),
        *(Outage, ListLag, RosterLag, Damage),
    )
}
