"""The two kinds of actors in a Ray cluster: a leader per island, and one ledger.

`IslandLeader` is in the actor that leads one island. Ray finds it a node, and another
if that is lost.
Rule 1: the island is a separate process; Ray's process has threads, and must not
train.
Rule 2: a leader reports all state to the ledger, because its node may be lost at any
time.

`Ledger` is in an actor that needs no resources, and keeps the state of a launch's
islands. An island's actor releases its resources when the island is over; its log and
its exit code are in the ledger, which ends a day after the last island.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import ray

from atoll.launch.base import ADDRESS_PLACEHOLDER, GRACE_S, Report, State
from atoll.launch.spec import Restarts
from atoll.launch.supervise import (
    EndRequest,
    IslandCommand,
    IslandSupervisor,
    supervise,
)

TELL_S = 5.0
"""How often a leader reports an unchanged island to the ledger."""


@dataclass(frozen=True)
class LeaderTask:
    """The arguments of an island's actor: plain values, which Ray serializes."""

    index: int
    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    """Includes secrets: Ray has no mechanism for them."""

    restarts: Mapping[str, Any]
    is_python: bool

    def at(self, address: str) -> LeaderTask:
        """Return the task for the host with this address."""
        argv = [
            address if argument == ADDRESS_PLACEHOLDER else argument
            for argument in self.argv
        ]
        return replace(self, argv=argv)


class IslandLeader:
    """Leads an island; `lead` returns when it is over."""

    def __init__(self, lead: LeaderTask, ledger: Any) -> None:
        self._lead, self._ledger = lead, ledger
        self._grace_s: float | None = None

    def go(self, grace_s: float) -> None:
        """Cancel the island. Called while `lead` runs."""
        self._grace_s = grace_s

    def lead(self, ask: Any, *, is_again: bool = False) -> None:
        """Lead the island; `ask` waits for a reply of the ledger.

        Args:
            is_again: an earlier actor of the island was lost.
        """
        lead = self._lead
        incarnation, is_to_go = ask(self._ledger.begun.remote(lead.index, is_again))
        if is_to_go:
            ask(self._ledger.ended.remote(lead.index))
            return
        log = Path(tempfile.mkdtemp(prefix="atoll-island-")) / "log"
        command = IslandCommand(
            lead.index,
            lead.name,
            lead.argv,
            lead.environment,
            is_python=lead.is_python,
        )
        restarts = Restarts.from_dict(lead.restarts)
        self._incarnation, self._ask = incarnation, ask
        self._unreported = _Unreported(log)
        supervise([IslandSupervisor(command, restarts, log=log)], self)

    def end_requests(self, now_s: float) -> Mapping[int, EndRequest]:
        if self._grace_s is None:
            return {}
        return {self._lead.index: EndRequest(self._grace_s)}

    def deliver(self, reports: Sequence[Report], now_s: float) -> bool:
        (report,) = reports
        is_over = report.state.is_over
        form = replace(report, host=os.uname().nodename).to_dict()
        new = self._unreported.new(form, now_s, is_last=is_over)
        if new is not None:
            index = self._lead.index
            reply = self._ledger.hear.remote(index, self._incarnation, form, new)
            if self._ask(reply) and self._grace_s is None and not is_over:
                # A request to cancel may reach the ledger before this actor, or
                # while the island had none: the island still leaves cleanly.
                self._grace_s = GRACE_S
        return True


