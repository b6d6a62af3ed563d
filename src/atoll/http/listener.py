"""A listener: one port, HTTP/1.1, and a fixed number of threads.

Theory of operation. The event loop's thread accepts connections and watches all that no
other thread works on: silent connections, heads and small bodies that are arriving,
requests with a deferred response. A complete request goes to a small pool,
which runs the handler and sends the response; bulk bodies have separate lanes. So the
number of threads is fixed, a slow or silent sender holds none of them, and a closed
connection is noticed immediately.

File descriptors limit the connections: a connection is a descriptor, and so is a file
of the journal and an update being received. Without a descriptor nothing is committed,
so connections get at most half of them.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from atoll.errors import UsageError
from atoll.http import registry
from atoll.http.connection import Connection, ListenerLimits, origin_of
from atoll.http.handshake import OnHandshakeFault
from atoll.http.request import Request
from atoll.http.response import Problem, encoded_last
from atoll.http.server import Handle, Judge, RequestServer
from atoll.http.threads import EventLoop, ThreadPools
from atoll.runtime import Clock

BACKLOG: Final = 1024
ACCEPTED_AT_ONCE: Final = 64
PAUSE_S: Final = 0.2
"""Pause before accepting again when the process has no descriptor left."""

CLEAR_S: Final = 0.05
JOIN_S: Final = 0.5
"""Time for threads to end; a thread that is stuck in a handler is abandoned."""


@dataclass(frozen=True, kw_only=True)
class ListenerCounts:
    """Counts of a listener's connections, bodies and bytes."""

    connections: int
    unverified: int
    """Those without a verified token."""

    parked_answers: int
    """Small responses waiting for a slow reader."""

    parked_bytes: int
    shed: Mapping[str, int]
    """Connections closed to make room so far, by reason."""

    bulk_active: int
    bulk_waiting: int
    bytes_in: int
    bytes_out: int


def _ignore(*arguments: object) -> None:
    """The default of callbacks, and of a judge who refuses nothing."""


def _no_owner(request: Request) -> str:
    return ""


