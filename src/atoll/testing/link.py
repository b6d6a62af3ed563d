"""A TCP link in userspace: rate, delay, jitter and cuts between two real programs.

It needs no privilege and no kernel module. Pieces of a stream are held until they are
due, in real time. It is no model of TCP: its streams begin at full speed, and no byte
is lost except by the methods of `Link`.

One thread, `Relay`, accepts, reads, waits and writes for all connections. Other threads
post actions to it; no other thread touches a socket.
"""

from __future__ import annotations

import errno
import math
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Literal, Self

from atoll.errors import UsageError
from atoll.runtime import Clock, SystemClock
from atoll.testing import link_flow

Direction = Literal["up", "down"]
"""Up is from the client to the target, down is back."""

Rate = float | None
"""Bytes per second; None for no limit."""


class Link:
    """Carries TCP connections from a port of this machine to `target`.

    All connections share one line in each direction, as they would share a cable.
    Faults begin and end when their method returns.

    Args:
        rate_bytes_per_s: of each direction, or a pair: up, down.
        delay_s: one way. Opening a connection to the link itself takes no time.
        jitter_s: upper bound of an extra delay of each piece of a stream, drawn from
            `seed`. No piece overtakes another.
        buffer_bytes: bytes that may wait to enter the line. A stream has at most these
            and the capacity of its line (rate times delay) in flight: then its sender
            has to wait. Default: 256 KB, or 25 ms at rates where that is more.

    Raises:
        UsageError: a value is out of range.
        OSError: the target's name is not known.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        rate_bytes_per_s: Rate | tuple[Rate, Rate] = None,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        seed: int = 0,
        buffer_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        rates = rate_bytes_per_s
        pair = rates if isinstance(rates, tuple) else (rates, rates)
        _check(pair, delay_s=delay_s, jitter_s=jitter_s, buffer_bytes=buffer_bytes)
        up, down = (
            _make_direction(
                rate,
                delay_s=delay_s,
                jitter_s=jitter_s,
                seed=2 * seed + number,
                buffer_bytes=buffer_bytes,
            )
            for number, rate in enumerate(pair)
        )
        self._relay = Relay(target, up=up, down=down, clock=clock or SystemClock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset every connection and stop listening. Safe to repeat."""
        self._relay.close()

    @property
    def address(self) -> tuple[str, int]:
        """The address to connect to instead of the target."""
        return self._relay.address

    @property
    def bytes_up(self) -> int:
        """Delivered to the target since the link was made."""
        return self._relay.up.num_bytes

    @property
    def bytes_down(self) -> int:
        """Delivered to clients since the link was made."""
        return self._relay.down.num_bytes

    @property
    def bytes_lost(self) -> int:
        """Sent by the target and dropped by `lose_replies`."""
        return self._relay.down.num_lost_bytes

    def wait_carried(
        self, num_bytes: int, *, direction: Direction = "up", timeout_s: float = 30.0
    ) -> bool:
        """Wait until `num_bytes` were delivered since the link was made.

        Returns:
            Whether they were. Bytes dropped by `lose_replies` count as delivered.
        """
        side = self._direction(direction)
        with self._relay.progress:
            return self._relay.progress.wait_for(
                lambda: side.num_bytes + side.num_lost_bytes >= num_bytes, timeout_s
            )

    def cut(self) -> None:
        """Stop carrying bytes, without closing a connection: a partition.

        Streams stand still, with their bytes on the line, and neither side sees an end.
        New clients wait: the kernel accepts their connections, but the target does not.
        A connection that its client closes before `mend` never reaches the target.
        """
        self._relay.do(self._relay.cut)

    def mend(self) -> None:
        """Carry all bytes again: the end of `cut`, `lose_replies`, `close_after`.

        Streams continue at the byte where they stopped. Those with lost replies cannot,
        and are reset.
        """
        self._relay.do(self._relay.mend)

    def reset(self) -> None:
        """Break every connection, with a reset to both sides; new ones are carried."""
        self._relay.do(self._relay.reset)

    def close_after(self, num_bytes: int, *, direction: Direction = "up") -> None:
        """Break the first connection to carry `num_bytes` from now on, once.

        Its receiver gets exactly these bytes and then the end of the stream, its sender
        a reset. So `close_after(1000)` shortens an upload, and
        `close_after(0, direction="down")` loses a reply and its connection.
        """
        if num_bytes < 0:
            raise UsageError(f"close_after({num_bytes}) must be at least 0.")
        side = self._direction(direction)
        self._relay.do(lambda: self._relay.close_after(num_bytes, side))

    def lose_replies(self) -> None:
        """Drop all bytes from the target, and the ends of its streams.

        The target has sent its answer, and the client waits for it.
        """

        def lose() -> None:
            self._relay.down.is_losing = True

        self._relay.do(lose)

    def _direction(self, direction: Direction) -> link_flow.LinkDirection:
        if direction not in ("up", "down"):
            raise UsageError(f'direction="{direction}" must be "up" or "down".')
        return self._relay.up if direction == "up" else self._relay.down


