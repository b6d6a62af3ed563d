"""The state of a run and its islands' last metrics, from its coordinator or store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.clock import SystemClock
from atoll.errors import AtollError, Refused, Unreachable
from atoll.island.connection import connect_read_only, is_coordinator
from atoll.island.environment import credentials_from_environment

METRICS = ("loss", "round", "tokens", "inner_steps", "bytes_up", "bytes_down", "state")


STORE_EVERY_S = 6.0


@dataclass(frozen=True)
class RunLook:
    """The state of a run at one moment."""

    run: str
    """Its id."""

    state: str
    round: int
    last_round: int | None = None
    reason: str = ""
    islands: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Last metrics by island: `METRICS`."""

    @property
    def has_ended(self) -> bool:
        return self.state == "ended"


def look_at(run: str, *, wait_s: float = 0.0) -> RunLook:
    """Return the state of the run at a URL.

    Raises:
        Unreachable: there is no response.
        Refused, UsageError, CorruptError: as for an island.
    """
    return _ask(run, wait_s) if is_coordinator(run) else _observe(run)


def try_look(run: str) -> RunLook | None:
    """Return the state of a run, or None if it cannot be read now."""
    try:
        return look_at(run)
    except AtollError:
        return None


class Looks:
    """Reads the state of one run repeatedly, at a bounded rate.

    Each read of a store costs requests, and heartbeats there are as rare.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._every_s = 0.0 if is_coordinator(run) else STORE_EVERY_S
        self._clock = SystemClock()
        self._next_s = 0.0
        self.newest: RunLook | None = None
        """The last state that could be read."""

    def look(self, *, at_once: bool = False) -> RunLook | None:
        """Return the newest state, read again if the interval has passed."""
        if at_once or self._clock.now_s() >= self._next_s:
            self.newest = try_look(self._run) or self.newest
            self._next_s = self._clock.now_s() + self._every_s
        return self.newest


def _ask(run: str, wait_s: float) -> RunLook:
    caller, headers, info = connect_read_only(
        run,
        paths=credentials_from_environment(),
        clock=SystemClock(),
        wait_s=wait_s,
    )
    try:
        reply = caller.call("GET", "/status", headers=headers, is_repeatable=True)
    finally:
        caller.close()
    if reply.status in (401, 403):
        raise Refused(f"{run} does not tell its status to this token.")
    if reply.status != 200:
        raise Unreachable(f"{run} answers {reply.status}. Is a coordinator there?")
    status = reply.json()
    return RunLook(
        run=info.run,
        state=str(status["state"]),
        round=int(status["round"]),
        last_round=status["last_round"],
        reason=str(status["why"]),
        islands={
            str(island["island"]): _metrics(island) for island in status["islands"]
        },
    )


def _metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row.get(name) for name in METRICS}


def _observe(run: str) -> RunLook:
    """Read a run in a store. One read cannot tell which islands are live."""
    from atoll.coordinator.status import island_of, run_state
    from atoll.exchange.bucket import BucketReader
    from atoll.exchange.bucket.create import require_there
    from atoll.exchange.bucket.outcomes import Outcomes
    from atoll.exchange.bucket.states import States
    from atoll.runtime import SystemRuntime
    from atoll.store import RetryingStore, open_store

    require_there(run)
    runtime = SystemRuntime()
    try:
        store = RetryingStore(open_store(run), sleep=runtime.sleep)
        reader = BucketReader.open(store, runtime, url=run)
        reader.members.read()
        if reader.read_founding():
            states = States(reader, Outcomes(reader, None))
            for fragment in range(len(reader.view.layout)):
                states.begin(fragment)
                reader.read_round(fragment)
        view, now_s = reader.view, runtime.now_s()
        beats = {name: document.beat.stats for name, document in view.documents.items()}
        state = view.state
        rows = {
            name: island_of(member, now_s, beats.get(name), {})
            for name, member in state.members.known.items()
        }
    finally:
        runtime.close()
    return RunLook(
        run=reader.run,
        state="moved" if view.moved_to is not None else run_state(state, now_s),
        round=min((current.number for current in state.rounds), default=1) - 1,
        last_round=state.last_round,
        islands={name: _metrics(row) for name, row in rows.items()},
    )
