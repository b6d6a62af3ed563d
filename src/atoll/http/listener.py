"""One port, HTTP/1.1, threads for what moves and none for what waits.

Theory of operation. The lot's thread accepts connections and watches all that nobody
works on: silent ones, heads and small bodies on their way, requests whose answer comes
later, streams. What is complete goes to a small pool, which runs the handler and sends
the answer; bulk bodies have lanes of their own. So the number of threads is fixed, a
slow or silent sender holds none of them, and a closed connection is noticed at once.
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

from atoll.clock import Clock
from atoll.errors import UsageError
from atoll.http.channel import Channel
from atoll.http.crew import Crew
from atoll.http.descriptors import connection_budget
from atoll.http.handshakes import OnUnfit, Unfit
from atoll.http.limits import Limits
from atoll.http.lot import Lot
from atoll.http.origin import origin_of
from atoll.http.problem import Problem
from atoll.http.register import Register
from atoll.http.request import Request
from atoll.http.response import as_problem, head_of
from atoll.http.serving import Handle, Judge, OnClosed, OnError, Serving
from atoll.http.shed import OnShed, Shed, ShedCounter

BACKLOG: Final = 1024
ACCEPTED_AT_ONCE: Final = 64
PAUSE_S: Final = 0.2
"""Before accepting again when the process has no descriptor left."""

CLEAR_S: Final = 0.05
JOIN_S: Final = 0.5
"""For threads to end; one that is stuck in a handler is left behind."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a listener holds and has moved."""

    connections: int
    unverified: int
    """Of them, without a verified token."""

    parked_answers: int
    """Small responses waiting for a slow reader."""

    parked_bytes: int
    shed: Mapping[str, int]
    """Connections that were closed for room so far, by reason."""

    bulk_active: int
    bulk_waiting: int
    bytes_in: int
    bytes_out: int


def _ignore_error(request: Request | None, exc: Exception) -> None:
    pass


def _no_objection(request: Request) -> None:
    pass


def _ignore_closed(tag: object) -> None:
    pass


def _ignore_unfit(address: str, why: Unfit) -> None:
    pass


def _no_owner(request: Request) -> str:
    return ""


def _ignore_shed(address: str, why: Shed) -> None:
    pass


class Listener:
    """Hands each request to `handle`, on one of its threads.

    `on_error` is told of every exception a handler did not mean to raise; `on_closed`
    of the tag of a connection that its other side has closed, soon after it happened
    unless a handler is at work for it; `on_refused_handshake` of who did not get
    through TLS, and why. The last two and all `on_gone` run one after the other on a
    thread of their own. `on_shed` gets the address of a connection that is closed for
    room, and why, on the lot's thread.

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
        limits: Limits | None = None,
        on_error: OnError = _ignore_error,
        on_closed: OnClosed = _ignore_closed,
        on_refused_handshake: OnUnfit = _ignore_unfit,
        on_shed: OnShed = _ignore_shed,
        judge: Judge = _no_objection,
        owner: Callable[[Request], str] = _no_owner,
        verifies: bool = False,
    ) -> None:
        self._limits, self._clock, self._tls = limits or Limits(), clock, tls
        self._verifies, self._shed = verifies, ShedCounter(on_shed)
        failed = partial(on_error, None)
        self._door = _door(host, port)
        self._name = self._door.getsockname()
        self.max_connections = min(self._limits.max_connections, connection_budget())
        self._register = Register(self._limits, max_connections=self.max_connections)
        self._lot = Lot(clock=clock, on_error=failed)
        self._crew = Crew(
            lot=self._lot,
            limits=self._limits,
            clock=clock,
            on_error=failed,
            on_cut=partial(self._shed.note, why=Shed.SLOW_TRANSFER),
        )
        self._serving = Serving(
            handle,
            lot=self._lot,
            crew=self._crew,
            register=self._register,
            limits=self._limits,
            clock=clock,
            on_error=on_error,
            on_closed=on_closed,
            on_unfit=on_refused_handshake,
            owner=owner,
            on_slow_reader=partial(self._shed.note, why=Shed.SLOW_READER),
            judge=judge,
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens; the port is known even if 0 was asked for."""
        host, port = self._name[:2]
        return str(host), int(port)

    @property
    def counts(self) -> Counts:
        lanes = self._crew.lanes_in, self._crew.lanes_out
        bytes_in, bytes_out = self._register.moved_bytes
        parked = self._serving.parked
        return Counts(
            connections=len(self._register),
            unverified=self._register.num_unverified,
            parked_answers=len(parked),
            parked_bytes=parked.size_bytes,
            shed=self._shed.counts(),
            bulk_active=sum(each.active for each in lanes),
            bulk_waiting=sum(each.waiting for each in lanes),
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )

    def start(self) -> None:
        """Accept connections from now on."""
        self._crew.start()
        self._lot.call(self._open)
        self._lot.start()

    def close(self, grace_s: float = 5.0) -> None:
        """Stop accepting, let what is under way end within `grace_s`, then cut it.

        Whoever waits for a Later gets its default at once, and streams end. Safe to
        repeat; never takes much longer than `grace_s`, whatever a handler does.
        """
        self._register.is_closing = True
        until_s = time.monotonic() + grace_s
        self._lot.call(self._clear)
        # Again and again: a connection may be parked just after the lot was cleared.
        while not self._register.wait_until_empty(CLEAR_S):
            if time.monotonic() >= until_s:
                break
            self._lot.call(self._clear)
        self._register.abort()
        self._register.wait_until_empty(JOIN_S)
        self._crew.close(time.monotonic() + JOIN_S)
        self._lot.close(JOIN_S)
        self._register.close()
        self._door.close()

    def _open(self) -> None:
        if not self._register.is_closing:
            self._lot.open_door(self._door, self._arrive)

    def _clear(self) -> None:
        self._lot.shut_door(self._door)
        self._door.close()
        for watch in self._lot.parked():
            watch.hurry()

    def _arrive(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, address = self._door.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptor left: asking again at once would spin
                self._lot.shut_door(self._door)
                pause = threading.Timer(PAUSE_S, self._lot.call, [self._open])
                pause.daemon = True
                pause.start()
                return
            with contextlib.suppress(OSError):  # who has gone already is not served
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
        channel = Channel(
            sock, (address[0], address[1]), limits=self._limits, clock=self._clock
        )
        channel.is_verified = not self._verifies
        self._register.add(channel)
        self._serving.admit(channel, is_encrypted=self._tls is not None)

    def _make_room(self, host: str) -> bool:
        """Close connections until one more is allowed; False: there is no room.

        There may be several to close: those of a burst that have had their moment.
        """
        origin, now_s = origin_of(host), self._clock.now_s()
        while True:
            found = self._register.victim(
                origin, is_verified=not self._verifies, now_s=now_s
            )
            if found is None:
                return True
            victim, why = found
            if victim is None:
                self._shed.note_address(host, why)
                return False
            self._shed.note(victim, why)
            victim.abort()  # whoever owns it now finds it ended, and closes it

    def _turn_away(self, sock: socket.socket) -> None:
        with sock:
            if self._tls is None:
                full = Problem(503, "full", "Too many connections. Try again later.")
                response = as_problem(full)
                head = head_of(response, is_last=True, is_chunked=False)
                assert isinstance(response.body, bytes)
                sock.send(head + response.body)
            sock.shutdown(socket.SHUT_WR)


def _door(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        door = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise UsageError(
            f"Cannot listen on {host}:{port}: {exc.strerror}. Choose another port."
        ) from exc
    door.setblocking(False)
    return door
