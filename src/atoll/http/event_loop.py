"""The event loop: one thread watches every connection that no other thread works on.

Rule 1: each parked connection defines what happens when bytes arrive and when its
        deadline passes; both run on the event loop's thread and never block.
Rule 2: a thread that takes a connection out of the event loop owns it until it is
        parked again.
Rule 3: only the event loop's thread touches the state of the loop; others use `call`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from atoll.clock import Clock
from atoll.http.connection import Connection

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

TICK_S: Final = 0.05
"""How late a deadline may be handled."""

SCRATCH_BYTES: Final = 2**16


class ParkedConnection(ABC):
    """A connection in the event loop, with its reactions to events and its deadline."""

    def __init__(
        self, connection: Connection, *, until_s: float, events: int = READ
    ) -> None:
        self.connection = connection
        self.until_s = until_s
        self.events = events

    def begin(self) -> None:
        """Handle bytes that TLS has buffered: a selector reports only new bytes."""
        if self.connection.has_undelivered:
            self.ready(READ)

    @abstractmethod
    def ready(self, events: int) -> None:
        """React to a socket that can be read or written."""

    @abstractmethod
    def on_deadline(self) -> None:
        """React to `until_s`: take the connection out of the event loop."""

    def on_listener_closing(self) -> None:  # noqa: B027 - most of them may finish
        """React to the closing of the listener: end now if nothing is lost by it."""


class EventLoop:
    """Watches parked connections, and one listening socket, in one thread."""

    def __init__(self, *, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._clock = clock
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._watches: dict[Connection, ParkedConnection] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._selector.register(self._wake_receiver, READ, self._drain_wakeups)
        self._ticks: list[Callable[[], None]] = []
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="http-lot", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, action: Callable[[], None]) -> None:
        """Schedule `action` on the loop's thread. From any thread."""
        self._calls.append(action)
        if threading.current_thread() is not self._thread:
            self._wake()

    def every_tick(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread every `TICK_S` while any connection waits.

        Call it before `start`.
        """
        self._ticks.append(action)

    def park(self, watch: ParkedConnection) -> None:
        """Watch a connection that the calling thread owned. From any thread."""
        self.call(lambda: self.add(watch))

    def close(self, wait_s: float) -> None:
        """End the thread; parked connections stay open. From any thread."""
        self._is_ending = True
        self._wake()
        if not self._thread.ident:
            self._release()
        elif threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    # The following methods are called on the loop's thread.

    def add(self, watch: ParkedConnection) -> None:
        self._watches[watch.connection] = watch
        if watch.events:
            self._selector.register(watch.connection.fileno, watch.events, watch)
        watch.begin()

    def take(self, watch: ParkedConnection) -> bool:
        """Take a connection out; False if it is no longer parked for this reason."""
        if not self.holds(watch):
            return False
        del self._watches[watch.connection]
        if watch.events:
            self._selector.unregister(watch.connection.fileno)
        return True

    def holds(self, watch: ParkedConnection) -> bool:
        return self._watches.get(watch.connection) is watch

    def listen_for(self, watch: ParkedConnection, events: int) -> None:
        """Change the socket events of a parked connection."""
        if events == watch.events or not self.holds(watch):
            return
        fileno = watch.connection.fileno
        if not events:
            self._selector.unregister(fileno)
        elif watch.events:
            self._selector.modify(fileno, events, watch)
        else:
            self._selector.register(fileno, events, watch)
        watch.events = events

    def parked(self) -> list[ParkedConnection]:
        return list(self._watches.values())

    def start_accepting(
        self, listening_socket: socket.socket, on_connect: Callable[[], None]
    ) -> None:
        """Call `on_connect` when a client connects to `listening_socket`."""
        self._selector.register(listening_socket, READ, on_connect)

    def stop_accepting(self, listening_socket: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # not registered
            self._selector.unregister(listening_socket)

    def _run(self) -> None:
        swept_s = self._clock.now_s()
        while not self._is_ending:
            timeout_s = TICK_S if self._watches else None
            for key, events in self._selector.select(timeout_s):
                self._guarded(partial(self._react, key.data, events))
            if self._clock.now_s() - swept_s >= TICK_S:
                swept_s = self._clock.now_s()
                self._sweep(swept_s)
            while self._calls:
                self._guarded(self._calls.popleft())
        self._release()

    def _release(self) -> None:
        self._selector.close()
        self._wake_sender.close()
        self._wake_receiver.close()

    def _sweep(self, now_s: float) -> None:
        for watch in [
            parked for parked in self._watches.values() if parked.until_s <= now_s
        ]:
            self._guarded(watch.on_deadline)
        for action in self._ticks:
            self._guarded(action)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as exc:  # a fault of one connection must not end the loop
            self._on_error(exc)

    def _wake(self) -> None:
        # A full buffer wakes the loop already; after the end there is no loop to wake.
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"!")

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)

    def _react(self, to: ParkedConnection | Callable[[], None], events: int) -> None:
        if not isinstance(to, ParkedConnection):
            to()
        elif self.holds(to):  # an earlier event of this turn may have removed it
            to.ready(events)
