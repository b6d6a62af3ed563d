"""The launcher of engines that run each island as a separate job.

`Jobs` has the calls of such an engine, and `JobLauncher` their order.
Rule 1: a handle is kept before the first job is submitted and after each, so a launch
that was interrupted can be ended.
Rule 2: an id is launched once: before a handle is kept, because the caller would end
the other launch by it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from atoll.errors import UsageError
from atoll.launch import base


@dataclass(frozen=True)
class FoundJob:
    """The job of an island that its engine knows."""

    report: base.Report
    job: Any
    """The engine's own object."""


@dataclass(frozen=True)
class JobsToEnd:
    """The islands that are to end."""

    indexes: Collection[int]
    jobs: Mapping[int, Any]
    """The jobs of those that were found and are not over."""

    grace_s: float


class Jobs(Protocol):
    """The jobs of one engine. `JobLauncher` is the only caller.

    Errors are those of the methods of `base.Launcher`.
    """

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        """As `Launcher.plan`; the data has one entry for each island."""
        ...

    def begin(self, order: base.LaunchOrder) -> dict[str, Any]:
        """Return the reference of the first handle. Nothing has been submitted."""
        ...

    def submit(
        self, order: base.LaunchOrder, plan: base.LaunchPlan, handle: base.Handle
    ) -> Iterator[base.Handle]:
        """Submit every job, and yield each changed handle to be kept."""
        ...

    def find(
        self, handle: base.Handle, indexes: Collection[int]
    ) -> dict[int, FoundJob]:
        """Return the jobs of some islands, at least, that the engine knows."""
        ...

    def lines(self, handle: base.Handle, index: int, job: Any) -> list[str]:
        """Return the log lines of an island."""
        ...

    def end(self, handle: base.Handle, request: JobsToEnd) -> None:
        """End the islands of a request."""
        ...


class JobLauncher:
    """A launcher whose state is at the engine and in handles."""

    def __init__(
        self,
        jobs: Jobs,
        *,
        engine: str,
        options: Mapping[str, str],
        traits: base.Traits | None = None,
    ) -> None:
        self._jobs, self._engine, self._options = jobs, engine, dict(options)
        self._traits = traits or base.Traits()

    @property
    def traits(self) -> base.Traits:
        return self._traits

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        return self._jobs.plan(order)

    def launch(self, order: base.LaunchOrder, *, keep: base.Keep) -> base.Handle:
        plan = self._jobs.plan(order)
        handle = order.handle(
            self._engine,
            self._jobs.begin(order),
            options=self._options,
            begun_at_s=time.time(),
            run=plan.url,
        )
        if self._jobs.find(handle, [order.first]):
            raise UsageError(
                f"{order.id!r} was launched on {self._engine} already. Launch under "
                "another name."
            )
        keep(handle)
        for changed in self._jobs.submit(order, plan, handle):
            handle = changed
            keep(handle)
        return handle

    def poll(self, handle: base.Handle) -> tuple[base.Report, ...]:
        jobs = self._jobs.find(handle, handle.indexes)
        return tuple(
            jobs[index].report
            if index in jobs
            else base.Report(
                index=index, name=handle.island(index), state=base.State.LOST
            )
            for index in handle.indexes
        )

    def logs(self, handle: base.Handle, index: int, *, after: int = 0) -> list[str]:
        jobs = self._jobs.find(handle, [index])
        if index not in jobs:
            return []
        return self._jobs.lines(handle, index, jobs[index].job)[after:]

    def cancel(
        self,
        handle: base.Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = base.GRACE_S,
    ) -> None:
        wanted = handle.indexes if indexes is None else sorted(indexes)
        jobs = self._jobs.find(handle, wanted)
        self._jobs.end(handle, JobsToEnd(wanted, live_jobs(jobs, wanted), grace_s))


def live_jobs(jobs: Mapping[int, FoundJob], wanted: Collection[int]) -> dict[int, Any]:
    """Return the jobs of these islands that are not over."""
    return {
        index: jobs[index].job
        for index in wanted
        if index in jobs and not jobs[index].report.state.is_over
    }
