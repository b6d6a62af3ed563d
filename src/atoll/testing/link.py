"""A TCP link in userspace: rate, delay, jitter and cuts between two real programs.

It needs no privilege and no kernel module. Pieces of a stream are held until they are
due, so what a link slows down it slows down in real time. It is no model of TCP: its
streams begin at full speed, and nothing is lost unless a method here says so.
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

from atoll.clock import Clock, SystemClock
from atoll.errors import UsageError
from atoll.testing.link_flow import (
    READ,
    WRITE,
    Call,
    Flow,
    Line,
    LineTime,
    Piece,
    Tip,
    Way,
    in_flight_bytes,
    piece_bytes,
)

Direction = Literal["up", "down"]
"""Up is from who connects to the target, down is back."""

Rate = float | None
"""Bytes per second; None for as fast as it goes."""


class Link:
    """Carries TCP connections from a port of this machine to `target`.

    All connections share one line in each direction, as they would share a cable.
    Faults begin and end when their method returns.

    Args:
        rate_bytes_per_s: of each direction, or a pair: up, down.
        delay_s: one way. Opening a connection to the link itself takes no time.
        jitter_s: at most so much is added to the delay of a piece of a stream, drawn
            from `seed`. Nothing overtakes anything.
        buffer_bytes: how much may wait to enter the line. A stream has at most this
            and what its line holds (rate times delay) on the way: then its sender has
            to wait. Unless given 256 KB, or 25 ms at rates where that is more.

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
            _way(
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
        """Where to connect to instead of the target."""
        return self._relay.address

    @property
    def bytes_up(self) -> int:
        """Delivered to the target since the link was made."""
        return self._relay.up.num_bytes

    @property
    def bytes_down(self) -> int:
        """Delivered to those who connected since the link was made."""
        return self._relay.down.num_bytes

    @property
    def bytes_lost(self) -> int:
        """Sent by the target and swallowed by `lose_replies`."""
        return self._relay.down.num_lost_bytes

    def wait_carried(
        self, num_bytes: int, *, direction: Direction = "up", timeout_s: float = 30.0
    ) -> bool:
        """Wait until so many bytes were delivered since the link was made.

        Returns:
            Whether they were. What `lose_replies` swallows counts as delivered.
        """
        way = self._way(direction)
        with self._relay.progress:
            return self._relay.progress.wait_for(
                lambda: way.num_bytes + way.num_lost_bytes >= num_bytes, timeout_s
            )

    def cut(self) -> None:
        """Carry nothing more, and tell nobody: a partition.

        Streams stand still, with what is on the line, and nobody hears of an end. Who
        connects is kept waiting: the kernel says connected, but nobody is there. What
        is given up before the line is mended never reaches the target.
        """
        self._relay.do(self._relay.cut)

    def mend(self) -> None:
        """Carry everything again: the end of `cut`, `lose_replies`, `close_after`.

        Streams go on where they stood. Those with lost replies cannot, and are reset.
        """
        self._relay.do(self._relay.mend)

    def reset(self) -> None:
        """Break every connection, with a reset to both sides; new ones are carried."""
        self._relay.do(self._relay.reset)

    def close_after(self, num_bytes: int, *, direction: Direction = "up") -> None:
        """Break the first connection to carry so many bytes from now on, once.

        Its receiver gets exactly these bytes and then the end of the stream, its sender
        a reset. So `close_after(1000)` shortens an upload, and
        `close_after(0, direction="down")` loses a reply and its connection.
        """
        if num_bytes < 0:
            raise UsageError(f"close_after({num_bytes}) must be at least 0.")
        way = self._way(direction)
        self._relay.do(lambda: self._relay.close_after(num_bytes, way))

    def lose_replies(self) -> None:
        """Swallow what the target sends, the ends of its streams included.

        The target believes it has answered, and who asked waits.
        """

        def lose() -> None:
            self._relay.down.is_losing = True

        self._relay.do(lose)

    def _way(self, direction: Direction) -> Way:
        if direction not in ("up", "down"):
            raise UsageError(f'direction="{direction}" must be "up" or "down".')
        return self._relay.up if direction == "up" else self._relay.down


def _way(
    rate: Rate,
    *,
    delay_s: float,
    jitter_s: float,
    seed: int,
    buffer_bytes: int | None,
) -> Way:
    if buffer_bytes is None:
        # Deep enough that a thread which is not scheduled for a while loses no time.
        buffer_bytes = max(2**18, in_flight_bytes(rate, 0.025) if rate else 0)
    line: Line[tuple[Flow, Piece]] = Line(
        rate_bytes_per_s=rate,
        delay_s=delay_s,
        jitter_s=jitter_s,
        queue_bytes=buffer_bytes,
        seed=seed,
    )
    window_bytes = in_flight_bytes(rate, delay_s + jitter_s) + buffer_bytes
    return Way(line, piece_bytes=piece_bytes(rate), window_bytes=window_bytes)


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
                "Leave it out for a line that is as fast as it goes."
            )
    for name, value in (("delay_s", delay_s), ("jitter_s", jitter_s)):
        if not 0 <= value < math.inf:
            raise UsageError(f"{name}={value} must be finite and at least 0.")
    if buffer_bytes is not None and buffer_bytes < 1:
        raise UsageError(f"buffer_bytes={buffer_bytes} must be at least 1.")


