"""Islands as managed jobs of SkyPilot, one each.

Start reading at `SkyPilotLauncher`, then `tasks` and `jobs`.

A managed job is named by its launch, and found again in SkyPilot's queue by that name;
until it is there, a handle has the request for it.
In each a leader starts the command again by the restart policy; a machine that is lost
is SkyPilot's to replace.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import yaml

from atoll.errors import UsageError
from atoll.launch.base import GRACE_S, Keep, Launcher, Order, Plan, Traits
from atoll.launch.engines.skypilot import jobs
from atoll.launch.engines.skypilot.tasks import (
    ENGINE,
    SkyPilotOptions,
    job_name,
    tasks,
)
from atoll.launch.handle import Handle
from atoll.launch.options import read_options
from atoll.launch.states import Report, State

CANCELLING = "CANCELLING"
STATES = {
    "PENDING": State.PENDING,
    "SUBMITTED": State.PENDING,
    "STARTING": State.PENDING,
    "RUNNING": State.RUNNING,
    "WINDING_DOWN": State.RUNNING,
    "RECOVERING": State.RESTARTING,
    CANCELLING: State.RUNNING,
    "SUCCEEDED": State.FINISHED,
    "CANCELLED": State.CANCELLED,
    "FAILED": State.FAILED,
    "FAILED_SETUP": State.FAILED,
    "FAILED_PRECHECKS": State.FAILED,
    "FAILED_NO_RESOURCE": State.FAILED,
    "FAILED_CONTROLLER": State.FAILED,
}

_EXIT_CODE = re.compile(r"exit code (\d+)")


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of whoever SkyPilot's server takes this user for."""
    return SkyPilotLauncher(
        read_options(SkyPilotOptions, options, engine=ENGINE), options
    )


class SkyPilotLauncher:
    """Starts managed jobs; what it knows is at SkyPilot's server and in handles."""

    def __init__(self, read: SkyPilotOptions, options: Mapping[str, str]) -> None:
        self._read, self._options = read, dict(options)

    @property
    def traits(self) -> Traits:
        return Traits()

    def plan(self, order: Order) -> Plan:
        data = tasks(order, self._read)
        written = [yaml.safe_dump(each, sort_keys=False) for each in data]
        return Plan(data, "---\n".join(written))

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        asked = tasks(order, self._read)
        handle = order.handle(ENGINE, {}, options=self._options, begun_at_s=time.time())
        if _records(handle):
            raise UsageError(
                f"{order.id!r} was launched on SkyPilot already. Launch under "
                "another name."
            )
        keep(handle)
        for index, task in zip(order.indexes, asked, strict=True):
            request = jobs.ask(task, order.values)
            # Whoever is interrupted while it waits withdraws it by what was kept.
            keep(replace(handle, reference={"requests": {str(index): request}}))
            jobs.await_start(task["name"], request)
        keep(handle)
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        found = _records(handle)
        return tuple(_report(handle, each, found.get(each)) for each in handle.indexes)

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        record = _records(handle).get(index)
        if record is None:
            return []
        is_live = not STATES[_status(record)].is_over
        return jobs.lines(int(record.job_id), is_live=is_live)[after:]

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        wanted = handle.indexes if indexes is None else indexes
        asked = handle.reference.get("requests", {})
        if going := [each for index, each in asked.items() if int(index) in wanted]:
            jobs.withdraw(going)  # first: what has come of them is in the queue then
        ids = [
            int(record.job_id)
            for index, record in _records(handle).items()
            if index in wanted and _is_to_be_told(record)
        ]
        if ids:
            jobs.cancel(ids, grace_s=grace_s)


def _records(handle: Handle) -> dict[int, Any]:
    """Return what SkyPilot knows of each island, by index."""
    names = {job_name(handle.id, index): index for index in handle.indexes}
    found = jobs.find(handle.id, names)
    return {names[name]: record for name, record in found.items()}


def _is_to_be_told(record: Any) -> bool:
    return _status(record) != CANCELLING and not STATES[_status(record)].is_over


def _status(record: Any) -> str:
    status = str(getattr(record.status, "value", record.status))
    if status not in STATES:
        raise UsageError(
            f"SkyPilot says that {record.job_name} is {status!r}, which is not known "
            "here. Look with `sky jobs queue`, and take a newer Atoll."
        )
    return status


def _report(handle: Handle, index: int, record: Any) -> Report:
    name = handle.island(index)
    if record is None:
        return Report(index=index, name=name, state=State.LOST)
    status = _status(record)
    state, said = STATES[status], record.failure_reason or ""
    code = _EXIT_CODE.search(said) if state is State.FAILED else None
    return Report(
        index=index,
        name=name,
        state=state,
        restarts=record.recovery_count or 0,
        exit_code=None if code is None else int(code[1]),
        why=_why(status, said),
        place=record.infra or f"job {record.job_id}",
    )


def _why(status: str, said: str) -> str:
    if STATES[status] is State.FAILED:
        return f"{status}: {said}" if said else status
    return status if status in (CANCELLING, "RECOVERING") else ""
