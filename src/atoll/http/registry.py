"""The registry of open connections: which to close to make room, and how they end.

Rule 1: a connection is unverified until a request on it has shown a valid token.
        Unverified connections have a small budget, per origin and in all; beyond it the
        oldest one is closed, once it has had a moment to show its token.
Rule 2: when there is no room at all, an unverified connection is closed; without one, a
        verified connection that has been silent for longer than any live island would
        be. Otherwise the new connection is refused.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from atoll.http.connection import Connection, ListenerLimits
from atoll.http.parked_connections import ParkedForClose
from atoll.http.request import Request
from atoll.http.threads import EventLoop, ThreadPools
from atoll.runtime import Clock


class ShedReason(enum.Enum):
    """Which limit was reached. The values are part of audit events, and stable."""

    NO_TOKEN = "too_many"
    """Too many connections without a verified token: the oldest is closed."""

    IDLE = "idle"
    """No room for another connection: the one that is silent longest is closed."""

    FULL = "full"
    """No room for another connection, and none that may be closed for it."""

    SLOW_READER = "slow_reader"
    """It does not read its response."""

    SLOW_TRANSFER = "slow_transfer"
    """It moves a bulk body too slowly while others wait for a lane."""


OnShed = Callable[[str, ShedReason], None]
"""Called with the IP address of a closed connection, and why; must not block."""


class ShedCounter:
    """Counts shed connections and reports them. Used by the loop's thread only."""

    def __init__(self, on_shed: OnShed) -> None:
        self._on_shed = on_shed
        self._counts: Counter[ShedReason] = Counter()

    def note(self, connection: Connection, reason: ShedReason) -> None:
        self.note_address(connection.address[0], reason)

    def note_address(self, address: str, reason: ShedReason) -> None:
        self._counts[reason] += 1
        self._on_shed(address, reason)

    def counts(self) -> dict[str, int]:
        """Return how many were shed so far, by reason. From any thread."""
        return {reason.value: self._counts[reason] for reason in ShedReason}


SILENT_S: Final = 30.0
"""Twice a lease: the connection of an island's heartbeats is never silent longer."""