class Listener:
    """Calls `handle` for each request, on a thread of a pool.

    `on_error` receives every exception of a handler other than `Problem`. `on_closed`
    receives the tag of a connection that the other side has closed, soon afterwards
    unless its handler is running. `on_refused_handshake` receives the address of a
    client whose TLS handshake failed, and the fault. The last two and all `on_gone`
    callbacks run one after the other on one separate thread. `on_shed` receives the
    address of a connection that is closed to make room, and the reason, on the loop's
    thread.

    With `verifies`, connections count as unverified until `judge` or `handle` sets
    `request.connection.is_verified`; without it, all of them count as verified.
    `owner` names the island that a bulk body belongs to, for its share of the lanes.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        host: str,
        port: int,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
        limits: ListenerLimits | None = None,
        on_error: registry.OnError = _ignore,
        on_closed: registry.OnClosed = _ignore,
        on_refused_handshake: OnHandshakeFault = _ignore,
        on_shed: registry.OnShed = _ignore,
        judge: Judge = _ignore,
        owner: Callable[[Request], str] = _no_owner,
        verifies: bool = False,
    ) -> None:
        self._limits, self._clock, self._tls = limits or ListenerLimits(), clock, tls
        self._verifies, self._shed = verifies, registry.ShedCounter(on_shed)
        report_error = partial(on_error, None)
        shed = registry.ShedReason
        self._listening_socket = _listening_socket(host, port)
        self._name = self._listening_socket.getsockname()
        self.max_connections = min(self._limits.max_connections, connection_budget())
        self._registry = registry.ConnectionRegistry(
            self._limits, max_connections=self.max_connections
        )
        self._event_loop = EventLoop(clock=clock, on_error=report_error)
        self._pools = ThreadPools(
            event_loop=self._event_loop,
            limits=self._limits,
            clock=clock,
            on_error=report_error,
            on_cut=partial(self._shed.note, reason=shed.SLOW_TRANSFER),
        )
        self._server = RequestServer(
            registry.ListenerParts(
                event_loop=self._event_loop,
                pools=self._pools,
                registry=self._registry,
                limits=self._limits,
                clock=clock,
                on_closed=on_closed,
                on_error=on_error,
                on_slow_reader=partial(self._shed.note, reason=shed.SLOW_READER),
                owner=owner,
            ),
            handle,
            judge=judge,
            on_refused_handshake=on_refused_handshake,
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on; the actual port if 0 was requested."""
        host, port = self._name[:2]
        return str(host), int(port)

    @property
    def counts(self) -> ListenerCounts:
        both = self._pools.lanes_in, self._pools.lanes_out
        bytes_in, bytes_out = self._registry.moved_bytes
        parked = self._server.parked
        return ListenerCounts(
            connections=len(self._registry),
            unverified=self._registry.num_unverified,
            parked_answers=len(parked),
            parked_bytes=parked.size_bytes,
            shed=self._shed.counts(),
            bulk_active=sum(lanes.active for lanes in both),
            bulk_waiting=sum(lanes.waiting for lanes in both),
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )

    def start(self) -> None:
        """Accept connections from now on."""
        self._pools.start()
        self._event_loop.call(self._open)
        self._event_loop.start()

    def close(self, grace_s: float = 5.0) -> None:
        """Stop accepting; abort the requests that do not end within `grace_s`.

        A deferred response gets its default immediately. Safe to repeat. It never takes
        much longer than `grace_s`, even if a handler is stuck.
        """
        self._registry.is_closing = True
        until_s = time.monotonic() + grace_s
        self._event_loop.call(self._clear)
        # Repeatedly: a connection may be parked just after the loop was cleared.
        while not self._registry.wait_until_empty(CLEAR_S):
            if time.monotonic() >= until_s:
                break
            self._event_loop.call(self._clear)
        self._registry.abort()
        self._registry.wait_until_empty(JOIN_S)
        self._pools.close(time.monotonic() + JOIN_S)
        self._event_loop.close(JOIN_S)
        self._registry.close()
        self._listening_socket.close()

    def _open(self) -> None:
        if not self._registry.is_closing:
            self._event_loop.start_accepting(self._listening_socket, self._accept)

    def _clear(self) -> None:
        self._event_loop.stop_accepting(self._listening_socket)
        self._listening_socket.close()
        for watch in self._event_loop.parked():
            watch.on_listener_closing()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = self._listening_socket.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor left: an immediate retry would spin
                self._event_loop.stop_accepting(self._listening_socket)
                pause = threading.Timer(PAUSE_S, self._event_loop.call, [self._open])
                pause.daemon = True
                pause.start()
                return
            with contextlib.suppress(OSError):  # the client has disconnected already
                self._admit(sock, address)

    def _admit(self, sock: socket.socket, address: tuple[str, int]) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self._make_room(address[0]):
            self._turn_away(sock)
            return
        if self._tls is not None:
            sock = self._tls.wrap_socket(
                sock, server_side=True, do_handshake_on_connect=False
            )
        connection = Connection(
            sock, (address[0], address[1]), limits=self._limits, clock=self._clock
        )
        connection.is_verified = not self._verifies
        self._registry.add(connection)
        self._server.admit(connection, is_encrypted=self._tls is not None)

    def _make_room(self, host: str) -> bool:
        """Close connections until one more is allowed; False: there is no room.

        There may be several to close: those of a burst whose grace period is over.
        """
        origin, now_s = origin_of(host), self._clock.now_s()
        while True:
            choice = self._registry.victim(
                origin, is_verified=not self._verifies, now_s=now_s
            )
            if choice is None:
                return True
            victim, reason = choice
            if victim is None:
                self._shed.note_address(host, reason)
                return False
            self._shed.note(victim, reason)
            victim.abort()  # its owner notices the end, and closes it

    def _turn_away(self, sock: socket.socket) -> None:
        with sock:
            if self._tls is None:
                full = Problem(503, "full", "Too many connections. Try again later.")
                sock.send(encoded_last(full))
            sock.shutdown(socket.SHUT_WR)


def _listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening_socket = socket.create_server(
            (host, port), family=family, backlog=BACKLOG
        )
    except OSError as exc:
        raise UsageError(
            f"Cannot listen on {host}:{port}: {exc.strerror}. Choose another port."
        ) from exc
    listening_socket.setblocking(False)
    return listening_socket


WANTED: Final = 16384
"""Enough for the default limit of connections, and as many files."""

RESERVED: Final = 128
"""Reserved for files: the journal, 64 bodies in lanes, a few for libraries."""

FEWEST: Final = 16
"""Connections that are accepted even if descriptors are scarcer."""


def raise_soft_limit() -> int:
    """Raise the soft limit of descriptors towards `WANTED`; return the new limit.

    The limit stays unchanged if the system refuses to raise it.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return _finite(soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError):  # macOS has a lower bound than its hard limit
        return _finite(soft)
    return target


def connection_budget() -> int:
    """Return the number of connections that leaves enough descriptors for files."""
    import resource

    soft = _finite(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return max(FEWEST, min(soft // 2, soft - RESERVED))


def _finite(limit: int) -> int:
    import resource

    return 2**20 if limit == resource.RLIM_INFINITY else limit