class _Unreported:
    """The state and the log lines that the ledger does not have yet."""

    def __init__(self, log: Path) -> None:
        self._log, self._offset = log, 0
        self._last_report: dict[str, Any] | None = None
        self._reported_at_s = 0.0

    def new(
        self, report: dict[str, Any], now_s: float, *, is_last: bool
    ) -> list[str] | None:
        """Return the new lines if a report is due, else None."""
        lines = self._lines(is_last=is_last)
        if (
            not lines
            and report == self._last_report
            and now_s - self._reported_at_s < TELL_S
        ):
            return None
        self._last_report, self._reported_at_s = report, now_s
        return lines

    def _lines(self, *, is_last: bool) -> list[str]:
        """Return new complete lines; with `is_last` an incomplete one, too."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._offset)
            data = file.read() if is_last else file.read(2**20)
        end = len(data) if is_last else data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode(errors="replace").splitlines()


SILENT_S = 30.0
"""An actor that has not reported for this time is assumed to be lost."""

MAX_LINES = 100_000
"""The last lines of each island that are stored."""


@dataclass
class Entry:
    """One island."""

    report: Report
    incarnation: int = 0
    """Actors that have started: one, and one more for every lost node."""

    heard_at_s: float | None = None
    is_to_go: bool = False
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    num_lines: int = 0
    """All lines of its log, with those that were dropped."""


class Ledger:
    """The islands of one launch. Ray calls one method at a time."""

    def __init__(
        self,
        names: dict[int, str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        self._entries = {
            index: Entry(Report(index=index, name=name, state=State.PENDING))
            for index, name in names.items()
        }

    def begun(self, index: int, is_again: bool = False) -> tuple[int, bool]:
        """Return an actor's incarnation, and whether its island is to end.

        A successor has at least incarnation 2, even if this ledger has lost its state.
        """
        entry = self._entries[index]
        entry.incarnation = max(entry.incarnation, int(is_again)) + 1
        entry.heard_at_s = self._now_s()
        return entry.incarnation, entry.is_to_go or entry.report.state.is_over

    def hear(
        self, index: int, incarnation: int, report: dict[str, Any], new: list[str]
    ) -> bool:
        """Store an actor's report; return whether the island is to end.

        A report of an earlier incarnation is ignored. One of a later incarnation is
        accepted: a ledger that has lost its node starts empty.
        """
        entry = self._entries[index]
        if incarnation < entry.incarnation or entry.report.state.is_over:
            return True
        entry.incarnation = incarnation
        entry.heard_at_s = self._now_s()
        entry.report = Report.from_dict(report)
        entry.lines.extend(new)
        entry.num_lines += len(new)
        return entry.is_to_go

    def ask_to_go(self, indexes: list[int]) -> list[tuple[int, bool, bool]]:
        """Record a request to cancel islands.

        Returns for each that is not over: its index, whether its actor has started, and
        whether the request is a repetition.
        """
        cancelled = []
        for index in indexes:
            entry = self._entries.get(index)
            if entry is not None and not entry.report.state.is_over:
                cancelled.append((index, entry.incarnation > 0, entry.is_to_go))
                entry.is_to_go = True
        return cancelled

    def ended(self, index: int) -> None:
        """Record that an island was ended without its own report."""
        entry = self._entries[index]
        if not entry.report.state.is_over:
            entry.report = replace(entry.report, state=State.CANCELLED, reason="")

    def reports(self) -> list[dict[str, Any]]:
        """Return the state of every island, with the time since its last report."""
        now_s = self._now_s()
        reports = []
        for entry in self._entries.values():
            lost = max(0, entry.incarnation - 1)
            report = replace(entry.report, restarts=entry.report.restarts + lost)
            silent_s = 0.0 if entry.heard_at_s is None else now_s - entry.heard_at_s
            reports.append(
                report.to_dict()
                | {"silent_s": silent_s, "has_begun": entry.incarnation > 0}
            )
        return reports

    def lines(self, index: int, after: int) -> list[str]:
        """Return the log of an island, without the first `after` lines."""
        entry = self._entries.get(index)
        if entry is None:
            return []
        num_dropped = entry.num_lines - len(entry.lines)
        return list(islice(entry.lines, max(0, after - num_dropped), None))

    def is_over(self) -> bool:
        """Return whether all islands are over."""
        return all(entry.report.state.is_over for entry in self._entries.values())


KEPT_S = 86_400.0
"""How long a ledger exists after its last island."""

LEDGER_LOOK_S = 60.0


def actor_name(launch: str, index: int) -> str:
    """Return the name under which an island's actor is found."""
    return f"{launch}-{index}"


HEAD = "node:__internal_head__"
"""A resource that Ray gives to the head node alone."""


def ledger_class(launch: str) -> Any:
    """Return the class of a launch's ledger: at the head node, and restarted if lost.

    A cluster outlives any other node, and so does the state of its islands.
    """
    return ray.remote(_LedgerActor).options(
        name=launch,
        namespace=ray.get_runtime_context().namespace,
        lifetime="detached",
        num_cpus=0,
        resources={HEAD: 0.0001},
        max_restarts=-1,
        max_task_retries=-1,
    )


def leader_class(launch: str, index: int, **resources: Any) -> Any:
    """Return the class of an island's actor, spread over nodes if possible."""
    return ray.remote(_LeaderActor).options(
        name=actor_name(launch, index),
        namespace=ray.get_runtime_context().namespace,
        lifetime="detached",
        scheduling_strategy="SPREAD",
        max_concurrency=4,
        **resources,
    )


class _LedgerActor(Ledger):
    """A ledger that ends by itself, long after its islands.

    Ray needs the methods in the class itself: this is one of the subclasses that a
    framework demands.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__(names)
        self._name = ray.get_runtime_context().get_actor_name() or ""
        threading.Thread(target=self._end_later, daemon=True).start()

    def _end_later(self) -> None:
        over_since_s: float | None = None
        while over_since_s is None or time.monotonic() - over_since_s < KEPT_S:
            time.sleep(LEDGER_LOOK_S)
            if not self.is_over():
                over_since_s = None
            elif over_since_s is None:
                over_since_s = time.monotonic()
        ray.get_actor(self._name).leave.remote()

    def leave(self) -> None:
        """End permanently: Ray starts no other actor in its place."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # Ray's own


class _LeaderActor:
    """An island's leader. Its constructor starts it, also after a restart by Ray."""

    def __init__(self, lead: LeaderTask, ledger: Any, name: str) -> None:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        lead = lead.at(address)
        self._leader, self._name = IslandLeader(lead, ledger), name
        threading.Thread(target=self._lead, daemon=True).start()

    def _lead(self) -> None:
        is_again = ray.get_runtime_context().was_current_actor_reconstructed
        self._leader.lead(ray.get, is_again=is_again)
        ray.get_actor(self._name).leave.remote()

    def go(self, grace_s: float) -> None:
        """Cancel the island."""
        self._leader.go(grace_s)

    def leave(self) -> None:
        """End permanently, and release the resources."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # Ray's own
