"""The two kinds of actors in a Ray cluster: a leader per island, and one ledger.

`Leader` is in the actor that leads one island. Ray finds it a node, and another if that
is lost.
Rule 1: the island is a process of its own; Ray's process has threads, and must not
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

from atoll.launch.base import GRACE_S, LISTEN_THERE, Report, State
from atoll.launch.engines.local.supervisor import Group, Start
from atoll.launch.spec import Restarts
from atoll.launch.supervise import Life, Words

LOOK_S = 0.2
TELL_S = 5.0
"""How often the ledger hears of an island of which there is nothing new."""


@dataclass(frozen=True)
class Lead:
    """What an actor is to do: plain values, which Ray carries."""

    index: int
    name: str
    words: Sequence[str]
    environment: Mapping[str, str]
    """Secrets too: Ray has no way of its own for them."""

    restarts: Mapping[str, Any]
    is_python: bool

    def at(self, address: str) -> Lead:
        """Return the same for the place that has this address."""
        words = [address if each == LISTEN_THERE else each for each in self.words]
        return replace(self, words=words)


class Leader:
    """Leads an island; `lead` returns when it is over."""

    def __init__(self, lead: Lead, ledger: Any) -> None:
        self._lead, self._ledger = lead, ledger
        self._grace_s: float | None = None

    def go(self, grace_s: float) -> None:
        """Let the island go. Called while `lead` runs."""
        self._grace_s = grace_s

    def lead(self, ask: Any, *, is_again: bool = False) -> None:
        """Lead the island; `ask` waits for an answer of the ledger's.

        Args:
            is_again: an actor before this one was lost.
        """
        lead = self._lead
        life_number, is_to_go = ask(self._ledger.begun.remote(lead.index, is_again))
        if is_to_go:
            ask(self._ledger.ended.remote(lead.index))
            return
        log = Path(tempfile.mkdtemp(prefix="atoll-island-")) / "log"
        led = _life(lead, log)
        telling = _Telling(log)
        while True:
            now_s = time.monotonic()
            if self._grace_s is not None:
                led.cancel(now_s, grace_s=self._grace_s)
            led.look(now_s)
            said = replace(led.report, host=os.uname().nodename).to_dict()
            if (new := telling.new(said, now_s, is_last=led.is_over)) is not None:
                told = self._ledger.hear.remote(lead.index, life_number, said, new)
                if ask(told) and self._grace_s is None and not led.is_over:
                    # The ledger may be asked a moment before this actor is, or while
                    # it was elsewhere: the island leaves cleanly all the same.
                    self._grace_s = GRACE_S
            if led.is_over:
                return
            time.sleep(LOOK_S)


class _Telling:
    """What the ledger does not know yet."""

    def __init__(self, log: Path) -> None:
        self._log, self._at = log, 0
        self._told: dict[str, Any] | None = None
        self._told_at_s = 0.0

    def new(
        self, said: dict[str, Any], now_s: float, *, is_last: bool
    ) -> list[str] | None:
        """Return the new lines if there is something to tell, else None."""
        lines = self._lines(is_last=is_last)
        if not lines and said == self._told and now_s - self._told_at_s < TELL_S:
            return None
        self._told, self._told_at_s = said, now_s
        return lines

    def _lines(self, *, is_last: bool) -> list[str]:
        """Return whole lines that came since; at the end also one without its end."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._at)
            data = file.read() if is_last else file.read(2**20)
        end = len(data) if is_last else data.rfind(b"\n") + 1
        self._at += end
        return data[:end].decode(errors="replace").splitlines()


def _life(lead: Lead, log: Path) -> Life:
    def say(text: str) -> None:
        with log.open("a") as file:
            file.write(f"atoll: {text}\n")

    start = Start(
        lead.index, lead.name, lead.words, lead.environment, None, lead.is_python
    )
    words = Words(say=say, start=lambda: Group(start, log))
    return Life(lead.index, lead.name, Restarts.from_dict(lead.restarts), words)


SILENT_S = 30.0
"""After so long without a word an island's actor is not believed to be there."""

MAX_LINES = 100_000
"""Of each island that are kept: the last ones."""


