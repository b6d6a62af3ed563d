"""A client of one listener: connections are kept, bodies are never joined or copied.

h11 reads heads and chunks; a body of known length is received straight into its memory.
Rule 1: a certificate that is not the pinned one ends the call before a byte is sent.
Rule 2: a call is repeated, once, only on a kept connection that turned out dead, and
        only if the request cannot have been processed or may be repeated.
Rule 3: a failure below HTTP is `Unreachable`; any status is a reply.
Rule 4: after a failure, `Download` keeps the received part. It resumes only if the
        body has an `ETag`: `If-Range` names the body that the rest must belong to, and
        a changed body is sent whole, from the start.
Rule 5: the rest must be exactly the missing bytes; the reader verifies the whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import select
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import h11

from atoll.errors import CorruptError, Refused, Unreachable, UsageError
from atoll.http.connection import MAX_VIEWS, unsent_views
from atoll.retry import BROKEN_BODY, retried

EXPECT_BYTES: Final = 256 * 1024
"""A larger body is sent only after the listener replied `100 Continue`."""

MAX_REPLY_BYTES: Final = 2**34

Body = bytes | Sequence[memoryview]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One request, which can be sent twice."""

    method: str
    target: str
    headers: Mapping[str, str]
    views: tuple[memoryview, ...]
    fetching: Download
    timeout_s: float
    is_repeatable: bool

    @property
    def is_awaited(self) -> bool:
        """Whether the body is sent only after the listener replied `100 Continue`."""
        return sum(map(len, self.views)) > EXPECT_BYTES


