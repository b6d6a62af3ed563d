"""One connection of a caller: a request goes out, its reply comes in, again and again.

h11 reads heads and chunks; a body of known length goes straight to where it belongs.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import h11

from atoll.errors import CorruptError
from atoll.http.fetching import Fetching, Progress
from atoll.http.views import MAX_VIEWS, after

HEAD_BYTES: Final = 2**16
JSON: Final = "application/json"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What was answered. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: memoryview
    """In the memory that its fetching gave, if that was asked."""

    def json(self) -> Any:
        """Return the body, read as JSON.

        Raises:
            CorruptError: it is none.
        """
        try:
            return json.loads(bytes(self.body))
        except ValueError as exc:
            raise CorruptError(
                f"The reply ({self.status}) is not JSON: {exc}."
            ) from exc


class Broken(Exception):
    """The connection failed."""

    def __init__(self, why: str, *, is_untouched: bool, is_unanswered: bool) -> None:
        super().__init__(why)
        self.is_untouched = is_untouched
        """Whether not even the head was sent in full: nothing can be processed."""

        self.is_unanswered = is_unanswered
        """Whether not a byte came back."""


class Asking:
    """A connection, used by one thread at a time; `abort` is for any."""

    def __init__(self, sock: socket.socket, *, max_reply_bytes: int) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.is_reusable = False
        """Whether the last reply was read to its end and more may follow."""

        self._sock = sock
        self._max_reply_bytes = max_reply_bytes
        self._renew()

    @property
    def parser(self) -> h11.Connection:
        """Encodes the head of the next request."""
        return self._parser

    def is_stale(self) -> bool:
        """Return whether there is something to read although nothing was asked."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def ask(
        self,
        head: bytes,
        views: Sequence[memoryview],
        *,
        is_awaited: bool,
        method: str,
        fetching: Fetching,
        progress: Progress | None,
        timeout_s: float,
    ) -> Reply:
        """Send a request and return its reply, once.

        `progress` is told of what is sent, and `fetching` has its own.

        Raises:
            Broken: the connection failed; close it. `fetching` has what came.
            CorruptError: the reply is too long, or another part than was asked for;
                close it.
        """
        self.is_reusable = False
        self._received_before = self.bytes_received
        self._is_untouched = True
        self._sock.settimeout(timeout_s)
        try:
            event = self._send(head, views, is_awaited=is_awaited, progress=progress)
            reply = self._reply(event, method=method, fetching=fetching)
        except TimeoutError as exc:
            why = f"nothing moved for {timeout_s:g} s"
            raise Broken(why, is_untouched=False, is_unanswered=False) from exc
        except (OSError, h11.RemoteProtocolError) as exc:
            raise self._broken(str(exc) or type(exc).__name__) from exc
        if self.is_reusable:
            self._renew()
        return reply

    def _renew(self) -> None:
        self._parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES)

    def _broken(self, why: str) -> Broken:
        return Broken(
            why,
            is_untouched=self._is_untouched,
            is_unanswered=self.bytes_received == self._received_before,
        )

    # Sending.

    def _send(
        self,
        head: bytes,
        views: Sequence[memoryview],
        *,
        is_awaited: bool,
        progress: Progress | None,
    ) -> h11.Response:
        """Send all that is wanted, and return the head of the reply."""
        if is_awaited:
            self._send_views([memoryview(head)], None)
            self._is_untouched = False
            event = self._next_head()
            if isinstance(event, h11.Response):
                return event
            head = b""
        try:
            self._send_views([memoryview(head), *views], progress, skipped=len(head))
        except (BrokenPipeError, ConnectionResetError):
            # A refusal may have come before the connection was closed.
            if self._is_untouched:
                raise
        self._is_untouched = False
        while not isinstance(event := self._next_head(), h11.Response):
            continue
        return event

    def _send_views(
        self,
        views: Sequence[memoryview],
        progress: Progress | None,
        *,
        skipped: int = 0,
    ) -> None:
        left = [view for view in views if len(view)]
        total = sum(map(len, left)) - skipped
        sent_before = self.bytes_sent + skipped
        while left:
            sent = self._send_some(left)
            self.bytes_sent += sent
            self._is_untouched &= self.bytes_sent < sent_before
            left = after(left, sent)
            if progress is not None and total:
                progress(max(0, self.bytes_sent - sent_before), total)

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

    def _reply(self, event: h11.Response, *, method: str, fetching: Fetching) -> Reply:
        headers = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in event.headers
        }
        status = event.status_code
        self.is_reusable = "close" not in headers.get("connection", "").lower()
        if method == "HEAD" or status in {204, 304}:
            body = memoryview(b"")
        elif "content-length" in headers:
            return self._measured(status, headers, fetching)
        else:
            body = self._read_unmeasured()
        return Reply(status=status, headers=headers, body=body)

    def _measured(
        self, status: int, headers: dict[str, str], fetching: Fetching
    ) -> Reply:
        """Return a reply whose length is known; the rest of a body makes it whole."""
        size = int(headers["content-length"])
        self._check(size)
        if status >= 400 or headers.get("content-type", "").startswith(JSON):
            said = Fetching()  # an answer in itself: what has come of a body stays
            self._fill(said.begin(status, headers, size), said)
            return Reply(status=status, headers=headers, body=said.body)
        if (rest := fetching.rest_of(status, headers, size)) is not None:
            self._fill(rest, fetching)
            headers["content-length"] = str(len(fetching.body))
            return Reply(status=200, headers=headers, body=fetching.body)
        self._fill(fetching.begin(status, headers, size), fetching)
        return Reply(status=status, headers=headers, body=fetching.body)

    def _fill(self, view: memoryview, fetching: Fetching) -> None:
        early, _ = self._parser.trailing_data
        self.is_reusable &= len(early) <= len(view)
        filled = min(len(early), len(view))
        view[:filled] = early[:filled]
        fetching.came(filled)
        while filled < len(view):
            size = self._receive_into(view[filled:])
            filled += size
            fetching.came(size)

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
                piece = self._sock.recv(HEAD_BYTES)  # empty at the end, which h11 knows
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
