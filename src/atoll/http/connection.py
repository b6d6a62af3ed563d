"""One accepted connection: its limits, its minimum rate, its socket and read buffer.

Rule 1: one owner at a time: the event loop while the connection is parked, else one
        thread of a pool. Only the owner reads, writes and closes.
Rule 2: while the connection is parked nothing blocks. In a pool thread, nothing blocks
        beyond `idle_s`, and no body moves slower than `min_bytes_per_s` for long.
Rule 3: only `abort`, `cut` and `waited_s` may be called from any thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import select
import selectors
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from atoll.errors import UsageError
from atoll.runtime import Clock


@dataclass(frozen=True, kw_only=True)
class ListenerLimits:
    """Every bound of a listener, in one place. All are positive."""

    max_connections: int = 4096
    """Open connections; fewer if descriptors are scarce. One more is answered 503."""

    max_unverified: int = 512
    """Connections that have not shown a valid token, of all origins together.

    Each costs a descriptor and up to 64 KiB, so 32 MiB. An island shows its token with
    the first request: of a thousand that connect together, each is unverified for
    milliseconds.
    """

    max_unverified_per_origin: int = 128
    """The same for one IPv4 address or one IPv6 /64: a quarter, so that no origin
    keeps others out, and enough for islands behind one address that start together.
    """

    unverified_grace_s: float = 2.0
    """A younger connection is closed for lack of a token only when unverified
    connections fill half of the allowed ones: islands that start together show their
    tokens a moment after connecting.
    """

    max_head_bytes: int = 32 * 1024
    """Request line and headers; beyond it 431."""

    max_path_bytes: int = 2048
    """The target before its query; beyond it 414."""

    head_s: float = 10.0
    """From the first byte of a head, or from accepting, to its last byte.

    Also how long an unverified connection may be silent between two requests.
    """

    handshake_s: float = 10.0
    """For the whole TLS handshake."""

    keep_alive_s: float = 300.0
    """How long a connection may be silent between two requests."""

    small_bytes: int = 64 * 1024
    """Bodies up to this size are moved by the small pool; larger ones need a lane."""

    small_threads: int = 16
    """Threads that run handlers of small requests."""

    bulk_lanes: int = 32
    """Concurrent bulk uploads; and the same number of concurrent downloads."""

    lanes_per_owner: int = 4
    """Of one island at one origin, each way; the rest of its bodies wait.

    An island moves a fragment or two at a time, so no honest one is delayed.
    """

    lane_grace_s: float = 2.0
    """Least waiting time over which a transfer is measured while others need a lane."""

    waiting_bytes_per_s: int = 16 * 1024
    """Rate, per body that waits for a lane, below which a transfer loses its lane.

    When no body waits, `min_bytes_per_s` is enough.
    """

    max_rises: int = 4
    """More waiting bodies than this do not raise that rate: at 64 KiB/s an island on a
    link of 100 KB/s keeps its lane, regardless of how many wait.
    """

    fair_bytes_per_s: int = 2**20
    """Below this rate an origin or owner with two lanes more than a waiting one loses
    its slowest transfer.

    A faster transfer ends soon, and ending it would only cause a repetition.
    """

    max_body_bytes: int = 2**34
    """Declared by one request; beyond it 413."""

    max_body_bytes_in_flight: int = 2**33
    """Declared by all bulk requests being read; a larger one is read alone."""

    lane_wait_s: float = 30.0
    """How long a bulk body may wait for its lane; then 503 with Retry-After."""

    idle_s: float = 20.0
    """Between two bytes of a body, either way; also all of a small body."""

    min_bytes_per_s: int = 1024
    """Least average rate of a body, once `idle_s` has been spent waiting for it."""

    max_parked_bytes: int = 32 * 2**20
    """Of all small responses waiting for a slow reader: 512 of the largest."""

    drain_bytes: int = 2**20
    """An unread rest up to this size is skipped; a longer one ends the connection."""

    linger_s: float = 1.0
    """How long a closing connection still reads, so that its last response arrives."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"{name}={value} must be positive.")


PREFIX_BITS: Final = 64
"""One customer usually has a whole IPv6 /64, and may use any address of it."""


def origin_of(host: str) -> str:
    """Return an IPv4 address unchanged, and an IPv6 address as its /64 network.

    An IPv4 address that was mapped into IPv6 counts as itself.
    """
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.ip_network((ip, PREFIX_BITS), strict=False))


MAX_VIEWS: Final = 512
"""Of one `sendmsg`; the kernel takes 1024."""


def unsent_views(views: Sequence[memoryview], sent: int) -> list[memoryview]:
    """Return the unsent rest of `views` after `sent` bytes of them were sent."""
    for index, view in enumerate(views):
        if sent < len(view):
            return [view[sent:], *views[index + 1 :]]
        sent -= len(view)
    return []


class ConnectionClosed(Exception):
    """The other side closed the connection, or the network did."""