@dataclass
class Entry:
    """One island."""

    report: Report
    lives: int = 0
    """Actors that have begun: one, and one more for every node that was lost."""

    heard_at_s: float | None = None
    is_to_go: bool = False
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    num_lines: int = 0
    """That were ever said."""


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
        """Return which life an actor is, and whether its island is to go.

        One that is another's successor is at least the second, whatever was lost here.
        """
        entry = self._entries[index]
        entry.lives = max(entry.lives, int(is_again)) + 1
        entry.heard_at_s = self._now_s()
        return entry.lives, entry.is_to_go or entry.report.state.is_over

    def hear(self, index: int, life: int, said: dict[str, Any], new: list[str]) -> bool:
        """Take an actor's word; return whether the island is to go.

        The word of a life before the present one is too late. One that is not known
        yet is believed: a ledger that has lost its node begins with nothing.
        """
        entry = self._entries[index]
        if life < entry.lives or entry.report.state.is_over:
            return True
        entry.lives = life
        entry.heard_at_s = self._now_s()
        entry.report = Report.from_dict(said)
        entry.lines.extend(new)
        entry.num_lines += len(new)
        return entry.is_to_go

    def ask_to_go(self, indexes: list[int]) -> list[tuple[int, bool, bool]]:
        """Note who is to go.

        Returns for each that is not over: its index, whether its actor has begun, and
        whether it was asked before.
        """
        found = []
        for index in indexes:
            entry = self._entries.get(index)
            if entry is not None and not entry.report.state.is_over:
                found.append((index, entry.lives > 0, entry.is_to_go))
                entry.is_to_go = True
        return found

    def ended(self, index: int) -> None:
        """Note that an island was ended without its own word."""
        entry = self._entries[index]
        if not entry.report.state.is_over:
            entry.report = replace(entry.report, state=State.CANCELLED, reason="")

    def reports(self) -> list[dict[str, Any]]:
        """Return what is known of every island, and for how long nobody spoke."""
        now_s = self._now_s()
        said = []
        for entry in self._entries.values():
            lost = max(0, entry.lives - 1)
            report = replace(entry.report, restarts=entry.report.restarts + lost)
            silent_s = 0.0 if entry.heard_at_s is None else now_s - entry.heard_at_s
            said.append(
                report.to_dict() | {"silent_s": silent_s, "has_begun": entry.lives > 0}
            )
        return said

    def lines(self, index: int, after: int) -> list[str]:
        """Return what an island has said, without the first lines."""
        entry = self._entries.get(index)
        if entry is None:
            return []
        num_dropped = entry.num_lines - len(entry.lines)
        return list(islice(entry.lines, max(0, after - num_dropped), None))

    def is_over(self) -> bool:
        """Return whether nothing becomes of any island any more."""
        return all(each.report.state.is_over for each in self._entries.values())


KEPT_S = 86_400.0
"""How long a ledger is there after its last island."""

LEDGER_LOOK_S = 60.0


def actor_name(launch: str, index: int) -> str:
    """Return the name under which an island's actor is found."""
    return f"{launch}-{index}"


HEAD = "node:__internal_head__"
"""A resource that Ray gives to the head node alone."""


def ledger_class(launch: str) -> Any:
    """Return what makes the ledger of a launch: at the head, and again if it is lost.

    A cluster outlives any other node, and so does what became of its islands.
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
    """Return what makes an island's actor, away from the others if there is room."""
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

    Ray takes methods from the class that it is given, so this is one of the classes
    that a framework wants to be another's.
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
        """End for good: nobody is started in its place."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # Ray's own


class _LeaderActor:
    """An island's leader, from its first breath: a new life is not told to begin."""

    def __init__(self, lead: Lead, ledger: Any, name: str) -> None:
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        lead = lead.at(address)
        self._leader, self._name = Leader(lead, ledger), name
        threading.Thread(target=self._lead, daemon=True).start()

    def _lead(self) -> None:
        is_again = ray.get_runtime_context().was_current_actor_reconstructed
        self._leader.lead(ray.get, is_again=is_again)
        ray.get_actor(self._name).leave.remote()

    def go(self, grace_s: float) -> None:
        """Let the island go."""
        self._leader.go(grace_s)

    def leave(self) -> None:
        """Give the place back: nobody is started here again."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]  # Ray's own
