"""Islands as actors of a Ray cluster: placed, led, and placed again if a node is lost.

Start reading at `RayLauncher`, then `actors`.

Ray carries an actor's arguments in its own way between processes of one cluster, which
trust each other; nothing of Atoll's reads or writes that.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from atoll.errors import Unreachable, UsageError
from atoll.launch import base
from atoll.launch.bootstrap import bootstrap_argv
from atoll.launch.engines.ray.actors import (
    SILENT_S,
    LeaderTask,
    actor_name,
    leader_class,
    ledger_class,
)
from atoll.launch.spec import (
    IslandSpec,
    is_python,
    refuse_fields,
    refuse_stored_secrets,
)

ENGINE = "ray"
NAMESPACE = "atoll"
ANSWERS_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The options of `--option`."""

    address: str = "auto"
    """The address of the cluster; `auto` for that of this machine."""

    python: str | None = None
    """The Python of the nodes. Default: that of Ray's actors."""


def open_launcher(options: Mapping[str, str]) -> base.Launcher:
    """Return the launcher of a cluster, without connecting to it."""
    return RayLauncher(base.read_options(RayOptions, options, engine=ENGINE), options)


class RayLauncher:
    """Starts detached actors, which outlive the process that launched them."""

    def __init__(self, read: RayOptions, options: Mapping[str, str]) -> None:
        self._read, self._options = read, dict(options)

    @property
    def traits(self) -> base.Traits:
        # A driver and the nodes of its cluster reach each other.
        serving = base.CoordinatorPlacement(
            is_reachable=True,
            host=base.ADDRESS_PLACEHOLDER,
            options=dict(self._options),
        )
        return base.Traits(serving=serving)

    def plan(self, order: base.LaunchOrder) -> base.LaunchPlan:
        _require_possible(order.spec)
        resources = _resources(order)
        return base.as_json(
            [
                {
                    "actor": actor_name(order.id, index),
                    "words": list(self._lead(order, index).argv),
                    "environment": dict(order.spec.environment),
                    "secrets": dict(order.spec.secrets),
                    **resources,
                }
                for index in order.indexes
            ]
        )

    def launch(self, order: base.LaunchOrder, *, keep: base.Keep) -> base.Handle:
        _require_possible(order.spec)
        with self._cluster():
            _require_new(order.id)
            handle = order.handle(
                ENGINE,
                {"namespace": NAMESPACE},
                options=self._options,
                begun_at_s=time.time(),
            )
            keep(handle)
            names = {index: order.spec.island(index) for index in order.indexes}
            ledger = ledger_class(order.id).remote(names)
            for index in order.indexes:
                task = self._lead(order, index, has_secrets=True)
                actor_class = leader_class(order.id, index, **_resources(order))
                actor_class.remote(task, ledger, actor_name(order.id, index))
            ray.get(ledger.is_over.remote(), timeout=ANSWERS_S)
        return handle

    def poll(self, handle: base.Handle) -> tuple[base.Report, ...]:
        with self._cluster():
            ledger = _actor(handle.id)
            forms = [] if ledger is None else _answer(ledger.reports.remote())
            reports = {form["index"]: _report(handle.id, form) for form in forms}
        return tuple(
            reports.get(index) or _lost(handle, index) for index in handle.indexes
        )

    def logs(self, handle: base.Handle, index: int, *, after: int = 0) -> list[str]:
        with self._cluster():
            ledger = _actor(handle.id)
            if ledger is None:
                return []
            lines: list[str] = _answer(ledger.lines.remote(index, after))
            return lines

    def cancel(
        self,
        handle: base.Handle,
        *,
        indexes: Collection[int] | None = None,
        grace_s: float = base.GRACE_S,
    ) -> None:
        cancelled = sorted(handle.indexes if indexes is None else indexes)
        with self._cluster():
            if (ledger := _actor(handle.id)) is None:
                return
            for index, has_begun, was_requested in _answer(
                ledger.ask_to_go.remote(cancelled)
            ):
                leader = _actor(actor_name(handle.id, index))
                if leader is not None and has_begun and not was_requested:
                    leader.go.remote(grace_s)
                    continue
                # It is pending, or did not end after the first request.
                if leader is not None:
                    ray.kill(leader)
                _answer(ledger.ended.remote(index))

    def _lead(
        self, order: base.LaunchOrder, index: int, *, has_secrets: bool = False
    ) -> LeaderTask:
        spec = order.spec
        environment = dict(spec.environment)
        if has_secrets:
            environment |= {
                name: value.reveal() for name, value in order.values.items()
            }
        python = self._read.python or sys.executable
        argv = bootstrap_argv(spec, index=index, python=python, with_parent=True)
        restarts = spec.restarts.to_dict()
        is_py = is_python(spec.command)
        return LeaderTask(index, spec.island(index), argv, environment, restarts, is_py)

    @contextmanager
    def _cluster(self) -> Iterator[None]:
        """Connect to Ray during the block, and translate its errors."""
        try:
            _connect(self._read.address)
            yield
        except (RayError, OSError) as exc:
            message = str(exc).strip().partition("\n")[0][:300]
            raise Unreachable(
                f"The Ray cluster at {self._read.address} does not answer: {message}. "
                "Start one with: ray start --head, or give --option address=."
            ) from exc