class TransferStalled(Exception):
    """The other side is connected and too slow."""


class TransferPreempted(TransferStalled):
    """The other side is too slow while other bodies wait for its lane."""


class TransferRate:
    """Measures the rate of each body on a connection."""

    def __init__(self, *, limits: ListenerLimits, clock: Clock) -> None:
        self._limits, self._clock = limits, clock
        self.is_cut = False
        """Whether another transfer needs the lane; see `Connection.cut`."""

        self._past_waited_s = 0.0
        self._waits_since_s: float | None = None
        self.begin()

    def all_waited_s(self, now_s: float) -> float:
        """Return the time spent waiting for the other side so far. From any thread."""
        since_s = self._waits_since_s
        return self._past_waited_s + (0.0 if since_s is None else now_s - since_s)

    def begin(self) -> None:
        """Start the measurement of the next body."""
        self._moved_bytes = 0
        self._waited_s = 0.0

    def timed(self, move: Callable[[], int]) -> int:
        """Return the bytes moved by `move`, which blocks for at most `idle_s`.

        Raises:
            TransferPreempted: another body needs the lane.
            TransferStalled: nothing moved, or the rate was too low for too long.
            ConnectionClosed: the connection is closed.
        """
        start_s = self._waits_since_s = self._clock.now_s()
        try:
            moved = move()
        except TimeoutError as exc:
            self._require_not_cut()
            raise TransferStalled(
                f"nothing moved for {self._limits.idle_s:g} s"
            ) from exc
        except (OSError, ValueError) as exc:
            self._require_not_cut()
            raise ConnectionClosed(str(exc)) from exc
        finally:
            self._waits_since_s = None
            took_s = self._clock.now_s() - start_s
            self._past_waited_s += took_s
        self._require_not_cut()
        self._waited_s += took_s
        self._moved_bytes += max(0, moved)
        self._check()
        return moved

    def _require_not_cut(self) -> None:
        if self.is_cut:
            raise TransferPreempted("it was too slow while others waited for its lane")

    def _check(self) -> None:
        overtime_s = self._waited_s - self._limits.idle_s
        if self._moved_bytes < overtime_s * self._limits.min_bytes_per_s:
            raise TransferStalled(
                f"{self._moved_bytes} bytes moved in {self._waited_s:.1f} s, less than "
                f"{self._limits.min_bytes_per_s} per second"
            )


FILE_BYTES: Final = 2**20
"""Bytes per read from a file that TLS must encrypt."""

RECORD_BYTES: Final = 2**14
"""Largest payload of a TLS record. A write that cannot finish must be repeated with
the same bytes, so larger writes would hide the progress."""

DATA, NO_DATA, ENDED = "data", "nothing", "ended"

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BodyCutShort(Exception):
    """The body is shorter than announced: close the connection to show it."""


