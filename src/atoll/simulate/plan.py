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
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from atoll.errors import UsageError
from atoll.settings.rules import nearest, shown
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


@dataclass(frozen=True)
class FaultPlan:
    """The faults of a run. Every method returns a new plan with one more fault.

    >>> plan = FaultPlan().kill("i2", at_s=3, back_after_s=5).loss("i1", rate=0.5)
    >>> [fault.kind for fault in plan.faults]
    ['kill', 'loss']
    """

    faults: tuple[Fault, ...] = ()

    def adding(self, fault: Fault) -> FaultPlan:
        """Return this plan with `fault` as its last."""
        return FaultPlan((*self.faults, fault))

    def kill(
        self,
        process: str,
        *,
        at_s: float | None = None,
        at_round: int | None = None,
        back_after_s: float | None = None,
    ) -> FaultPlan:
        """Kill a process, and restart it after `back_after_s` if that is given."""
        return self.adding(
            Kill(
                process=process,
                at_s=at_s,
                at_round=at_round,
                back_after_s=back_after_s,
            )
        )

    def freeze(
        self,
        process: str,
        *,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Stop a process as SIGSTOP does, and resume it after `for_s`."""
        return self.adding(
            Freeze(
                process=process,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def slow(
        self,
        process: str,
        *,
        factor: float,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Make the work of a process take `factor` times as long."""
        return self.adding(
            Slow(
                process=process,
                factor=factor,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def delay(
        self,
        link: str,
        *,
        by_s: float,
        rate: float = 1.0,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Delay messages of a link by `by_s`, each with probability `rate`."""
        return self.adding(
            DelayFault(
                link=link,
                by_s=by_s,
                rate=rate,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def loss(
        self,
        link: str,
        *,
        rate: float,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Lose messages of a link, each with probability `rate`."""
        return self.adding(
            Loss(
                link=link,
                rate=rate,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def duplicate(
        self,
        link: str,
        *,
        rate: float,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Deliver messages of a link twice, each with probability `rate`."""
        return self.adding(
            Duplicate(
                link=link,
                rate=rate,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def reorder(
        self,
        link: str,
        *,
        by_s: float,
        rate: float = 1.0,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Reorder messages of a link: each is delayed by up to `by_s`."""
        return self.adding(
            Reorder(
                link=link,
                by_s=by_s,
                rate=rate,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def corrupt(
        self,
        link: str,
        *,
        rate: float = 1.0,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Change messages of a link, each with probability `rate`."""
        return self.adding(
            Corrupt(
                link=link,
                rate=rate,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def throttle(
        self,
        link: str,
        *,
        bytes_per_s: float,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Limit each direction of a link to `bytes_per_s`."""
        return self.adding(
            Throttle(
                link=link,
                bytes_per_s=bytes_per_s,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def partition(
        self,
        *groups: Sequence[str],
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Cut groups off from each other and from all unnamed processes."""
        return self.adding(
            Partition(
                groups=tuple(map(tuple, groups)),
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def disk_full(
        self,
        process: str,
        *,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Make the disk of a process full."""
        return self.adding(
            FullDisk(
                process=process,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def rollback(
        self,
        process: str,
        *,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float,
    ) -> FaultPlan:
        """Copy a process's disk, restore the copy after `for_s`, and restart it."""
        return self.adding(
            Rollback(process=process, at_s=at_s, at_round=at_round, for_s=for_s)
        )

    def disk_read_only(
        self,
        process: str,
        *,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Make the disk of a process read-only."""
        return self.adding(
            ReadOnlyDisk(
                process=process,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def clock_jump(
        self,
        process: str,
        *,
        by_s: float,
        at_s: float | None = None,
        at_round: int | None = None,
    ) -> FaultPlan:
        """Set a process's clock ahead by `by_s`; below 0 it stands still instead."""
        return self.adding(
            ClockJump(
                process=process,
                by_s=by_s,
                at_s=at_s,
                at_round=at_round,
            )
        )

    def clock_drift(
        self,
        process: str,
        *,
        rate: float,
        at_s: float | None = None,
        at_round: int | None = None,
    ) -> FaultPlan:
        """Make a process's clock show `rate` seconds per true second."""
        return self.adding(
            ClockDrift(
                process=process,
                rate=rate,
                at_s=at_s,
                at_round=at_round,
            )
        )

    def outage(
        self,
        process: str,
        *,
        rate: float = 1.0,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Fail requests to a store, each with probability `rate`."""
        return self.adding(
            Outage(
                process=process,
                rate=rate,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def list_lag(
        self,
        process: str,
        *,
        by_s: float,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Make the lists of a store up to `by_s` late."""
        return self.adding(
            ListLag(
                process=process,
                by_s=by_s,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def roster_lag(
        self,
        process: str,
        *,
        by_s: float,
        at_s: float | None = None,
        at_round: int | None = None,
        for_s: float | None = None,
    ) -> FaultPlan:
        """Delay rosters by `by_s` between their decision and their put."""
        return self.adding(
            RosterLag(
                process=process,
                by_s=by_s,
                at_s=at_s,
                at_round=at_round,
                for_s=for_s,
            )
        )

    def damage(
        self,
        process: str,
        *,
        how: str,
        prefix: str = "",
        at_s: float | None = None,
        at_round: int | None = None,
    ) -> FaultPlan:
        """Damage one object of a store: "flip", "cut", "swap" or "remove" it."""
        return self.adding(
            Damage(
                process=process,
                how=how,
                prefix=prefix,
                at_s=at_s,
                at_round=at_round,
            )
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