def _make_direction(
    rate: Rate,
    *,
    delay_s: float,
    jitter_s: float,
    seed: int,
    buffer_bytes: int | None,
) -> link_flow.LinkDirection:
    if buffer_bytes is None:
        # Large enough that the line stays busy while the thread is not scheduled.
        buffer_bytes = max(2**18, link_flow.in_flight_bytes(rate, 0.025) if rate else 0)
    line: link_flow.PacedLine[tuple[link_flow.Flow, link_flow.Piece]] = (
        link_flow.PacedLine(
            rate_bytes_per_s=rate,
            delay_s=delay_s,
            jitter_s=jitter_s,
            queue_bytes=buffer_bytes,
            seed=seed,
        )
    )
    window_bytes = link_flow.in_flight_bytes(rate, delay_s + jitter_s) + buffer_bytes
    return link_flow.LinkDirection(
        line, piece_bytes=link_flow.piece_bytes(rate), window_bytes=window_bytes
    )


def _check(
    rates: tuple[Rate, ...],
    *,
    delay_s: float,
    jitter_s: float,
    buffer_bytes: int | None,
) -> None:
    for rate in rates:
        if rate is not None and not 0 < rate < math.inf:
            raise UsageError(
                f"rate_bytes_per_s={rate} must be positive and finite. "
                "Leave it out for a line without a limit."
            )
    for name, value in (("delay_s", delay_s), ("jitter_s", jitter_s)):
        if not 0 <= value < math.inf:
            raise UsageError(f"{name}={value} must be finite and at least 0.")
    if buffer_bytes is not None and buffer_bytes < 1:
        raise UsageError(f"buffer_bytes={buffer_bytes} must be at least 1.")


SOCKET_BYTES = 2**17
"""Receive buffer of the kernel for each socket, beyond which a sender waits.

The kernel doubles it. Much less would stall loopback, whose segments have 64 KB.
"""

_ESTABLISHED = b"\x01"  # the first byte of TCP_INFO


