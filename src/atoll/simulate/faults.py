"""Faults as data: the kind, the target, the moment and the duration of each.

The moment of a fault is `at_s`, an instant of virtual time, or `at_round`, when the run
first reaches that round. A fault with a duration lasts `for_s`, or to the end of the
run if that is None.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from atoll.errors import UsageError
from atoll.fields import FieldLanguage, JsonField, shown
from atoll.simulate.network import ARROW


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a process, a link or a store. Abstract; see `FaultPlan`."""

    kind: ClassVar[str]
    is_condition: ClassVar[bool] = False
    """Whether it begins with the run when no moment is given."""

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
        for spec in fields(self):
            value = getattr(self, spec.name)
            if value is None and spec.default is None:
                continue
            value = checked(self.kind, spec.name, value)
            object.__setattr__(self, spec.name, value)

    @property
    def names(self) -> tuple[str, ...]:
        """The processes this fault names."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """Return the fields that differ from their default: subject, moment, others."""
        default = {spec.name: spec.default for spec in fields(self)}
        subject, *needed = [name for name in default if default[name] is MISSING]
        order = dict.fromkeys([subject, "at_s", "at_round", *needed, *default])
        values = {name: getattr(self, name) for name in order}
        return {name: v for name, v in values.items() if v != default[name]}


@dataclass(frozen=True, kw_only=True)
class ProcessFault(Fault):
    """A fault of one process, its disk or its clock. Abstract."""

    process: str = field(kw_only=False)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.process,)


@dataclass(frozen=True, kw_only=True)
class LinkFault(Fault):
    """A fault of messages: `a->b` is one direction, `a` all of a's, `*` all. Abstract.

    It acts on messages sent while it lasts.
    """

    is_condition: ClassVar[bool] = True
    link: str = field(kw_only=False)
    for_s: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.link == "*" else tuple(self.link.split(ARROW))


@dataclass(frozen=True, kw_only=True)
class Kill(ProcessFault):
    """The process dies, and its disk loses unsynced bytes.

    It restarts after `back_after_s`, or never. A process that is dead already is left
    unchanged.
    """

    kind: ClassVar[str] = "kill"
    back_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Freeze(ProcessFault):
    """The process stops, as by SIGSTOP, and then resumes."""

    kind: ClassVar[str] = "freeze"
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Slow(ProcessFault):
    """Work takes `factor` times as long."""

    kind: ClassVar[str] = "slow"
    is_condition: ClassVar[bool] = True
    factor: float
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class DelayFault(LinkFault):
    """Messages take `by_s` longer, each with probability `rate`."""

    kind: ClassVar[str] = "delay"
    by_s: float
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Loss(LinkFault):
    """Messages are lost, each with probability `rate`."""

    kind: ClassVar[str] = "loss"
    rate: float


@dataclass(frozen=True, kw_only=True)
class Duplicate(LinkFault):
    """Messages arrive twice, each with probability `rate`."""

    kind: ClassVar[str] = "duplicate"
    rate: float


@dataclass(frozen=True, kw_only=True)
class Reorder(LinkFault):
    """Messages overtake: each takes up to `by_s` longer, with probability `rate`."""

    kind: ClassVar[str] = "reorder"
    by_s: float
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Corrupt(LinkFault):
    """Messages arrive changed, each with probability `rate`."""

    kind: ClassVar[str] = "corrupt"
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Throttle(LinkFault):
    """A direction carries at most `bytes_per_s`."""

    kind: ClassVar[str] = "throttle"
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Partition(Fault):
    """No message passes between groups; unnamed processes are one more group."""

    kind: ClassVar[str] = "partition"
    groups: tuple[tuple[str, ...], ...]
    for_s: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)


@dataclass(frozen=True, kw_only=True)
class FullDisk(ProcessFault):
    """Every write that adds to the process's disk fails."""

    kind: ClassVar[str] = "disk_full"
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReadOnlyDisk(ProcessFault):
    """Every change of the process's disk fails."""

    kind: ClassVar[str] = "disk_read_only"
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rollback(ProcessFault):
    """A copy of the disk is made, and restored `for_s` later: the process restarts.

    Bytes that became durable in between are lost: only islands still have them.
    """

    kind: ClassVar[str] = "rollback"
    for_s: float


@dataclass(frozen=True, kw_only=True)
class ClockJump(ProcessFault):
    """The clock jumps ahead by `by_s`; below 0 it stands still for that time."""

    kind: ClassVar[str] = "clock_jump"
    by_s: float


@dataclass(frozen=True, kw_only=True)
class ClockDrift(ProcessFault):
    """The clock shows `rate` seconds per true second from then on."""

    kind: ClassVar[str] = "clock_drift"
    is_condition: ClassVar[bool] = True
    rate: float