def _connect(address: str) -> None:
    """Connect once per process; Ray's handler of SIGTERM is not the caller's."""
    if ray.is_initialized():
        return
    _require_listener(address)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _require_listener(address: str) -> None:
    """Raise immediately if no process listens: Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=ANSWERS_S).close()


def _actor(name: str) -> Any:
    """Return an actor by its name, or None if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _answer(reference: Any) -> Any:
    return ray.get(reference, timeout=ANSWERS_S)


def _require_new(launch: str) -> None:
    if _actor(launch) is not None:
        raise UsageError(
            f"{launch!r} was launched on this cluster already. Launch under another "
            "name."
        )


def _report(launch: str, form: dict[str, Any]) -> base.Report:
    """Return an island's report, which its actor may not have lived to correct."""
    silent_s, has_begun = form["silent_s"], form["has_begun"]
    report = base.Report.from_dict(form)
    if report.state.is_over:
        return report
    if _actor(actor_name(launch, report.index)) is None:
        return replace(report, state=base.State.LOST, reason="its actor has ended")
    if has_begun and silent_s > SILENT_S:
        return replace(
            report, state=base.State.RESTARTING, reason="its node does not answer"
        )
    return report


def _lost(handle: base.Handle, index: int) -> base.Report:
    reason = "the cluster does not know it"
    return base.Report(
        index=index, name=handle.island(index), state=base.State.LOST, reason=reason
    )


def _resources(order: base.LaunchOrder) -> dict[str, Any]:
    """Return the resources of an actor."""
    needs, spec = order.spec.resources, order.spec
    options: dict[str, Any] = {
        "num_cpus": 1 if needs.cpus is None else needs.cpus,
        "num_gpus": needs.accelerators,
        # On another node a coordinator has neither its directory nor its address.
        "max_restarts": 0 if order.is_coordinator else spec.restarts.max_restarts,
    }
    if needs.memory_bytes is not None:
        options["memory"] = needs.memory_bytes
    if needs.accelerator is not None:
        options["accelerator_type"] = needs.accelerator
    if spec.requirements:
        options["runtime_env"] = {"pip": list(spec.requirements)}
    return options


_REFUSALS = {
    "image": "{} cannot be started by Ray's nodes. Use a cluster whose nodes run it, "
    "or give requirements.",
    "time_limit_s": "{} is for engines that have limits, and Ray has none. Leave it "
    "out.",
}


def _require_possible(spec: IslandSpec) -> None:
    refuse_fields(spec, _REFUSALS)
    refuse_stored_secrets(spec, "Ray")
