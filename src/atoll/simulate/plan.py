"""A plan of faults: plain data, built step by step or read from a TOML file.

A file has one `[[fault]]` table for each fault:

    [[fault]]
    kind = "kill"
    process = "i2"
    at_s = 3.0
    back_after_s = 5.0

Rule 1: a file may be hostile; its size is checked before it is parsed.
Rule 2: an unknown key is an error that names the nearest key that exists.
Rule 3: the faults check their values themselves.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Generic, ParamSpec

from atoll.errors import UsageError
from atoll.fields import nearest, shown
from atoll.simulate.faults import (
    KINDS,
    ClockDrift,
    ClockJump,
    Corrupt,
    Damage,
    DelayFault,
    Duplicate,
    Fault,
    Freeze,
    FullDisk,
    Kill,
    ListLag,
    Loss,
    Outage,
    Partition,
    ReadOnlyDisk,
    Reorder,
    Rollback,
    RosterLag,
    Slow,
    Throttle,
)

P = ParamSpec("P")


@dataclass(frozen=True)
class FaultMethod(Generic[P]):
    """A method of `FaultPlan` that adds one kind of fault, with its parameters."""

    make_fault: Callable[P, Fault]

    def __get__(
        self, plan: FaultPlan, owner: type[FaultPlan] | None = None
    ) -> Callable[P, FaultPlan]:
        def add(*args: P.args, **kwargs: P.kwargs) -> FaultPlan:
            return plan.adding(self.make_fault(*args, **kwargs))

        return add


@dataclass(frozen=True)
class FaultPlan:
    """The faults of a run. Every method returns a new plan with one more fault.

    >>> plan = FaultPlan().kill("i2", at_s=3, back_after_s=5).loss("i1", rate=0.5)
    >>> [fault.kind for fault in plan.faults]
    ['kill', 'loss']
    """

    faults: tuple[Fault, ...] = ()

    kill = FaultMethod(Kill)
    freeze = FaultMethod(Freeze)
    slow = FaultMethod(Slow)
    delay = FaultMethod(DelayFault)
    loss = FaultMethod(Loss)
    duplicate = FaultMethod(Duplicate)
    reorder = FaultMethod(Reorder)
    corrupt = FaultMethod(Corrupt)
    throttle = FaultMethod(Throttle)
    disk_full = FaultMethod(FullDisk)
    disk_read_only = FaultMethod(ReadOnlyDisk)
    rollback = FaultMethod(Rollback)
    clock_jump = FaultMethod(ClockJump)
    clock_drift = FaultMethod(ClockDrift)
    outage = FaultMethod(Outage)
    list_lag = FaultMethod(ListLag)
    roster_lag = FaultMethod(RosterLag)
    damage = FaultMethod(Damage)

    def adding(self, fault: Fault) -> FaultPlan:
        """Return this plan with `fault` as its last."""
        return FaultPlan((*self.faults, fault))

    def partition(
        self,
        *groups: Sequence[str],
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Cut groups off from each other and from all unnamed processes."""
        named = tuple(map(tuple, groups))
        return self.adding(
            Partition(groups=named, at_s=at_s, at_round=at_round, for_s=for_s)
        )

    def to_toml(self) -> str:
        """Return the plan as TOML, with one `[[fault]]` table per fault."""
        return write_plan(self.faults)

    @classmethod
    def from_toml(cls, path: str | Path) -> FaultPlan:
        """Read a plan from a file; raise `UsageError` if it is not valid."""
        return cls(read_plan(Path(path)))


MAX_FILE_BYTES = 2**20
MAX_FAULTS = 10_000


def write_plan(faults: Iterable[Fault]) -> str:
    """Return the faults as TOML; `parse_plan` of it gives equal ones."""
    return "\n".join(
        "".join(
            f"{line}\n"
            for line in (
                "[[fault]]",
                f"kind = {_literal(fault.kind)}",
                *(f"{key} = {_literal(v)}" for key, v in fault.values().items()),
            )
        )
        for fault in faults
    )


def read_plan(path: Path) -> tuple[Fault, ...]:
    """Return the faults of a file; raise `UsageError` if it is not valid."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise UsageError(
            f"The fault plan {str(path)!r} cannot be read: {exc.strerror}. "
            "Check the path and its permissions."
        ) from exc
    return parse_plan(data, source=f"The fault plan {str(path)!r}")


def parse_plan(data: bytes, *, source: str = "The fault plan") -> tuple[Fault, ...]:
    """Return the faults that `data` contains as TOML."""
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(
            f"{source} is larger than {MAX_FILE_BYTES} bytes. "
            "A plan holds a few tables; check the path."
        )
    try:
        tables = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{source} is not valid TOML: {exc}. Correct it.") from exc
    rows = tables.pop("fault", [])
    if tables or not isinstance(rows, list) or len(rows) > MAX_FAULTS:
        keys = ", ".join(shown(key) for key in list(tables)[:3]) or "no other key"
        raise UsageError(
            f"{source} must hold at most {MAX_FAULTS} [[fault]] tables and nothing "
            f"else, but has {keys} beside them, or too many. Keep only [[fault]]."
        )
    return tuple(
        _parse_fault(row, source=f"{source}, fault {number}")
        for number, row in enumerate(rows, 1)
    )


def _parse_fault(row: Any, *, source: str) -> Fault:
    if not isinstance(row, dict):
        raise UsageError(f"{source}: {shown(row)} is not a table. Write [[fault]].")
    values = dict(row)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(
            f"{source}: kind={shown(kind)} is not a kind of fault. "
            f"Did you mean {nearest(str(kind), KINDS)!r}?"
        )
    _check_keys(KINDS[kind], values, source=source)
    try:
        return KINDS[kind](**values)
    except UsageError as exc:
        raise UsageError(f"{source}: {exc}") from exc


def _check_keys(kind: type[Fault], values: dict[str, Any], *, source: str) -> None:
    is_needed_by_key = {spec.name: spec.default is MISSING for spec in fields(kind)}
    for key in values:
        if key not in is_needed_by_key:
            raise UsageError(
                f"{source}: a {kind.kind} has no {shown(key)}. "
                f"Did you mean {nearest(key, is_needed_by_key)!r}?"
            )
    for key, is_needed in is_needed_by_key.items():
        if is_needed and key not in values:
            raise UsageError(f"{source}: a {kind.kind} needs {key!r}. Add it.")


def _literal(value: object) -> str:
    """Return a value as TOML: names are printable, so that JSON strings are TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
