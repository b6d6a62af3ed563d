"""Asks one listener: connections are kept, bodies are never joined or copied.

Rule 1: a certificate that is not the pinned one ends the call before a byte is sent.
Rule 2: a call is made again, once, only on a kept connection that turned out dead, and
        only if the request cannot have been processed or may be repeated.
Rule 3: what fails below HTTP is `Unreachable`; any status is a `Reply`.
Rule 4: what came of a body before it failed is in its `Fetching`, which can go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import h11

from atoll.errors import Refused, Unreachable, UsageError
from atoll.http.asking import Asking, Broken, Reply
from atoll.http.fetching import Fetching, Into, Progress

EXPECT_BYTES: Final = 256 * 1024
"""A body above this is held back until it is asked for."""

MAX_REPLY_BYTES: Final = 2**34

Body = bytes | Sequence[memoryview]

__all__ = ["Caller", "Reply"]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One request, which can be sent twice."""

    method: str
    target: str
    headers: Mapping[str, str]
    views: tuple[memoryview, ...]
    fetching: Fetching
    progress: Progress | None
    timeout_s: float
    is_repeatable: bool


class Caller:
    """Calls `host:port`, from any number of threads.

    Args:
        pin: the SHA-256 of the certificate in DER, as hex digits; a `sha256:` before
            them and colons between them are ignored.
        timeout_s: how long nothing may move before a call is given up.
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
        max_kept: int = 4,
    ) -> None:
        if pin is not None and tls is None:
            raise UsageError(f"A pin for {host}:{port} needs TLS. Give tls.")
        self._where = f"{host}:{port}"
        self._host, self._port, self._tls = host, port, tls
        self._pin = None if pin is None else _digits(pin)
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._max_reply_bytes, self._max_kept = max_reply_bytes, max_kept
        self._lock = threading.Lock()
        self._kept: list[Asking] = []
        self._busy: set[Asking] = set()
        self._past_bytes = (0, 0)
        self._is_closed = False

    @property
    def bytes_sent(self) -> int:
        """All that was sent, heads included, before encryption."""
        with self._lock:
            open_ = [*self._kept, *self._busy]
            return self._past_bytes[0] + sum(each.bytes_sent for each in open_)

    @property
    def bytes_received(self) -> int:
        with self._lock:
            open_ = [*self._kept, *self._busy]
            return self._past_bytes[1] + sum(each.bytes_received for each in open_)

    def call(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        into: Into | None = None,
        progress: Progress | None = None,
        fetching: Fetching | None = None,
        timeout_s: float | None = None,
        is_repeatable: bool = False,
    ) -> Reply:
        """Ask, and return what was answered.

        Args:
            target: path and query, encoded.
            into: asked, with its length, where a body is to be put that is neither
                JSON nor that of an error.
            progress: told the bytes moved and their total, for either body.
            fetching: instead of `into`, and goes on with what it has.
            timeout_s: instead of the caller's own, for a call that is meant to wait.

        Raises:
            Unreachable: nobody answered; the request may have been processed.
            Refused: the certificate is not the one that was pinned.
            CorruptError: the answer is longer than allowed, or another part of a body
                than was asked for.
        """
        call = _Call(
            method=method,
            target=target,
            headers=headers or {},
            views=_views(body),
            fetching=fetching or Fetching(into, progress),
            progress=progress,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            is_repeatable=is_repeatable,
        )
        asking = self._take_kept()
        if asking is not None:
            try:
                return self._ask(asking, call)
            except Broken as broken:
                may_repeat = broken.is_untouched or call.is_repeatable
                if not (broken.is_unanswered and may_repeat):
                    raise self._unreachable(broken) from broken
        try:
            return self._ask(self._connect(), call)
        except Broken as broken:
            raise self._unreachable(broken) from broken

    def close(self) -> None:
        """Close all connections; calls under way end with `Unreachable`."""
        with self._lock:
            self._is_closed = True
            kept, self._kept = self._kept, []
            busy = list(self._busy)
        for asking in kept:
            self._forget(asking)
        for asking in busy:
            asking.abort()

    def _ask(self, asking: Asking, call: _Call) -> Reply:
        is_kept = False
        try:
            reply = asking.ask(
                self._head(call, asking.parser),
                call.views,
                is_awaited=_is_awaited(call),
                method=call.method,
                fetching=call.fetching,
                progress=call.progress,
                timeout_s=call.timeout_s,
            )
            is_kept = asking.is_reusable
            return reply
        finally:
            self._give_back(asking, is_kept=is_kept)

    def _head(self, call: _Call, parser: h11.Connection) -> bytes:
        headers = {"host": self._where, **call.headers, **call.fetching.headers()}
        size = sum(map(len, call.views))
        if size or call.method in {"PUT", "POST"}:
            headers["content-length"] = str(size)
        if _is_awaited(call):
            headers["expect"] = "100-continue"
        try:
            event = h11.Request(
                method=call.method, target=call.target, headers=list(headers.items())
            )
            return parser.send(event) or b""
        except h11.LocalProtocolError as exc:
            said = f"{call.method} {call.target!r} cannot be sent: {exc}."
            raise UsageError(said) from exc

    def _connect(self) -> Asking:
        if self._is_closed:
            raise Unreachable(f"The caller of {self._where} was closed.")
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
        asking = Asking(sock, max_reply_bytes=self._max_reply_bytes)
        with self._lock:
            self._busy.add(asking)
        return asking

    def _check_pin(self, sock: socket.socket) -> None:
        if self._pin is None:
            return
        assert isinstance(sock, ssl.SSLSocket)
        shown = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()
        if not hmac.compare_digest(shown.encode(), self._pin.encode()):
            raise Refused(
                f"{self._where} shows a certificate with SHA-256 {shown}, not the "
                f"pinned {self._pin}. Ask for a new invitation if it was replaced."
            )

    def _translated(self, exc: BaseException) -> BaseException:
        if isinstance(exc, ssl.SSLCertVerificationError):
            return Refused(
                f"{self._where} shows a certificate that does not verify: "
                f"{exc.verify_message}. Pin it, or give its authority."
            )
        return self._unreachable(exc) if isinstance(exc, OSError) else exc

    def _unreachable(self, exc: BaseException) -> Unreachable:
        why = str(exc) or type(exc).__name__
        return Unreachable(
            f"{self._where} did not answer: {why}. "
            "Check that it runs and that the network lets you through, then try again."
        )

    def _take_kept(self) -> Asking | None:
        while True:
            with self._lock:
                if not self._kept:
                    return None
                asking = self._kept.pop()
                self._busy.add(asking)
            if not asking.is_stale():
                return asking
            self._give_back(asking, is_kept=False)

    def _give_back(self, asking: Asking, *, is_kept: bool) -> None:
        with self._lock:
            self._busy.discard(asking)
            has_room = len(self._kept) < self._max_kept and not self._is_closed
            if is_kept and has_room:
                self._kept.append(asking)
                return
        self._forget(asking)

    def _forget(self, asking: Asking) -> None:
        with self._lock:
            sent, received = self._past_bytes
            self._past_bytes = (
                sent + asking.bytes_sent,
                received + asking.bytes_received,
            )
        with contextlib.suppress(OSError):
            asking.close()


def _digits(pin: str) -> str:
    return pin.lower().removeprefix("sha256:").replace(":", "")


def _views(body: Body | None) -> tuple[memoryview, ...]:
    if body is None:
        return ()
    parts = [memoryview(body)] if isinstance(body, bytes) else body
    return tuple(part.cast("B") for part in parts if part.nbytes)


def _is_awaited(call: _Call) -> bool:
    return sum(map(len, call.views)) > EXPECT_BYTES
