"""The TLS handshake, which needs no thread while it waits, and its refusals.

A refusal is reported twice: to the caller, whose connection lingers so that the
response arrives, and to the listener's `on_refused_handshake`. A caller that only
disconnects is not refused: port checks do so all day.
"""

from __future__ import annotations

import enum
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from atoll.http.connection import Connection, ConnectionClosed
from atoll.http.parked_connections import CloseHandler, ParkedUntilDeadline
from atoll.http.response import Problem, encoded_last
from atoll.http.threads import EventLoop, ThreadPools


class HandshakeFault(enum.Enum):
    """The reason why a handshake was refused."""

    NO_CERTIFICATE = "no_certificate"
    WRONG_CERTIFICATE = "wrong_certificate"
    NO_TLS = "no_tls"
    OLD_TLS = "old_tls"
    BAD_TLS = "bad_tls"


OnHandshakeFault = Callable[[str, HandshakeFault], None]
"""Called with the IP address of a client, and why its handshake was refused."""

_NO_TLS = {"HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER"}
_FAULTS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": HandshakeFault.NO_CERTIFICATE,
    "CERTIFICATE_VERIFY_FAILED": HandshakeFault.WRONG_CERTIFICATE,
    "UNSUPPORTED_PROTOCOL": HandshakeFault.OLD_TLS,
    "VERSION_TOO_LOW": HandshakeFault.OLD_TLS,
} | dict.fromkeys(_NO_TLS, HandshakeFault.NO_TLS)


def handshake_fault(exc: BaseException | None) -> HandshakeFault | None:
    """Return why a handshake failed; None if the client ended it itself."""
    if not isinstance(exc, ssl.SSLError) or isinstance(exc, ssl.SSLEOFError):
        return None
    reason = exc.reason or ""
    # The client sends an alert when it refuses our side.
    return None if "_ALERT_" in reason else _FAULTS.get(reason, HandshakeFault.BAD_TLS)


class HandshakeHandler(CloseHandler, Protocol):
    """Takes over connections after their handshake."""

    def await_request(self, connection: Connection) -> None:
        """Wait for the first request."""

    def linger(self, connection: Connection) -> None:
        """Close after the other side has read the last response."""


class TlsHandshakes:
    """Makes handshakes, on threads of the small pool whenever bytes have arrived."""

    def __init__(
        self,
        handler: HandshakeHandler,
        *,
        event_loop: EventLoop,
        pools: ThreadPools,
        on_handshake_fault: OnHandshakeFault,
    ) -> None:
        self._handler, self._event_loop, self._pools = handler, event_loop, pools
        self._on_handshake_fault = on_handshake_fault

    def advance(self, connection: Connection, until_s: float) -> None:
        """Advance a handshake, which must end before `until_s`."""
        self._pools.small.submit(partial(self._advance, connection, until_s))

    def _advance(self, connection: Connection, until_s: float) -> None:
        try:
            events = connection.handshake()
        except ConnectionClosed as closed:
            self._failed(connection, handshake_fault(closed.__cause__))
            return
        if not events:
            self._handler.await_request(connection)
            return
        resume = partial(self.advance, connection, until_s)
        watch = ParkedHandshake(
            event_loop=self._event_loop,
            closer=self._handler,
            connection=connection,
            until_s=until_s,
            events=events,
            resume=resume,
        )
        self._event_loop.park(watch)

    def _failed(self, connection: Connection, fault: HandshakeFault | None) -> None:
        if fault is None:
            self._handler.drop(connection)
            return
        self._handler.run_callback(
            partial(self._on_handshake_fault, connection.address[0], fault)
        )
        if fault is HandshakeFault.NO_TLS:
            no_tls = Problem(400, "no_tls", "This port speaks TLS. Use https://.")
            connection.send_plainly(encoded_last(no_tls))
        self._handler.linger(connection)


@dataclass(eq=False, kw_only=True)
class ParkedHandshake(ParkedUntilDeadline):
    """Ends when the socket is ready for the next step, or at its deadline."""

    resume: Callable[[], None]

    def begin(self) -> None:
        """Wait for the selector: TLS has buffered no byte yet."""

    def ready(self, events: int) -> None:
        if self.leave():
            self.resume()
