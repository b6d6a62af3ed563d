"""One accepted connection: its socket, what was read ahead of need, and its pace.

Rule 1: a channel has one owner at a time, the lot's thread while it is parked and one
        thread of a pool otherwise; TLS allows no reading beside a writing.
Rule 2: while parked it is never blocked on; outside, nothing blocks beyond `idle_s`,
        and nothing crawls below `min_bytes_per_s` for long.
Rule 3: `abort`, `cut` and `waited_s` alone may be called by anyone.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from atoll.clock import Clock
from atoll.http.limits import Limits
from atoll.http.origin import origin_of
from atoll.http.pace import Gone, Pace
from atoll.http.views import MAX_VIEWS, after

FILE_BYTES: Final = 2**20
"""Read at once from a file that TLS must encrypt."""

RECORD_BYTES: Final = 2**14
"""Most of one TLS record: a write that cannot finish must be repeated with the same
bytes, so that larger ones would hide how far they have come."""

DATA, NOTHING, ENDED = "data", "nothing", "ended"

_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Cut(Exception):
    """We cannot send what we announced: the connection must end, so that it shows."""


class Channel:
    """A connection that a handler may tag: `on_closed(tag)` tells when it is gone."""

    def __init__(
        self,
        sock: socket.socket,
        address: tuple[str, int],
        *,
        limits: Limits,
        clock: Clock,
    ) -> None:
        self.tag: object | None = None
        self.opened_s = clock.now_s()
        self.address = address
        self.origin = origin_of(address[0])
        self.is_verified = False
        """Whether a request on it has shown a valid token; set by a handler."""

        self.silent_since_s = math.inf
        """Since when the next request is awaited; infinite while one is served."""

        self.ahead = bytearray()
        self.bytes_in = 0
        self.bytes_out = 0
        self.is_gone = False
        self.is_open = True
        self.is_ended_by_us = False
        """Whether it was ended here: then its end says nothing of the other side."""

        self._sock = sock
        self._limits = limits
        self._pace = Pace(limits=limits, clock=clock)
        self._scanned = 0

    @property
    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_undelivered(self) -> bool:
        """Whether TLS holds bytes that no selector would tell of."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    @property
    def certificate(self) -> bytes | None:
        """The certificate the other side showed, in DER."""
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.getpeercert(binary_form=True)
        return None

    def has_head(self) -> bool:
        """Return whether an empty line ends what was read ahead, or starts it."""
        start, self._scanned = max(0, self._scanned - 2), len(self.ahead)
        return (
            self.ahead.find(b"\n\r\n", start) >= 0
            or self.ahead.find(b"\n\n", start) >= 0
            or self.ahead[:1] == b"\n"
            or self.ahead[:2] == b"\r\n"
        )

    def take_ahead(self, size: int) -> memoryview:
        """Remove and return up to `size` of the bytes that were read ahead."""
        taken = memoryview(bytes(memoryview(self.ahead)[:size]))
        self.replace_ahead(self.ahead[size:])
        return taken

    def replace_ahead(self, data: bytes | bytearray) -> None:
        """Make `data` what was read ahead."""
        self.ahead = bytearray(data)
        self._scanned = 0

    # While parked: nothing below blocks.

    def handshake(self) -> int:
        """Advance TLS's handshake; return the events it waits for, 0 when done."""
        assert isinstance(self._sock, ssl.SSLSocket)
        self._set_timeout(0.0)
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except (OSError, ValueError) as exc:
            raise Gone from exc
        return 0

    def fill(self, scratch: memoryview) -> str:
        """Read ahead what has arrived, at most `scratch` of it."""
        size = self._receive_now(partial(self._sock.recv_into, scratch))
        if size > 0:
            self.ahead += scratch[:size]
        return _said(size)

    def skip(self, scratch: memoryview, size: int) -> tuple[str, int]:
        """Read and forget what has arrived, at most `size`; say how much it was."""
        view = scratch[: min(size, len(scratch))]
        skipped = self._receive_now(partial(self._sock.recv_into, view))
        return _said(skipped), max(0, skipped)

    def skip_raw(self, scratch: memoryview) -> tuple[str, int]:
        """Forget what has arrived, encrypted or not: nobody will read on."""
        skipped = self._receive_now(
            partial(socket.socket.recv_into, self._sock, scratch)
        )
        return _said(skipped), max(0, skipped)

    def send_now(self, data: memoryview) -> int:
        """Return how much of `data` went out without waiting; it may be none."""
        self._set_timeout(0.0)
        try:
            sent = self._sock.send(data)
        except _NOT_NOW:
            return 0
        except OSError as exc:
            raise Gone from exc
        self.bytes_out += sent
        return sent

    def send_some(self, data: memoryview) -> memoryview:
        """Send what goes out without waiting; return the rest."""
        most = RECORD_BYTES if isinstance(self._sock, ssl.SSLSocket) else len(data)
        while len(data):
            sent = self.send_now(data[:most])
            if not sent:
                break
            data = data[sent:]
        return data

    def send_plainly(self, data: bytes) -> None:
        """Send a few words past TLS, to somebody who does not speak it."""
        self._set_timeout(0.0)
        with contextlib.suppress(OSError):  # they are a kindness, not a promise
            self.bytes_out += socket.socket.send(self._sock, data)

    def _receive_now(self, receive: Callable[[], int]) -> int:
        self._set_timeout(0.0)
        try:
            size = receive()
        except _NOT_NOW:
            return -1
        except (OSError, ValueError):
            return 0
        self.bytes_in += size
        return size

    # Owned by a thread of a pool: what follows waits.

    def begin_body(self) -> None:
        """Measure the pace of what follows by itself."""
        self._pace.begin()

    def receive(self, view: memoryview) -> int:
        """Read into `view` what comes next, at least a byte; 0 at the end."""
        size = self._wait(partial(self._sock.recv_into, view))
        self.bytes_in += size
        return size

    def send(self, views: Sequence[memoryview]) -> None:
        """Send all of `views`, without joining them."""
        if isinstance(self._sock, ssl.SSLSocket):
            self._send_each(views)
            return
        left = [view for view in views if len(view)]
        while left:
            sent = self._wait(partial(self._sock.sendmsg, left[:MAX_VIEWS]))
            self.bytes_out += sent
            left = after(left, sent)

    def send_file(self, fd: int, first: int, size: int) -> None:
        """Send a part of a file, by the kernel alone where nothing is encrypted."""
        encrypted = isinstance(self._sock, ssl.SSLSocket)
        buffer = memoryview(bytearray(min(size, FILE_BYTES) if encrypted else 0))
        end = first + size
        while first < end:
            if encrypted:
                view = buffer[: min(end - first, len(buffer))]
                count = os.preadv(fd, [view], first)
                self._send_each([view[:count]])
            else:
                count = self._send_from(fd, first, end - first)
            if count == 0:
                raise Cut(f"the file ended {end - first} bytes early")
            first += count

    def _send_each(self, views: Sequence[memoryview]) -> None:
        for view in views:
            while len(view):
                sent = self._wait(partial(self._sock.send, view))
                self.bytes_out += sent
                view = view[sent:]

    def _send_from(self, fd: int, first: int, size: int) -> int:
        def send() -> int:
            try:
                return os.sendfile(self.fileno, fd, first, size)
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.fileno, select.POLLOUT)
                if not poll.poll(self._limits.idle_s * 1000):
                    raise TimeoutError from None
                return -1

        while (sent := self._wait(send)) < 0:
            continue
        self.bytes_out += sent
        return sent

    def _wait(self, move: Callable[[], int]) -> int:
        self._set_timeout(self._limits.idle_s)
        return self._pace.timed(move)

    def _set_timeout(self, timeout_s: float) -> None:
        if self._sock.gettimeout() != timeout_s:
            with contextlib.suppress(OSError):  # closed: the next call says so
                self._sock.settimeout(timeout_s)

    # Ends.

    def end_sending(self) -> None:
        """Say that nothing more will be sent."""
        # Not SSLSocket.shutdown: it drops the TLS state under whoever reads.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def abort(self) -> None:
        """Wake whoever waits for this connection: it is over."""
        self.is_ended_by_us = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def cut(self, *, is_sending: bool) -> None:
        """End what is moved: whoever waits for it gets `Cutoff`. From any thread.

        Of an upload only the reading ends, so that it can still be answered.
        """
        self.is_ended_by_us = True
        self._pace.is_cut = True
        how = socket.SHUT_RDWR if is_sending else socket.SHUT_RD
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, how)

    def waited_s(self, now_s: float) -> float:
        """Return how long threads have waited for the other side. From any thread."""
        return self._pace.all_waited_s(now_s)

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._sock.close()


def _said(size: int) -> str:
    if size > 0:
        return DATA
    return NOTHING if size < 0 else ENDED
