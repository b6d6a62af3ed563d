"""The connections of a link: two sockets each, and a flow of bytes in either direction.

A flow reads a piece when the line has room for it, and the piece enters the line. When
it arrives, the flow writes it. Reading stops while a flow has a window of bytes that
are in flight or that its receiver has not read. So senders wait for the line and for
their receiver, and a receiver that does not read delays no other flow.

`PacedLine` has the time of arrival of bytes: rate, delay and jitter, without I/O.
Rule 1: it reads no clock; the caller passes the time.
Rule 2: a piece is through when the pieces before it and its own bytes have passed at
the line's rate, and arrives `delay_s` after that, plus its jitter. This is a token
bucket of size zero: after a pause there is no burst, so that in no interval more bytes
arrive than the rate allows.
Rule 3: no piece overtakes another; jitter that would allow it is cut short.
"""

from __future__ import annotations

import random
import selectors
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
MAX_LATE_S = 0.25
"""A thread that is later than this was stopped, not only waiting for a processor."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Piece = bytes | None
"""Bytes of a stream; empty for its end, None for a reset."""


class LinkDirection:
    """One direction of a link: the line that all connections share, and its queue."""

    def __init__(
        self,
        line: PacedLine[tuple[Flow, Piece]],
        *,
        piece_bytes: int,
        window_bytes: int,
    ) -> None:
        self.line = line
        self.piece_bytes = piece_bytes
        self.window_bytes = window_bytes
        self.waiting: deque[Flow] = deque()
        self.num_bytes = 0
        self.num_lost_bytes = 0
        self.is_losing = False
        self.close_after_bytes: int | None = None

    def turn(self, now_s: float) -> None:
        """Deliver arrived pieces, then read new ones while the line has room."""
        for flow, piece in self.line.arrived(now_s=now_s):
            flow.arrive(piece, now_s)
        # Bounded, so that a fast sender does not keep the other direction waiting.
        for _ in range(max(8, len(self.waiting))):
            if not self.waiting or self.room_in_s(now_s) > 0.0:
                return
            flow = self.waiting.popleft()
            if flow.take(now_s):
                self.waiting.append(flow)

    def room_in_s(self, now_s: float) -> float:
        return self.line.room_in_s(self.piece_bytes, now_s=now_s)

    def next_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `turn` has work; None for never."""
        arrival_s = self.line.next_in_s(now_s=now_s)
        if not self.waiting:
            return arrival_s
        room_s = self.room_in_s(now_s)
        return room_s if arrival_s is None else min(room_s, arrival_s)