class ConnectionRegistry:
    """Every open connection. Methods may be called from any thread."""

    def __init__(self, limits: ListenerLimits, *, max_connections: int) -> None:
        self.is_closing = False
        self._limits = limits
        self._max_connections = max_connections
        self._connections: dict[Connection, None] = {}
        self._unverified: dict[str, dict[Connection, None]] = {}
        """By origin, oldest first."""

        self._num_unverified = 0
        self._shed: set[Connection] = set()
        """Connections not closed yet, and counted as closed."""

        self._changed = threading.Condition()
        self._past_in = 0
        self._past_out = 0

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def num_unverified(self) -> int:
        return self._num_unverified

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes received and bytes sent so far."""
        with self._changed:
            bytes_in = self._past_in + sum(
                connection.bytes_in for connection in self._connections
            )
            bytes_out = self._past_out + sum(
                connection.bytes_out for connection in self._connections
            )
        return bytes_in, bytes_out

    def victim(
        self, origin: str, *, is_verified: bool, now_s: float
    ) -> tuple[Connection | None, ShedReason] | None:
        """Return the connection to close before one of `origin` is added, and why.

        Return None if there is room, and no connection if the new one must be refused.
        The returned connection counts as closed from now on; the caller aborts it.
        """
        with self._changed:
            is_full = len(self._connections) - len(self._shed) >= self._max_connections
            victim = None if is_verified else self._over_budget(origin, now_s)
            if victim is None and is_full:
                victim = self._oldest_of_largest_origin() or self._longest_silent(now_s)
            if victim is not None:
                reason = ShedReason.IDLE if victim.is_verified else ShedReason.NO_TOKEN
                self._remove_unverified(victim)
                self._shed.add(victim)
                return victim, reason
            return (None, ShedReason.FULL) if is_full else None

    def add(self, connection: Connection) -> None:
        with self._changed:
            self._connections[connection] = None
            if not connection.is_verified:
                self._unverified.setdefault(connection.origin, {})[connection] = None
                self._num_unverified += 1

    def verified(self, connection: Connection) -> None:
        """Take a connection out of the budget of unverified ones. Safe to repeat."""
        with self._changed:
            self._remove_unverified(connection)

    def remove(self, connection: Connection) -> None:
        """Remove a connection that is closed. Safe to repeat."""
        with self._changed:
            if connection in self._connections:
                del self._connections[connection]
                self._remove_unverified(connection)
                self._shed.discard(connection)
                self._past_in += connection.bytes_in
                self._past_out += connection.bytes_out
                self._changed.notify_all()

    def wait_until_empty(self, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._connections, wait_s)

    def abort(self) -> None:
        """End all connections: threads that wait for one wake up."""
        with self._changed:
            for connection in self._connections:
                connection.abort()

    def close(self) -> None:
        """Close all connections that are still open."""
        with self._changed:
            remaining = list(self._connections)
        for connection in remaining:
            connection.close()
            self.remove(connection)

    def _over_budget(self, origin: str, now_s: float) -> Connection | None:
        if self._num_unverified >= max(1, self._max_connections // 2):
            return self._oldest_of_largest_origin()  # descriptors are scarce
        limits, victim = self._limits, None
        of_origin = self._unverified.get(origin, {})
        if len(of_origin) >= limits.max_unverified_per_origin:
            victim = next(iter(of_origin))
        elif self._num_unverified >= limits.max_unverified:
            victim = self._oldest_of_largest_origin()
        if victim is None or now_s - victim.opened_s < limits.unverified_grace_s:
            return None
        return victim

    def _oldest_of_largest_origin(self) -> Connection | None:
        """Return the oldest unverified connection of the origin with the most."""
        if not self._unverified:
            return None
        largest_origin = max(
            self._unverified, key=lambda origin: len(self._unverified[origin])
        )
        return next(iter(self._unverified[largest_origin]))

    def _longest_silent(self, now_s: float) -> Connection | None:
        open_ = (
            connection
            for connection in self._connections
            if connection not in self._shed
        )
        victim = min(
            open_, key=lambda connection: connection.silent_since_s, default=None
        )
        if victim is None or now_s - victim.silent_since_s < SILENT_S:
            return None
        return victim

    def _remove_unverified(self, connection: Connection) -> None:
        of_origin = self._unverified.get(connection.origin, {})
        if connection in of_origin:
            del of_origin[connection]
            self._num_unverified -= 1
            if not of_origin:
                del self._unverified[connection.origin]


OnClosed = Callable[[object], None]
OnError = Callable[[Request | None, Exception], None]


@dataclass(frozen=True, kw_only=True)
class ListenerParts:
    """The parts that serve a listener's connections, and its callbacks."""

    event_loop: EventLoop
    pools: ThreadPools
    registry: ConnectionRegistry
    limits: ListenerLimits
    clock: Clock
    on_closed: OnClosed
    on_error: OnError
    on_slow_reader: Callable[[Connection], None]
    owner: Callable[[Request], str]


class ConnectionCloser:
    """Closes connections."""

    def __init__(self, parts: ListenerParts) -> None:
        self._parts = parts

    def linger(self, connection: Connection) -> None:
        """Close after the other side has read the response, or after `linger_s`."""
        if connection.is_gone:
            self.lost(connection)
            return
        connection.end_sending()
        event_loop = self._parts.event_loop
        until_s = self._parts.clock.now_s() + self._parts.limits.linger_s
        event_loop.park(
            ParkedForClose(
                event_loop=event_loop,
                closer=self,
                connection=connection,
                until_s=until_s,
            )
        )

    def lost(self, connection: Connection) -> None:
        """Close a connection that the other side has closed."""
        self.drop(connection)
        if connection.tag is not None and not connection.is_ended_by_us:
            self.run_callback(partial(self._parts.on_closed, connection.tag))

    def drop(self, connection: Connection) -> None:
        """Close a connection that is no longer needed."""
        connection.close()
        self._parts.registry.remove(connection)

    def run_callback(self, callback: Callable[[], None]) -> None:
        self._parts.pools.callbacks.submit(callback)