SOCKET_BYTES = 2**17
"""What the kernel may hold for a socket of ours, beyond which a sender waits.

The kernel doubles it. Much less would stall loopback, whose segments have 64 KB.
"""

_ESTABLISHED = b"\x01"  # the first byte of TCP_INFO


class Relay:
    """Carries bytes between who connects to `listener` and the target."""

    def __init__(
        self, target: tuple[str, int], *, up: Way, down: Way, clock: Clock
    ) -> None:
        # Resolved once and here: a name that leads nowhere is the maker's mistake.
        found = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)
        self._family, self._target = found[0][0], found[0][4]
        self.up = up
        self.down = down
        self.progress = threading.Condition()
        """Notified after every turn in which bytes were delivered or lost."""
        self._clock = clock
        self._time = LineTime()
        self._calls: set[Call] = set()
        self._errands: deque[tuple[Callable[[], None], Future[None]]] = deque()
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
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._whole = selectors.DefaultSelector()
        self._whole.register(self._listener, READ)
        self._whole.register(self._bell, READ)
        # While the line is cut, nothing is heard of any socket but the bell.
        self._cut = selectors.DefaultSelector()
        self._cut.register(self._bell, READ)

    def do(self, errand: Callable[[], None]) -> None:
        """Have the thread run `errand`, and return when it has."""
        done: Future[None] = Future()
        self._errands.append((errand, done))
        with suppress(OSError):  # rung often enough, or closed: seen below
            self._rope.send(b"!")
        while not done.done():
            if not self._thread.is_alive():
                raise UsageError("This link is closed. Make a new one.")
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
        """Undo every fault; streams that lost bytes cannot go on and are reset."""
        if self._time.is_cut:
            self._time.mend(now_s=self._clock.now_s())
            self._accept(only_alive=True)
        for way in (self.up, self.down):
            way.is_losing = False
            way.close_after_bytes = None
        for call in self._calls:
            if call.down.has_lost and not call.is_closed:
                call.close(reset=True)

    def reset(self) -> None:
        for call in self._calls:
            if not call.is_closed:
                call.close(reset=True)
        self._calls.clear()

    def close_after(self, size_bytes: int, way: Way) -> None:
        way.close_after_bytes = size_bytes
        for call in self._calls:
            call.up.counted_bytes = call.down.counted_bytes = 0

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        finally:
            self.reset()
            for each in (self._whole, self._cut):
                each.close()
            for sock in (self._listener, self._bell, self._rope):
                sock.close()

    def _turn(self) -> None:
        if self._time.is_cut:
            self._cut.select()
            self._quiet_the_bell()
        else:
            self._carry()
            for key, events in self._whole.select(self._wait_s()):
                self._handle(key, events)
        while self._errands:
            errand, done = self._errands.popleft()
            errand()
            done.set_result(None)

    def _carry(self) -> None:
        moved = self._moved_bytes()
        for way in (self.up, self.down):
            way.turn(self._now_s())
        if self._moved_bytes() != moved:
            with self.progress:
                self.progress.notify_all()

    def _handle(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._bell:
            self._quiet_the_bell()
        else:
            if events & READ:
                key.data.source_of.is_readable(self._now_s())
            if events & WRITE:
                key.data.sink_of.push(self._now_s())

    def _now_s(self) -> float:
        return self._time.at(self._clock.now_s())

    def _wait_s(self) -> float | None:
        now_s = self._now_s()
        waits = [way.next_in_s(now_s) for way in (self.up, self.down)]
        return min((wait for wait in waits if wait is not None), default=None)

    def _moved_bytes(self) -> int:
        ways = (self.up, self.down)
        return sum(way.num_bytes + way.num_lost_bytes for way in ways)

    def _quiet_the_bell(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(4096)

    def _accept(self, *, only_alive: bool = False) -> None:
        """Open a call for everyone who has connected; without those who gave up."""
        self._calls = {call for call in self._calls if not call.is_closed}
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if only_alive and info != _ESTABLISHED:
                sock.close()
            else:
                self._open_call(sock)

    def _open_call(self, sock: socket.socket) -> None:
        caller = Tip(sock, self._whole)
        target = Tip(socket.socket(self._family), self._whole)
        target.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        if target.sock.connect_ex(self._target) not in (0, errno.EINPROGRESS):
            caller.close(reset=True)
            target.close(reset=True)
        else:
            self._calls.add(Call(caller, target, up=self.up, down=self.down))