class LinkSocket:
    """One socket of a connection, and the events it is registered for."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.source_of: Flow
        self.sink_of: Flow
        self._selector = selector
        self._events = 0

    def watch(self, event: int, wanted: bool = True) -> None:
        events = self._events | event if wanted else self._events & ~event
        if events == self._events:
            return
        if not events:
            self._selector.unregister(self.sock)
        elif not self._events:
            self._selector.register(self.sock, events, self)
        else:
            self._selector.modify(self.sock, events, self)
        self._events = events

    def close(self, *, reset: bool) -> None:
        self.watch(READ | WRITE, False)
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.sock.close()


class Flow:
    """One direction of one connection."""

    def __init__(
        self,
        connection: LinkConnection,
        direction: LinkDirection,
        source: LinkSocket,
        sink: LinkSocket,
    ) -> None:
        self.has_lost = False
        self.has_finished = False
        self.counted_bytes = 0
        """Arrived since `close_after` was last called."""
        self._connection = connection
        self._direction = direction
        self._source = source
        self._sink = sink
        self._arrived: deque[memoryview] = deque()
        self._held_bytes = 0
        self._is_full = False
        self._is_last = False
        self._waits_since_s = 0.0
        self._closes_here = False
        source.source_of = self
        sink.sink_of = self
        source.watch(READ)

    def is_readable(self, now_s: float) -> None:
        """Enqueue this flow for room on the line, behind those that wait already."""
        self._source.watch(READ, False)
        self._direction.waiting.append(self)
        self._waits_since_s = now_s

    def take(self, now_s: float) -> bool:
        """Read a piece onto the line, and return whether there may be more to read."""
        if self._connection.is_closed:
            return False
        try:
            piece: Piece = self._source.sock.recv(self._direction.piece_bytes)
        except BlockingIOError:
            self._source.watch(READ)
            return False
        except OSError:
            piece = None
        # The piece was ready while it waited in the queue, and while this thread waited
        # for a processor: that delay is not the line's, which makes up for it.
        self.enter(piece, max(self._waits_since_s, now_s - MAX_LATE_S))
        self._waits_since_s = now_s
        self._is_full = self._held_bytes >= self._direction.window_bytes
        is_short = not piece or len(piece) < self._direction.piece_bytes
        if piece and is_short and not self._is_full:
            self._source.watch(READ)
        return not (is_short or self._is_full)

    def enter(self, piece: Piece, ready_s: float) -> None:
        size = len(piece or b"")
        self._held_bytes += size
        self._direction.line.enter((self, piece), size, ready_s=ready_s)

    def arrive(self, piece: Piece, now_s: float) -> None:
        """Queue an arriving piece for its receiver, or close or lose it."""
        if self._connection.is_closed:
            return
        if self._direction.is_losing:
            self._lose(piece)
        elif piece is None:
            self._connection.close(reset=True)
        else:
            self._is_last = self._is_last or not piece
            self._arrived.append(memoryview(self._shortened(piece)))
            self.push(now_s)

    def push(self, now_s: float) -> None:
        """Write the arrived bytes, as far as the receiver takes them."""
        if self._connection.is_closed:
            return
        try:
            while self._arrived:
                sent = self._sink.sock.send(self._arrived[0])
                self._direction.num_bytes += sent
                self._release(sent)
                self._arrived[0] = self._arrived[0][sent:]
                if not self._arrived[0]:
                    self._arrived.popleft()
        except BlockingIOError:
            self._sink.watch(WRITE)
        except OSError:
            self._connection.opposite(self).enter(None, now_s)
            self._arrived.clear()
            self._sink.watch(WRITE, False)
        else:
            self._sink.watch(WRITE, False)
            self._finish()

    def _finish(self) -> None:
        if self._closes_here:
            self._connection.close_short(self._source, self._sink)
        elif self._is_last and not self.has_finished:
            self.has_finished = True
            with suppress(OSError):  # its own end is already in flight
                self._sink.sock.shutdown(socket.SHUT_WR)
            if self._connection.opposite(self).has_finished:
                self._connection.close(reset=False)

    def _shortened(self, piece: bytes) -> bytes:
        limit = self._direction.close_after_bytes
        remaining = None if limit is None else limit - self.counted_bytes
        self.counted_bytes += len(piece)
        if self._closes_here:
            return b""
        if remaining is None or len(piece) < remaining or not piece:
            return piece
        self._direction.close_after_bytes = None
        self._closes_here = True
        return piece[:remaining]

    def _lose(self, piece: Piece) -> None:
        self.has_lost = True
        self._direction.num_lost_bytes += len(piece or b"")
        self._release(len(piece or b""))

    def _release(self, size: int) -> None:
        self._held_bytes -= size
        if self._is_full and self._held_bytes < self._direction.window_bytes:
            self._is_full = False
            self._source.watch(READ)


class LinkConnection:
    """One TCP connection through the link: the client's socket and the target's."""

    def __init__(
        self,
        caller: LinkSocket,
        target: LinkSocket,
        *,
        up: LinkDirection,
        down: LinkDirection,
    ) -> None:
        self.is_closed = False
        self.up = Flow(self, up, caller, target)
        self.down = Flow(self, down, target, caller)
        self._sockets = (caller, target)

    def opposite(self, flow: Flow) -> Flow:
        return self.down if flow is self.up else self.up

    def close(self, *, reset: bool) -> None:
        """Close both sockets; pieces in flight are dropped when they arrive."""
        self.is_closed = True
        for endpoint in self._sockets:
            endpoint.close(reset=reset)

    def close_short(self, source: LinkSocket, sink: LinkSocket) -> None:
        """End the receiver's stream after the bytes sent so far, and reset the other.

        Read first: closing a socket with unread bytes discards the bytes it has sent.
        """
        self.is_closed = True
        with suppress(OSError):
            while sink.sock.recv(2**16):
                pass
        source.close(reset=True)
        sink.close(reset=False)


Item = TypeVar("Item")


class PacedLine(Generic[Item]):
    """One direction of a line: a queue, then the rate, then the delay."""

    def __init__(
        self,
        *,
        rate_bytes_per_s: float | None = None,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        queue_bytes: int = 2**18,
        seed: int = 0,
    ) -> None:
        self._seconds_per_byte = 1.0 / rate_bytes_per_s if rate_bytes_per_s else 0.0
        self._delay_s = delay_s
        self._jitter_s = jitter_s
        self._queue_s = queue_bytes * self._seconds_per_byte
        self._random = random.Random(seed)
        self._free_at_s = float("-inf")
        self._last_arrival_s = float("-inf")
        self._items: deque[tuple[float, Item]] = deque()

    def enter(self, item: Item, size_bytes: int, *, ready_s: float) -> float:
        """Put an item that is ready since `ready_s` on the line; return its arrival.

        So a late caller does not leave the line idle while an item was ready.
        """
        begins_s = max(ready_s, self._free_at_s)
        self._free_at_s = begins_s + size_bytes * self._seconds_per_byte
        late_s = self._delay_s + self._random.uniform(0.0, self._jitter_s)
        arrival_s = max(self._free_at_s + late_s, self._last_arrival_s)
        self._last_arrival_s = arrival_s
        self._items.append((arrival_s, item))
        return arrival_s

    def room_in_s(self, size_bytes: int, *, now_s: float) -> float:
        """Return the seconds until the queue has room for `size_bytes`.

        An empty queue has room for any size, so that large pieces pass a small queue.
        """
        waiting_s = max(0.0, self._free_at_s - now_s)
        too_long_s = waiting_s + size_bytes * self._seconds_per_byte - self._queue_s
        return min(waiting_s, max(0.0, too_long_s))

    def arrived(self, *, now_s: float) -> Iterator[Item]:
        """Remove the arrived items from the line, and yield them in order."""
        while self._items and self._items[0][0] <= now_s:
            yield self._items.popleft()[1]

    def next_in_s(self, *, now_s: float) -> float | None:
        """Return the seconds until the next arrival; None for an empty line."""
        return max(0.0, self._items[0][0] - now_s) if self._items else None


class LineTime:
    """The time of a line, which stands still while the line is cut.

    So pieces in flight keep their distance to their arrival, and a line that is mended
    does not deliver all of them in one burst.
    """

    def __init__(self) -> None:
        self._cut_at_s: float | None = None
        self._stood_s = 0.0

    @property
    def is_cut(self) -> bool:
        return self._cut_at_s is not None

    def at(self, now_s: float) -> float:
        """Return the line's time when the clock shows `now_s`."""
        return (now_s if self._cut_at_s is None else self._cut_at_s) - self._stood_s

    def cut(self, *, now_s: float) -> None:
        """Stand still from now on; a cut line stays cut."""
        if self._cut_at_s is None:
            self._cut_at_s = now_s

    def mend(self, *, now_s: float) -> None:
        """Continue from the time of the cut; no effect on a line that is not cut."""
        if self._cut_at_s is not None:
            self._stood_s += now_s - self._cut_at_s
            self._cut_at_s = None


def piece_bytes(rate_bytes_per_s: float | None) -> int:
    """Return the bytes to read in one call: those of two milliseconds, within bounds.

    Less would cost processor time; more would let one sender delay the others, and
    would arrive in bursts.
    """
    if rate_bytes_per_s is None:
        return 2**18
    return int(min(max(rate_bytes_per_s * 0.002, 1448), 2**16))


def in_flight_bytes(rate_bytes_per_s: float | None, delay_s: float) -> int:
    """Return the bytes in flight on a full line: rate times delay."""
    # Without a rate: 1 GB/s, which no line reaches, so that this is no limit.
    return int((1e9 if rate_bytes_per_s is None else rate_bytes_per_s) * delay_s)
