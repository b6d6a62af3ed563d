"""A run in memory that a dashboard shows: `RunClient` without a process behind it."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.dashboard import DashboardServer, RunFeed, Sessions
from atoll.errors import AtollError, Refused, UsageError
from atoll.run_client import (
    Action,
    Check,
    Command,
    ControlReply,
    ExportedWeights,
    RunStatus,
)
from atoll.run_client.base import Progress
from atoll.settings import RunSettings
from atoll.telemetry import Event, EventPage, Past, history
from atoll.telemetry.history import history_query
from tests.telemetry.statuses import island, status
from tests.telemetry.streams import Stream

NAMES = (
    *("tokyo-1", "tokyo-2", "oregon-1", "oregon-2"),
    *("berlin-1", "berlin-2", "saopaulo-1", "sydney-1"),
)
ROUND_S = 41.0


class LagoonRun:
    """A run of eight islands, two fragments and as many rounds as asked for."""

    poll_s = 0.2

    def __init__(
        self, *, rounds: int = 60, names: tuple[str, ...] = NAMES, seed: int = 1
    ) -> None:
        self.names, self.rounds = names, 0
        self.error: AtollError | None = None
        self.changes: dict[str, Any] = {}
        """Fields of the status that differ."""

        self.rows: dict[str, dict[str, Any]] = {name: {} for name in names}
        """Fields of islands that differ."""

        self.is_store = False
        self.commands: list[Command] = []
        self.epoch = 1
        self.values: dict[str, Any] = {"run.name": "lagoon", "run.end_rounds": 400}
        self._generator = random.Random(seed)
        self._past = Past()
        self._folded = 0
        self.stream = Stream(at_unix_s=time.time() - rounds * ROUND_S)
        self.stream.start(fragments=2)
        for slot, name in enumerate(names):
            self.stream.join(name, slot)
        for _ in range(rounds):
            self.train()

    def train(self, marks: str | None = None) -> None:
        """Commit one round of both fragments."""
        self.rounds += 1
        self.stream.at_unix_s += ROUND_S
        for slot, name in enumerate(self.names):
            loss = 1.4 + 1.7 * math.exp(-self.rounds / 18) + 0.01 * slot
            loss += self._generator.gauss(0, 0.02)
            own = {"lr": 0.001}
            self.stream.report(name, 100 * self.rounds, loss, metrics=own)
        drawn = "".join(self._generator.choices("#~", (60, 1), k=len(self.names)))
        for fragment in range(2):
            for name in self.names:
                self.stream.emit(
                    "update_staged",
                    island=name,
                    fragment=fragment,
                    round=self.rounds,
                    bytes=3_900_000,
                    seconds=25 + 10 * self._generator.random(),
                )
            self.stream.commit(fragment, self.rounds, marks or drawn, seconds=41.2)
        self.stream.emit(
            "anchor_measured",
            island=self.names[0],
            round=self.rounds,
            metrics={"loss": 1.38 + 1.7 * math.exp(-self.rounds / 18)},
        )

    def status(self, *, watch: bool = False) -> RunStatus:
        """Return a status like that of a coordinator."""
        if self.error is not None:
            raise self.error
        now_unix_s = time.time()
        rows = [
            island(name, slot=slot, round=self.rounds, loss=1.4 + slot / 100)
            | self.rows[name]
            for slot, name in enumerate(self.names)
        ]
        live = sum(row["state"] == "live" for row in rows)
        document = status(
            *rows,
            run="lagoon-5d0c1f6d2a31",
            name="lagoon",
            round=self.rounds,
            rounds=[self.rounds, self.rounds],
            last_round=400,
            epoch=self.epoch,
            quorum=4,
            now_unix_s=now_unix_s,
            started_unix_s=now_unix_s - 8000,
            created_unix_s=now_unix_s - 200_000,
            tokens=6_200_000_000,
            tokens_per_s=352_000.0,
            ends_unix_s=now_unix_s + 18_600,
            last_commit_unix_s=now_unix_s - 12,
            usual_round_s=ROUND_S,
            utilisation=0.94,
            findings=[],
            open=[
                {
                    "fragment": fragment,
                    "round": self.rounds + 1,
                    "opened_unix_s": now_unix_s - 30,
                    "staged": list(self.names[: 3 + 2 * fragment]),
                    "awaited": list(self.names[3 + 2 * fragment :]),
                    "closes_unix_s": now_unix_s + 48,
                }
                for fragment in range(2)
            ],
            agreement={
                "round": self.rounds,
                "digest": "a3c5e7cc00112233",
                "holding": live,
                "of": live,
                "apart": [],
            },
        )
        return RunStatus.of(document | self.changes)

    def settings(self) -> RunSettings:
        """Return the settings in force."""
        return RunSettings().with_values(self.values)

    def events(
        self, *, after: Event | None = None, is_waiting: bool = False
    ) -> list[Event]:
        """Return the events after one; those of a store cannot be continued."""
        if self.is_store and after is not None:
            raise UsageError("The run is in a store.")
        first = 0 if after is None else after.number
        return [event for event in self.stream.made if event.number > first][-1000:]

    def older_events(
        self, before: str = "", *, limit: int = 200, kind: str = "", island: str = ""
    ) -> EventPage:
        """Return a page; the cursor is the number of its first event."""
        end = int(before) if before else self.stream.number + 1
        events = [event for event in self.stream.made if event.number < end][-limit:]
        has_more = bool(events) and events[0].number > 1
        return EventPage(events, str(events[0].number) if has_more else None)

    def history(self, **query: str | int) -> dict[str, Any]:
        """Return the fold of the events so far."""
        for event in self.stream.made[self._folded :]:
            self._past.add(event)
        self._folded = len(self.stream.made)
        answer = history(self._past, **history_query(query))
        document: dict[str, Any] = json.loads(answer)
        return document

    def control(self, command: Command) -> ControlReply:
        """Perform a command, as far as the dashboard shows it."""
        self.commands.append(command)
        self.stream.at_unix_s = time.time()
        match command.action:
            case Action.PAUSE:
                self.changes |= {"state": "paused", "why": "An operator paused it."}
                self.stream.emit("run_paused")
            case Action.RESUME:
                self.changes = {}
                self.stream.emit("run_resumed")
            case Action.EVICT:
                if command.island not in self.rows:
                    raise Refused(f"No island is called {command.island!r}.")
                self.rows[str(command.island)] |= {"state": "left"}
            case Action.SET:
                self.values |= command.values
                self.epoch += 1
                self.stream.emit(
                    "epoch_set", epoch=self.epoch, values=dict(command.values)
                )
        return ControlReply("done", self.status())

    def export(
        self, file: Path, *, round: int | None = None, progress: Progress | None = None
    ) -> ExportedWeights:
        """Refuse: it has no weights."""
        raise Refused("This run has no weights.")

    def export_ledger(self, file: Path) -> int:
        """Refuse: it deals out no rows."""
        raise Refused("This run has no rows.")

    def checks(self) -> Iterator[Check]:
        """Check nothing."""
        yield Check("run", "is in memory")

    def close(self) -> None:
        """Nothing to close."""


@contextmanager
def shown(
    run: LagoonRun, *, may_control: bool = True, poll_s: float = 0.1
) -> Iterator[tuple[DashboardServer, RunFeed, Sessions]]:
    """Give a dashboard that shows a run."""
    feed, sessions = RunFeed(lambda: run, poll_s=poll_s), Sessions()
    server = DashboardServer(feed, sessions, port=0, may_control=may_control)
    feed.start()
    server.start()
    try:
        yield server, feed, sessions
    finally:
        server.close()
        feed.close()
