"""The thread behind a link: it accepts, reads, waits and writes, for all calls alone.

Whoever wants something of it posts an errand; no other thread touches a socket.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from atoll.clock import Clock
from atoll.errors import UsageError
from atoll.testing.link_flow import READ, WRITE, Call, Tip, Way
from atoll.testing.link_pace import LineTime

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
