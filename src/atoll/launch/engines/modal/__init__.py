"""Islands as sandboxes of Modal, one each.

Start reading at `ModalLauncher`, then `calls` and `sandboxes`.

A sandbox is named by its launch, so one of which no answer came back can be ended too.
Modal starts a sandbox once: in each a leader starts the command again by the restart
policy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from atoll.errors import UsageError
from atoll.launch.base import GRACE_S, Keep, Launcher, Order, Plan, Traits
from atoll.launch.engines.modal import sandboxes
from atoll.launch.engines.modal.calls import (
    ENGINE,
    ModalOptions,
    sandbox_calls,
    sandbox_name,
)
from atoll.launch.handle import Handle
from atoll.launch.leading import TOLD_TO_GO
from atoll.launch.options import read_options
from atoll.launch.states import Report, State

KILLED = 137
"""The exit code of who was killed, as a container's engine counts."""

CLOCKS_DIFFER_S = 600.0
"""How long before a launch its log may begin, by another machine's clock."""


def open_launcher(options: Mapping[str, str]) -> Launcher:
    """Return the launcher of whoever is logged in at Modal."""
    read = read_options(ModalOptions, options, engine=ENGINE)
    sandboxes.require_login()
    return ModalLauncher(read, options)


class ModalLauncher:
    """Creates sandboxes; what it knows is at Modal and in handles."""

    def __init__(self, read: ModalOptions, options: Mapping[str, str]) -> None:
        self._read, self._options = read, dict(options)

    @property
    def traits(self) -> Traits:
        return Traits()

    def plan(self, order: Order) -> Plan:
        data = sandbox_calls(order, self._read)
        return Plan(data, json.dumps(data, indent=2))

    def launch(self, order: Order, *, keep: Keep) -> Handle:
        calls = sandbox_calls(order, self._read)
        reference: dict[str, Any] = {"app": self._read.app, "sandboxes": {}}
        handle = order.handle(
            ENGINE, reference, options=self._options, begun_at_s=time.time()
        )
        if _find(handle, order.first) is not None:
            raise UsageError(
                f"{order.id!r} was launched on Modal already. Launch under "
                "another name."
            )
        keep(handle)
        ids: dict[str, str] = {}
        for index, call in zip(order.indexes, calls, strict=True):
            ids[str(index)] = sandboxes.create(call, order.values)
            handle = replace(handle, reference={**reference, "sandboxes": dict(ids)})
            keep(handle)
        return handle

    def poll(self, handle: Handle) -> tuple[Report, ...]:
        return tuple(_report(handle, index) for index in handle.indexes)

    def logs(self, handle: Handle, index: int, *, after: int = 0) -> list[str]:
        sandbox = _find(handle, index)
        if sandbox is None:
            return []
        since_s = max(0.0, handle.begun_at_s - CLOCKS_DIFFER_S)
        return sandboxes.lines(sandbox, since_s=since_s)[after:]

    def cancel(
        self,
        handle: Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        for index in handle.indexes if indexes is None else sorted(indexes):
            sandbox = _find(handle, index)
            if sandbox is not None and sandboxes.exit_code(sandbox) is None:
                sandboxes.end(sandbox)


def _find(handle: Handle, index: int) -> Any:
    known = handle.reference["sandboxes"].get(str(index))
    name = sandbox_name(handle.id, index)
    return sandboxes.find(known, app=handle.reference["app"], name=name)


def _report(handle: Handle, index: int) -> Report:
    name, sandbox = handle.island(index), _find(handle, index)
    if sandbox is None:
        return Report(index=index, name=name, state=State.LOST)
    code = sandboxes.exit_code(sandbox)
    state, why = _state(sandbox, code)
    return Report(
        index=index,
        name=name,
        state=state,
        exit_code=code,
        why=why,
        place=str(sandbox.object_id),
    )


def _state(sandbox: Any, code: int | None) -> tuple[State, str]:
    if code is None:
        return State.RUNNING, ""  # Modal does not tell who still waits for a place
    if code == 0:
        return State.FINISHED, ""
    how = sandboxes.how(sandbox)
    if how == sandboxes.TIMED_OUT:
        return State.FAILED, "its time limit was over"
    if (how or code == TOLD_TO_GO) and sandboxes.was_cancelled(sandbox):
        return State.CANCELLED, ""
    if how == sandboxes.TERMINATED:
        why = "Modal ended it, and no `atoll cancel` had asked for that"
        return State.FAILED, why
    if code == TOLD_TO_GO:
        return State.CANCELLED, "it was told to go, as before its time limit"
    if code == KILLED:
        return State.FAILED, f"it was killed (exit code {code}), as who lacks memory is"
    return State.FAILED, f"exit code {code}"