class HttpClient:
    """Calls `host:port`, from any number of threads.

    Args:
        pin: the SHA-256 of the certificate in DER, as hex digits; a `sha256:` before
            them and colons between them are ignored.
        timeout_s: a call fails after this time without a byte sent or received.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        pin: str | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        max_idle: int = 4,
    ) -> None:
        if pin is not None and tls is None:
            raise UsageError(f"A pin for {host}:{port} needs TLS. Give tls.")
        self._address = f"{host}:{port}"
        self._host, self._port, self._tls = host, port, tls
        self._pin = None if pin is None else _digits(pin)
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._max_reply_bytes, self._max_idle = max_reply_bytes, max_idle
        self._lock = threading.Lock()
        self._idle: list[ClientConnection] = []
        self._busy: set[ClientConnection] = set()
        self._past_bytes = (0, 0)
        self._is_closed = False

    @property
    def bytes_sent(self) -> int:
        """Bytes sent over all connections, heads included, before encryption."""
        return self._moved_bytes()[0]

    @property
    def bytes_received(self) -> int:
        return self._moved_bytes()[1]

    def _moved_bytes(self) -> tuple[int, int]:
        with self._lock:
            sent, received = self._past_bytes
            for connection in (*self._idle, *self._busy):
                sent += connection.bytes_sent
                received += connection.bytes_received
        return sent, received

    def call(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        fetching: Download | None = None,
        timeout_s: float | None = None,
        is_repeatable: bool = False,
    ) -> HttpReply:
        """Send a request and return its reply.

        Args:
            target: path and query, encoded.
            fetching: the memory for the body of the reply, unless that is JSON or an
                error; resumed after the bytes it already has.
            timeout_s: replaces the client's own timeout, e.g. for a long poll.

        Raises:
            Unreachable: there was no reply; the request may have been processed.
            Refused: the certificate is not the pinned one.
            CorruptError: the reply is longer than allowed, or is not the requested
                range of the body.
        """
        call = _Call(
            method=method,
            target=target,
            headers=headers or {},
            views=_views(body),
            fetching=fetching or Download(),
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            is_repeatable=is_repeatable,
        )
        # An idle connection may turn out closed: the innermost retry of `atoll.retry`.
        connection = self._take_idle()
        if connection is not None:
            try:
                return self._request(connection, call)
            except ConnectionBroken as broken:
                may_repeat = broken.is_untouched or call.is_repeatable
                if not (broken.is_unanswered and may_repeat):
                    raise self._unreachable(broken) from broken
        try:
            return self._request(self._connect(), call)
        except ConnectionBroken as broken:
            raise self._unreachable(broken) from broken

    def close(self) -> None:
        """Close all connections; calls in progress fail with `Unreachable`."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            self._forget(connection)
        for connection in busy:
            connection.abort()

    def _request(self, connection: ClientConnection, call: _Call) -> HttpReply:
        is_reusable = False
        try:
            reply = connection.request(self._head(call, connection.parser), call)
            is_reusable = connection.is_reusable
            return reply
        finally:
            self._give_back(connection, is_reusable=is_reusable)

    def _head(self, call: _Call, parser: h11.Connection) -> bytes:
        headers = {"host": self._address, **call.headers, **call.fetching.headers()}
        size = sum(map(len, call.views))
        if size or call.method in {"PUT", "POST"}:
            headers["content-length"] = str(size)
        if call.is_awaited:
            headers["expect"] = "100-continue"
        try:
            event = h11.Request(
                method=call.method, target=call.target, headers=list(headers.items())
            )
            return parser.send(event) or b""
        except h11.LocalProtocolError as exc:
            message = f"{call.method} {call.target!r} cannot be sent: {exc}."
            raise UsageError(message) from exc

    def _connect(self) -> ClientConnection:
        if self._is_closed:
            raise Unreachable(f"The client of {self._address} was closed.")
        address = self._host, self._port
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection(address, timeout=self._connect_timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._host)
            self._check_pin(sock)
        except BaseException as exc:
            if sock is not None:
                sock.close()
            raise self._translated(exc) from exc
        connection = ClientConnection(sock, max_reply_bytes=self._max_reply_bytes)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _check_pin(self, sock: socket.socket) -> None:
        if self._pin is None:
            return
        assert isinstance(sock, ssl.SSLSocket)
        digest = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()
        if not hmac.compare_digest(digest.encode(), self._pin.encode()):
            raise Refused(
                f"{self._address} shows a certificate with SHA-256 {digest}, not the "
                f"pinned {self._pin}. Ask for a new invitation if it was replaced."
            )

    def _translated(self, exc: BaseException) -> BaseException:
        if isinstance(exc, ssl.SSLCertVerificationError):
            return Refused(
                f"{self._address} shows a certificate that does not verify: "
                f"{exc.verify_message}. Pin it, or give its authority."
            )
        return self._unreachable(exc) if isinstance(exc, OSError) else exc

    def _unreachable(self, exc: BaseException) -> Unreachable:
        reason = str(exc) or type(exc).__name__
        return Unreachable(
            f"{self._address} did not answer: {reason}. "
            "Check that it runs and that the network lets you through, then try again."
        )

    def _take_idle(self) -> ClientConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._busy.add(connection)
            if not connection.is_stale():
                return connection
            self._give_back(connection, is_reusable=False)

    def _give_back(self, connection: ClientConnection, *, is_reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            has_room = len(self._idle) < self._max_idle and not self._is_closed
            if is_reusable and has_room:
                self._idle.append(connection)
                return
        self._forget(connection)

    def _forget(self, connection: ClientConnection) -> None:
        with self._lock:
            sent, received = self._past_bytes
            self._past_bytes = (
                sent + connection.bytes_sent,
                received + connection.bytes_received,
            )
        with contextlib.suppress(OSError):
            connection.close()


def _digits(pin: str) -> str:
    return pin.lower().removeprefix("sha256:").replace(":", "")


def _views(body: Body | None) -> tuple[memoryview, ...]:
    if body is None:
        return ()
    parts = [memoryview(body)] if isinstance(body, bytes) else body
    return tuple(part.cast("B") for part in parts if part.nbytes)


BUSY: Final = (502, 503, 504)
"""Statuses of a busy server, or of a proxy whose server is not up: ask again."""

HEAD_BYTES: Final = 2**16
JSON: Final = "application/json"


@dataclass(frozen=True, kw_only=True)
class HttpReply:
    """A reply of any status. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: memoryview
    """In the memory of the `Download`, unless it is JSON or the body of an error."""

    def json(self) -> Any:
        """Return the body, parsed as JSON.

        Raises:
            CorruptError: the body is not JSON.
        """
        try:
            return json.loads(bytes(self.body))
        except ValueError as exc:
            raise CorruptError(
                f"The reply ({self.status}) is not JSON: {exc}."
            ) from exc


class ConnectionBroken(Exception):
    """The connection failed."""

    def __init__(self, reason: str, *, is_untouched: bool, is_unanswered: bool) -> None:
        super().__init__(reason)
        self.is_untouched = is_untouched
        """Whether the head was not sent in full: the request cannot be processed."""

        self.is_unanswered = is_unanswered
        """Whether no byte of a reply was received."""


class ClientConnection:
    """A connection, used by one thread at a time; `abort` may be called by any."""

    def __init__(self, sock: socket.socket, *, max_reply_bytes: int) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.is_reusable = False
        """Whether the last reply was read to its end and another request may follow."""

        self._sock = sock
        self._max_reply_bytes = max_reply_bytes
        self._reset_parser()

    @property
    def parser(self) -> h11.Connection:
        """Encodes the head of the next request."""
        return self._parser

    def is_stale(self) -> bool:
        """Return whether bytes, or the end, have arrived without a request."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def request(self, head: bytes, call: _Call) -> HttpReply:
        """Send a request and return its reply, once.

        Raises:
            ConnectionBroken: the connection failed; close it. The call's `fetching`
                keeps the received bytes.
            CorruptError: the reply is too long, or is not the requested range; close
                the connection.
        """
        self.is_reusable = False
        self._received_before = self.bytes_received
        self._is_untouched = True
        self._sock.settimeout(call.timeout_s)
        try:
            reply = self._reply(self._send(head, call), call)
        except TimeoutError as exc:
            reason = f"nothing moved for {call.timeout_s:g} s"
            raise ConnectionBroken(
                reason, is_untouched=False, is_unanswered=False
            ) from exc
        except (OSError, h11.RemoteProtocolError) as exc:
            raise ConnectionBroken(
                str(exc) or type(exc).__name__,
                is_untouched=self._is_untouched,
                is_unanswered=self.bytes_received == self._received_before,
            ) from exc
        if self.is_reusable:
            self._reset_parser()
        return reply

    def _reset_parser(self) -> None:
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)

    # Sending.

    def _send(self, head: bytes, call: _Call) -> h11.Response:
        """Send head and body, and return the head of the reply.

        The body stays unsent if the listener replies to the head without reading it.
        """
        if call.is_awaited:
            self._send_views([memoryview(head)])
            self._is_untouched = False
            event = self._next_head()
            if isinstance(event, h11.Response):
                return event
            head = b""
        try:
            self._send_views([memoryview(head), *call.views], head_bytes=len(head))
        except (BrokenPipeError, ConnectionResetError):
            # The listener may have sent a refusal before it closed the connection.
            if self._is_untouched:
                raise
        self._is_untouched = False
        while not isinstance(event := self._next_head(), h11.Response):
            continue
        return event

    def _send_views(self, views: Sequence[memoryview], *, head_bytes: int = 0) -> None:
        unsent = [view for view in views if len(view)]
        head_sent_at = self.bytes_sent + head_bytes
        while unsent:
            sent = self._send_some(unsent)
            self.bytes_sent += sent
            self._is_untouched &= self.bytes_sent < head_sent_at
            unsent = unsent_views(unsent, sent)

    def _send_some(self, views: list[memoryview]) -> int:
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.send(views[0])
        return self._sock.sendmsg(views[:MAX_VIEWS])

    # Receiving.

    def _next_head(self) -> h11.Response | h11.InformationalResponse:
        while True:
            event = self._parser.next_event()
            if isinstance(event, h11.Response | h11.InformationalResponse):
                return event
            if event is not h11.NEED_DATA:
                raise ConnectionError("the connection was closed")
            self._parser.receive_data(self._receive())

    def _receive(self) -> bytes:
        data = self._sock.recv(HEAD_BYTES)
        self.bytes_received += len(data)
        if not data:
            raise ConnectionError("the connection was closed")
        return data

    def _reply(self, event: h11.Response, call: _Call) -> HttpReply:
        headers = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in event.headers
        }
        status = event.status_code
        self.is_reusable = "close" not in headers.get("connection", "").lower()
        if call.method == "HEAD" or status in {204, 304}:
            body = memoryview(b"")
        elif "content-length" in headers:
            return self._measured(status, headers, call.fetching)
        else:
            body = self._read_unmeasured()
        return HttpReply(status=status, headers=headers, body=body)

    def _measured(
        self, status: int, headers: dict[str, str], fetching: Download
    ) -> HttpReply:
        """Return a reply of known length; the rest of a body completes the body."""
        size = int(headers["content-length"])
        self._check(size)
        if status >= 400 or headers.get("content-type", "").startswith(JSON):
            complete = Download()  # not the requested body, whose received part stays
            self._fill(complete.begin(status, headers, size), complete)
            return HttpReply(status=status, headers=headers, body=complete.body)
        if (rest := fetching.rest_of(status, headers, size)) is not None:
            self._fill(rest, fetching)
            headers["content-length"] = str(len(fetching.body))
            return HttpReply(status=200, headers=headers, body=fetching.body)
        self._fill(fetching.begin(status, headers, size), fetching)
        return HttpReply(status=status, headers=headers, body=fetching.body)

    def _fill(self, view: memoryview, fetching: Download) -> None:
        early, _ = self._parser.trailing_data
        self.is_reusable &= len(early) <= len(view)
        filled = min(len(early), len(view))
        view[:filled] = early[:filled]
        fetching.advance(filled)
        while filled < len(view):
            size = self._receive_into(view[filled:])
            filled += size
            fetching.advance(size)

    def _receive_into(self, view: memoryview) -> int:
        size = self._sock.recv_into(view)
        self.bytes_received += size
        if not size:
            raise ConnectionError(f"the reply ended {len(view)} bytes early")
        return size

    def _read_unmeasured(self) -> memoryview:
        data = bytearray()
        while not isinstance(event := self._parser.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                data += event.data
                self._check(len(data))
            else:
                piece = self._sock.recv(
                    HEAD_BYTES
                )  # empty at the end, which h11 handles
                self.bytes_received += len(piece)
                self._parser.receive_data(piece)
        self.is_reusable &= not self._parser.trailing_data[0]
        return memoryview(data)

    def _check(self, size: int) -> None:
        if size > self._max_reply_bytes:
            self.is_reusable = False
            raise CorruptError(
                f"The reply has {size} bytes; {self._max_reply_bytes} are allowed."
            )


BodyBuffer = Callable[[int], memoryview]
Progress = Callable[[int, int], None]
T = TypeVar("T")


class Download:
    """The memory for the body of a reply, and how much of it has arrived.

    Pass it to `HttpClient.call` again after `Unreachable`, and only the rest is
    requested, if possible. It belongs to one target, and to one thread at a time.

    Args:
        into: called with the length of a body, returns the memory for it; called
            again if the body has changed, and then the bytes so far do not count.
        progress: called with the bytes that have arrived, and their total.
    """

    def __init__(
        self, into: BodyBuffer | None = None, progress: Progress | None = None
    ) -> None:
        self._into, self._progress = into or new_buffer, progress
        self._view = memoryview(b"")
        self._etag = ""
        self.filled_bytes = 0

    @property
    def can_resume(self) -> bool:
        """Whether a part has arrived and the rest of the same body can be requested."""
        return bool(self._etag) and 0 < self.filled_bytes < len(self._view)

    @property
    def body(self) -> memoryview:
        """The whole body, once it has arrived."""
        return self._view

    def headers(self) -> dict[str, str]:
        """Return the headers that request the rest of the body."""
        if not self.can_resume:
            return {}
        return {"range": f"bytes={self.filled_bytes}-", "if-range": self._etag}

    def rest_of(
        self, status: int, headers: Mapping[str, str], size: int
    ) -> memoryview | None:
        """Return memory for the rest of the body; None if the reply is not the rest.

        Raises:
            CorruptError: the reply has another range than the requested one.
        """
        if status != 206 or not self.can_resume:
            return None
        first, total, etag = self.filled_bytes, len(self._view), self._etag
        expected = (f"bytes {first}-{total - 1}/{total}", total - first, etag)
        received = headers.get("content-range"), size, headers.get("etag", etag)
        if received != expected:
            self._etag = ""
            raise CorruptError(
                f"The rest of a body was requested, {expected[0]} of {etag}, and "
                f"{received[0]} of {received[2]} came, with {size} "
                "bytes. Ask for all of it."
            )
        return self._view[first:]

    def begin(self, status: int, headers: Mapping[str, str], size: int) -> memoryview:
        """Return the memory for a body that is sent from its first byte.

        Raises:
            UsageError: `into` returned too little memory.
        """
        view = self._into(size).cast("B")[:size]
        if len(view) < size:
            raise UsageError(f"{len(view)} bytes of memory were given for {size}.")
        etag = headers.get("etag", "")
        self._etag = etag if status == 200 and etag.startswith('"') else ""
        self._view, self.filled_bytes = view, 0
        return view

    def advance(self, size: int) -> None:
        """Count bytes that have arrived."""
        self.filled_bytes += size
        if self._progress is not None and size:
            self._progress(self.filled_bytes, len(self._view))


def download(
    ask: Callable[[], T], fetching: Download, *, sleep: Callable[[float], None]
) -> T:
    """Call `ask` until `fetching` is complete, and return the last reply.

    Raises:
        Unreachable: no part has arrived, or it broke too often; a repetition is safe.
    """
    return retried(
        ask,
        BROKEN_BODY,
        sleep=sleep,
        may_retry=lambda fault, pause_s: fetching.can_resume,
        progress=lambda: fetching.filled_bytes,
    )


def new_buffer(size: int) -> memoryview:
    """Return new memory for a body."""
    return memoryview(bytearray(size))


def at_most(max_bytes: int, name: str) -> BodyBuffer:
    """Return a function that allocates memory for a body of at most `max_bytes`.

    For a larger body it raises `CorruptError`, before any of it is received; `name`
    names the body in the error.
    """

    def into(size: int) -> memoryview:
        if size > max_bytes:
            raise CorruptError(
                f"{size} bytes would be sent of {name}, and at most {max_bytes} are "
                "taken."
            )
        return new_buffer(size)

    return into