@dataclass(frozen=True, kw_only=True)
class Outage(ProcessFault):
    """A store fails requests with probability `rate`, before or after their effect."""

    kind: ClassVar[str] = "outage"
    is_condition: ClassVar[bool] = True
    rate: float = 1.0
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ListLag(ProcessFault):
    """A store's lists are up to `by_s` late, drawn for each object."""

    kind: ClassVar[str] = "list_lag"
    is_condition: ClassVar[bool] = True
    by_s: float
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class RosterLag(ProcessFault):
    """An island that closes a round waits for `by_s` before it puts the roster.

    Others continue meanwhile, and may close the round, publish, leave or return.
    """

    kind: ClassVar[str] = "roster_lag"
    is_condition: ClassVar[bool] = True
    by_s: float
    for_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Damage(ProcessFault):
    """An object of a store, drawn from the seed, is damaged until it is put again.

    `how` is "flip" (one bit), "cut" (its end is missing), "swap" (it has the content of
    another object of its kind) or "remove". Its key begins with `prefix`; if there is
    no such object yet, the next one that is put is damaged.
    """

    kind: ClassVar[str] = "damage"
    how: str
    prefix: str = ""


KINDS: dict[str, type[Fault]] = {
    fault.kind: fault
    for fault in (
        *(Kill, Freeze, Slow, DelayFault, Loss, Duplicate, Reorder, Corrupt, Throttle),
        *(Partition, FullDisk, ReadOnlyDisk, Rollback, ClockJump, ClockDrift),
        *(Outage, ListLag, RosterLag, Damage),
    )
}


MAX_S = 1e9
"""Some thirty years: a longer time is a typing error."""

MAX_NAME = 128
MAX_NAMES = 4096


def checked(kind: str, name: str, value: Any) -> Any:
    """Return a fault's value in its type; raise `UsageError` if it is out of range."""
    key = f"{kind}.{name}"
    return _RULES.get(key, _RULES[name]).read(value, key)


_LANGUAGE = FieldLanguage()
_NAME = _LANGUAGE.where(
    lambda name: (
        0 < len(name) <= MAX_NAME
        and name.isprintable()
        and ARROW not in name
        and name != "*"
    ),
    f"the name of a process: 1 to {MAX_NAME} printable characters. Choose one that the "
    "run has, for example 'i2'",
)


def _link(value: object, key: str) -> str:
    if value == "*":
        return str(value)
    ends = value.split(ARROW) if isinstance(value, str) else [value]
    if len(ends) > 2:
        raise UsageError(
            f"{key}={shown(value)} must be 'a', 'a{ARROW}b' or '*'. Name two ends."
        )
    return ARROW.join(_NAME.read(end, key) for end in ends)


def _groups(value: Any, key: str) -> tuple[tuple[str, ...], ...]:
    is_nested = isinstance(value, list | tuple) and all(
        isinstance(group, list | tuple) and group for group in value
    )
    names = [name for group in value for name in group] if is_nested else []
    if not 0 < len(names) <= MAX_NAMES or len(set(map(str, names))) < len(names):
        raise UsageError(
            f"{key}={shown(value)} must be groups of names, none empty and no name "
            "twice. Write for example [['i1', 'i2'], ['coordinator']]."
        )
    return tuple(tuple(_NAME.read(name, key) for name in group) for group in value)


DAMAGES = ("flip", "cut", "swap", "remove")

_SECONDS = _LANGUAGE.number(0.0, MAX_S)
_DURATION = _LANGUAGE.number(0.0, MAX_S, is_low_open=True)
_RULES: dict[str, JsonField[Any]] = {
    "at_s": _SECONDS,
    "at_round": _LANGUAGE.integer(1, 2**62 - 1),
    "for_s": _DURATION,
    "back_after_s": _SECONDS,
    "by_s": _DURATION,
    "clock_jump.by_s": _LANGUAGE.number(-MAX_S, MAX_S),
    "rate": _LANGUAGE.number(0.0, 1.0, is_low_open=True),
    "clock_drift.rate": _LANGUAGE.number(0.1, 10.0),
    "factor": _LANGUAGE.number(0.0, 1e6, is_low_open=True),
    "bytes_per_s": _LANGUAGE.number(0.0, 1e15, is_low_open=True),
    "process": _NAME,
    "link": JsonField(str, _link),
    "groups": JsonField(list, _groups),
    "how": _LANGUAGE.option(*DAMAGES),
    "prefix": _LANGUAGE.where(
        lambda text: len(text) <= MAX_NAME and text.isprintable(),
        f"at most {MAX_NAME} printable characters, with which a key begins",
    ),
}
"""Rules by field name; an entry with a kind takes precedence."""