class Connection:
    """A connection. A handler may tag it: then `on_closed(tag)` reports its end."""

    def __init__(
        self,
        sock: socket.socket,
        address: tuple[str, int],
        *,
        limits: ListenerLimits,
        clock: Clock,
    ) -> None:
        self.tag: object | None = None
        self.opened_s = clock.now_s()
        self.address = address
        self.origin = origin_of(address[0])
        self.is_verified = False
        """Whether a request on it has shown a valid token; set by a handler."""

        self.silent_since_s = math.inf
        """Start of the wait for the next request; infinite while one is served."""

        self.ahead = bytearray()
        self.bytes_in = 0
        self.bytes_out = 0
        self.is_gone = False
        self.is_open = True
        self.is_ended_by_us = False
        """Whether this side ended it: then its end is no sign of a lost island."""

        self._sock = sock
        self._limits = limits
        self._rate = TransferRate(limits=limits, clock=clock)
        self._scanned = 0

    @property
    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_undelivered(self) -> bool:
        """Whether TLS buffers bytes, which a selector does not report."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    @property
    def certificate(self) -> bytes | None:
        """The certificate the other side showed, in DER."""
        if isinstance(self._sock, ssl.SSLSocket):
            return self._sock.getpeercert(binary_form=True)
        return None

    def has_head(self) -> bool:
        """Return whether the bytes read ahead contain the empty line after a head."""
        start, self._scanned = max(0, self._scanned - 2), len(self.ahead)
        return (
            self.ahead.find(b"\n\r\n", start) >= 0
            or self.ahead.find(b"\n\n", start) >= 0
            or self.ahead[:1] == b"\n"
            or self.ahead[:2] == b"\r\n"
        )

    def take_ahead(self, size: int) -> memoryview:
        """Remove and return up to `size` of the bytes that were read ahead."""
        data = memoryview(bytes(memoryview(self.ahead)[:size]))
        self.replace_ahead(self.ahead[size:])
        return data

    def replace_ahead(self, data: bytes | bytearray) -> None:
        """Replace the bytes read ahead by `data`."""
        self.ahead = bytearray(data)
        self._scanned = 0

    # The following methods never block: call them while it is parked.

    def handshake(self) -> int:
        """Advance the TLS handshake; return the events it waits for, 0 when done."""
        assert isinstance(self._sock, ssl.SSLSocket)
        self._set_timeout(0.0)
        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except (OSError, ValueError) as exc:
            raise ConnectionClosed from exc
        return 0

    def fill(self, scratch: memoryview) -> str:
        """Read the arrived bytes ahead, at most the size of `scratch`."""
        size = self._receive_now(partial(self._sock.recv_into, scratch))
        if size > 0:
            self.ahead += scratch[:size]
        return _state_of(size)

    def skip(self, scratch: memoryview, size: int) -> tuple[str, int]:
        """Discard arrived bytes, at most `size`; return the state and their number."""
        view = scratch[: min(size, len(scratch))]
        skipped = self._receive_now(partial(self._sock.recv_into, view))
        return _state_of(skipped), max(0, skipped)

    def skip_raw(self, scratch: memoryview) -> tuple[str, int]:
        """Discard arrived bytes without decrypting them: nothing more will be read."""
        skipped = self._receive_now(
            partial(socket.socket.recv_into, self._sock, scratch)
        )
        return _state_of(skipped), max(0, skipped)

    def send_now(self, data: memoryview) -> int:
        """Send without blocking; return how many bytes of `data` were sent, maybe 0."""
        self._set_timeout(0.0)
        try:
            sent = self._sock.send(data)
        except _WOULD_BLOCK:
            return 0
        except OSError as exc:
            raise ConnectionClosed from exc
        self.bytes_out += sent
        return sent

    def send_some(self, data: memoryview) -> memoryview:
        """Send as much as possible without blocking; return the rest."""
        max_bytes = RECORD_BYTES if isinstance(self._sock, ssl.SSLSocket) else len(data)
        while len(data):
            sent = self.send_now(data[:max_bytes])
            if not sent:
                break
            data = data[sent:]
        return data

    def send_plainly(self, data: bytes) -> None:
        """Send bytes in the clear, to a client that does not use TLS."""
        self._set_timeout(0.0)
        with contextlib.suppress(
            OSError
        ):  # best effort: the connection is refused anyway
            self.bytes_out += socket.socket.send(self._sock, data)

    def _receive_now(self, receive: Callable[[], int]) -> int:
        self._set_timeout(0.0)
        try:
            size = receive()
        except _WOULD_BLOCK:
            return -1
        except (OSError, ValueError):
            return 0
        self.bytes_in += size
        return size

    # The following methods block: call them on a thread of a pool that owns this.

    def begin_body(self) -> None:
        """Start measuring the rate of the next body."""
        self._rate.begin()

    def receive(self, view: memoryview) -> int:
        """Read the next bytes into `view`, at least one; return 0 at the end."""
        size = self._wait(partial(self._sock.recv_into, view))
        self.bytes_in += size
        return size

    def send(self, views: Sequence[memoryview]) -> None:
        """Send all of `views`, without joining them."""
        if isinstance(self._sock, ssl.SSLSocket):
            self._send_each(views)
            return
        unsent = [view for view in views if len(view)]
        while unsent:
            sent = self._wait(partial(self._sock.sendmsg, unsent[:MAX_VIEWS]))
            self.bytes_out += sent
            unsent = unsent_views(unsent, sent)

    def send_file(self, fd: int, first: int, size: int) -> None:
        """Send a part of a file; without TLS by `sendfile`, which copies nothing."""
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
                raise BodyCutShort(f"the file ended {end - first} bytes early")
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
        return self._rate.timed(move)

    def _set_timeout(self, timeout_s: float) -> None:
        if self._sock.gettimeout() != timeout_s:
            with contextlib.suppress(OSError):  # closed: the next call fails
                self._sock.settimeout(timeout_s)

    # Closing.

    def end_sending(self) -> None:
        """Shut the sending direction down."""
        # Not SSLSocket.shutdown: it drops the TLS state that a reader still needs.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def abort(self) -> None:
        """End the connection: a thread that waits for it wakes up. From any thread."""
        self.is_ended_by_us = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def cut(self, *, is_sending: bool) -> None:
        """End the transfer: its thread gets `TransferPreempted`. From any thread.

        Of an upload only the reading ends, so that a response can still be sent.
        """
        self.is_ended_by_us = True
        self._rate.is_cut = True
        direction = socket.SHUT_RDWR if is_sending else socket.SHUT_RD
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, direction)

    def waited_s(self, now_s: float) -> float:
        """Return the time spent waiting for the other side. From any thread."""
        return self._rate.all_waited_s(now_s)

    def close(self) -> None:
        self.is_open = False
        with contextlib.suppress(OSError):
            self._sock.close()


def _state_of(size: int) -> str:
    if size > 0:
        return DATA
    return NO_DATA if size < 0 else ENDED
