"""A listener on loopback, and the other side of it byte by byte."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from atoll.http import HttpClient, Listener, ListenerLimits, Request, Response
from atoll.http.handshake import OnHandshakeFault
from atoll.http.registry import OnClosed, OnError, OnShed
from atoll.http.server import Handle
from atoll.runtime import SystemClock
from tests.http.certificates import Certificate, unchecked

PATIENCE_S = 10.0
"""Beyond what anything here takes; a test that needs it has failed."""


@dataclass(frozen=True)
class Heard:
    """One response, as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


class Dialogue:
    """A connection on which a test says whatever it likes."""

    def __init__(
        self, address: tuple[str, int], tls: ssl.SSLContext | None = None
    ) -> None:
        self.sock = socket.create_connection(address, timeout=PATIENCE_S)
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock)
        self._file = self.sock.makefile("rb")

    def __enter__(self) -> Dialogue:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def say(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, line: str, body: bytes = b"", **headers: str) -> Heard:
        """Send a request with a head of its own, and return the answer."""
        self.say(head(line, content_length=str(len(body)), **headers) + body)
        return self.hear()

    def hear(self) -> Heard:
        """Return the next response; a body ends by its length."""
        status, headers = self.hear_head()
        body = self._file.read(int(headers.get("content-length", "0")))
        return Heard(status, headers, body)

    def hear_head(self) -> tuple[int, dict[str, str]]:
        line = self._file.readline()
        if not line:
            raise EOFError("the connection was closed")
        headers = {}
        while (field := self._file.readline().strip()) != b"":
            name, _, value = field.decode("latin-1").partition(": ")
            headers[name] = value
        return int(line.split()[1]), headers

    def hear_bytes(self, size: int) -> bytes:
        return self._file.read(size)

    def hear_end(self) -> bytes:
        """Return all that comes until the other side closes."""
        try:
            return self._file.read()
        except ConnectionError:
            return b""


def head(line: str, **headers: str) -> bytes:
    """Return a head; underscores in names of headers stand for hyphens."""
    fields = {"host": "here"} | {k.replace("_", "-"): v for k, v in headers.items()}
    lines = [
        f"{line} HTTP/1.1",
        *(f"{name}: {value}" for name, value in fields.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def hello(request: Request) -> Response:
    return Response(body=b"hello")


@contextmanager
def listening(
    handle: Handle = hello,
    *,
    tls: ssl.SSLContext | None = None,
    on_error: OnError | None = None,
    on_closed: OnClosed | None = None,
    on_refused_handshake: OnHandshakeFault | None = None,
    on_shed: OnShed | None = None,
    owner: Callable[[Request], str] | None = None,
    verifies: bool = False,
    **limits: Any,
) -> Iterator[Listener]:
    """Listen on a free port of loopback, with these limits."""
    told: dict[str, Any] = {
        "on_error": on_error,
        "on_closed": on_closed,
        "on_refused_handshake": on_refused_handshake,
        "on_shed": on_shed,
        "owner": owner,
    }
    listener = Listener(
        handle,
        host="127.0.0.1",
        port=0,
        clock=SystemClock(),
        tls=tls,
        limits=ListenerLimits(**limits),
        verifies=verifies,
        **{name: callback for name, callback in told.items() if callback},
    )
    listener.start()
    try:
        yield listener
    finally:
        listener.close(grace_s=0.2)


@contextmanager
def calling(listener: Listener, **options: Any) -> Iterator[HttpClient]:
    """Call a listener, patiently."""
    options = {"timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S} | options
    caller = HttpClient(*listener.address, **options)
    try:
        yield caller
    finally:
        caller.close()


@contextmanager
def talking(
    handle: Handle = hello, *, certificate: Certificate | None = None, **options: Any
) -> Iterator[Dialogue]:
    """Talk to a listener; with TLS if there is a certificate to show."""
    shown = certificate.shown() if certificate else None
    trusted = unchecked() if certificate else None
    with (
        listening(handle, tls=shown, **options) as listener,
        Dialogue(listener.address, trusted) as dialogue,
    ):
        yield dialogue