class Relay:
    """Carries bytes between clients of a listening socket and the target."""

    def __init__(
        self,
        target: tuple[str, int],
        *,
        up: link_flow.LinkDirection,
        down: link_flow.LinkDirection,
        clock: Clock,
    ) -> None:
        # Resolved once and here: an unknown name is an error of the constructor call.
        addresses = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)
        self._family, self._target = addresses[0][0], addresses[0][4]
        self.up = up
        self.down = down
        self.progress = threading.Condition()
        """Notified after every turn in which bytes were delivered or lost."""
        self._clock = clock
        self._time = link_flow.LineTime()
        self._connections: set[link_flow.LinkConnection] = set()
        self._actions: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._open_sockets()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._is_closing = False
        self._thread.start()

    def _open_sockets(self) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, link_flow.READ)
        self._selector.register(self._wake_receiver, link_flow.READ)
        # While the line is cut, only the wake-up socket is read.
        self._cut_selector = selectors.DefaultSelector()
        self._cut_selector.register(self._wake_receiver, link_flow.READ)

    def do(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread, and return when it is done."""
        done: Future[None] = Future()
        self._actions.append((action, done))
        with suppress(OSError):  # its buffer is full, or it is closed: checked below
            self._wake_sender.send(b"!")
        while not done.done():
            if not self._thread.is_alive():
                raise UsageError("This link is closed. Create a new one.")
            with suppress(TimeoutError):
                done.result(timeout=0.1)
        done.result()

    def close(self) -> None:
        """End the thread and close every socket; safe to repeat."""

        def stop() -> None:
            self._is_closing = True

        with suppress(UsageError):
            self.do(stop)
        self._thread.join()

    def cut(self) -> None:
        self._time.cut(now_s=self._clock.now_s())

    def mend(self) -> None:
        """Undo every fault; streams that lost bytes cannot continue and are reset."""
        if self._time.is_cut:
            self._time.mend(now_s=self._clock.now_s())
            self._accept(only_alive=True)
        for direction in (self.up, self.down):
            direction.is_losing = False
            direction.close_after_bytes = None
        for connection in self._connections:
            if connection.down.has_lost and not connection.is_closed:
                connection.close(reset=True)

    def reset(self) -> None:
        for connection in self._connections:
            if not connection.is_closed:
                connection.close(reset=True)
        self._connections.clear()

    def close_after(self, size_bytes: int, direction: link_flow.LinkDirection) -> None:
        direction.close_after_bytes = size_bytes
        for connection in self._connections:
            connection.up.counted_bytes = connection.down.counted_bytes = 0

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        finally:
            self.reset()
            for selector in (self._selector, self._cut_selector):
                selector.close()
            for sock in (self._listener, self._wake_receiver, self._wake_sender):
                sock.close()

    def _turn(self) -> None:
        if self._time.is_cut:
            self._cut_selector.select()
            self._drain_wake_ups()
        else:
            self._carry()
            for key, events in self._selector.select(self._wait_s()):
                self._handle(key, events)
        while self._actions:
            action, done = self._actions.popleft()
            action()
            done.set_result(None)

    def _carry(self) -> None:
        moved = self._moved_bytes()
        for direction in (self.up, self.down):
            direction.turn(self._now_s())
        if self._moved_bytes() != moved:
            with self.progress:
                self.progress.notify_all()

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._wake_receiver:
            self._drain_wake_ups()
        else:
            if events & link_flow.READ:
                key.data.source_of.is_readable(self._now_s())
            if events & link_flow.WRITE:
                key.data.sink_of.push(self._now_s())

    def _now_s(self) -> float:
        return self._time.at(self._clock.now_s())

    def _wait_s(self) -> float | None:
        now_s = self._now_s()
        waits = [direction.next_in_s(now_s) for direction in (self.up, self.down)]
        return min((wait for wait in waits if wait is not None), default=None)

    def _moved_bytes(self) -> int:
        directions = (self.up, self.down)
        return sum(
            direction.num_bytes + direction.num_lost_bytes for direction in directions
        )

    def _drain_wake_ups(self) -> None:
        with suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def _accept(self, *, only_alive: bool = False) -> None:
        """Open a connection to the target for every new client.

        With `only_alive`, skip clients that have closed theirs.
        """
        self._connections = {
            connection for connection in self._connections if not connection.is_closed
        }
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if only_alive and info != _ESTABLISHED:
                sock.close()
            else:
                self._open_connection(sock)

    def _open_connection(self, sock: socket.socket) -> None:
        caller = link_flow.LinkSocket(sock, self._selector)
        target = link_flow.LinkSocket(socket.socket(self._family), self._selector)
        target.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        if target.sock.connect_ex(self._target) not in (0, errno.EINPROGRESS):
            caller.close(reset=True)
            target.close(reset=True)
        else:
            self._connections.add(
                link_flow.LinkConnection(caller, target, up=self.up, down=self.down)
            )
