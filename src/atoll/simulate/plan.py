"""A plan of faults: plain data, built step by step or read from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.simulate import plan_file
from atoll.simulate.faults import (
    ClockDrift,
    ClockJump,
    Corrupt,
    Damage,
    Delay,
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
    """What goes wrong in a run. Every method returns a new plan with one fault more.

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
        """Let a process die, for `back_after_s` or for good."""
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
        """Stop a process as SIGSTOP does, and let it go on after `for_s`."""
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
        """Let a process's work take `factor` times as long."""
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
        """Let messages of a link take `by_s` longer."""
        return self.adding(
            Delay(
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
        """Lose messages of a link, each with chance `rate`."""
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
        """Deliver messages of a link twice, each with chance `rate`."""
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
        """Let messages of a link overtake each other by up to `by_s`."""
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
        """Change messages of a link, each with chance `rate`."""
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
        """Let each direction of a link carry at most `bytes_per_s`."""
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
        """Cut groups off from each other and from all who are not named."""
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
        """Let a process's disk take nothing more."""
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
        """Put a process's disk back to what it was `for_s` before, and restart it."""
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
        """Let a process's disk change no more."""
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
        """Let a process's clock jump ahead; below 0 it stands still for as long."""
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
        """Let a process's clock show `rate` seconds per true second."""
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
        """Let a store fail requests, each with chance `rate`."""
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
        """Let a store's lists be up to `by_s` late."""
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
        """Let rosters go to a store `by_s` after they were decided."""
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
        """Return the plan as a file: one `[[fault]]` table each."""
        return plan_file.written(self.faults)

    @classmethod
    def from_toml(cls, path: str | Path) -> FaultPlan:
        """Read a plan from a file; `UsageError` names what is wrong with it."""
        return cls(plan_file.read(Path(path)))
