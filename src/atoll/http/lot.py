"""The parking lot: one thread watches every connection that nobody works on.

Rule 1: a connection is parked with a watch, which says what happens when bytes come
        and when its time is up; both run on the lot's thread and never block.
Rule 2: whoever takes a connection out of the lot owns it, until it is parked again.
Rule 3: all that the lot knows is touched by its thread only; others use `call`.
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
from atoll.http.channel import Channel

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

TICK_S: Final = 0.05
"""How late a deadline may be noticed."""

SCRATCH_BYTES: Final = 2**16


class Watch(ABC):
    """Why a connection is parked."""

    def __init__(self, channel: Channel, *, until_s: float, events: int = READ) -> None:
        self.channel = channel
        self.until_s = until_s
        self.events = events

    def begin(self) -> None:
        """Look at what is there already: a selector tells of new bytes only."""
        if self.channel.has_undelivered:
            self.ready(READ)

    @abstractmethod
    def ready(self, events: int) -> None:
        """React to bytes that came or may go."""

    @abstractmethod
    def due(self) -> None:
        """React to `until_s`: take the connection out of the lot."""

    def hurry(self) -> None:  # noqa: B027 - most of what is under way may end
        """React to the closing of the listener: end at once what need not end well."""


class Lot:
    """Watches parked connections, and one listening socket, in one thread."""

    def __init__(self, *, clock: Clock, on_error: Callable[[Exception], None]) -> None:
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._clock = clock
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._watches: dict[Channel, Watch] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._selector.register(self._ear, READ, self._hear)
        self._ticks: list[Callable[[], None]] = []
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="http-lot", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the lot's thread, soon. From any thread."""
        self._calls.append(action)
        if threading.current_thread() is not self._thread:
            self._ring()

    def every_tick(self, action: Callable[[], None]) -> None:
        """Run `action` on the lot's thread about every `TICK_S` while any is parked.

        Call it before `start`.
        """
        self._ticks.append(action)

    def park(self, watch: Watch) -> None:
        """Watch a connection that the calling thread owned. From any thread."""
        self.call(lambda: self.add(watch))

    def close(self, wait_s: float) -> None:
        """End the thread; what is parked stays as it is. From any thread."""
        self._is_ending = True
        self._ring()
        if not self._thread.ident:
            self._release()
        elif threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    # What follows is called on the lot's thread.

    def add(self, watch: Watch) -> None:
        self._watches[watch.channel] = watch
        if watch.events:
            self._selector.register(watch.channel.fileno, watch.events, watch)
        watch.begin()

    def take(self, watch: Watch) -> bool:
        """Take a connection out; False if it is not parked for this any more."""
        if not self.holds(watch):
            return False
        del self._watches[watch.channel]
        if watch.events:
            self._selector.unregister(watch.channel.fileno)
        return True

    def holds(self, watch: Watch) -> bool:
        return self._watches.get(watch.channel) is watch

    def listen_for(self, watch: Watch, events: int) -> None:
        """Change what a parked connection is watched for."""
        if events == watch.events or not self.holds(watch):
            return
        fileno = watch.channel.fileno
        if not events:
            self._selector.unregister(fileno)
        elif watch.events:
            self._selector.modify(fileno, events, watch)
        else:
            self._selector.register(fileno, events, watch)
        watch.events = events

    def parked(self) -> list[Watch]:
        return list(self._watches.values())

    def open_door(self, door: socket.socket, arrive: Callable[[], None]) -> None:
        """Call `arrive` when somebody connects to `door`."""
        self._selector.register(door, READ, arrive)

    def shut_door(self, door: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):  # it was shut already
            self._selector.unregister(door)

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
        self._bell.close()
        self._ear.close()

    def _sweep(self, now_s: float) -> None:
        for watch in [each for each in self._watches.values() if each.until_s <= now_s]:
            self._guarded(watch.due)
        for action in self._ticks:
            self._guarded(action)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as exc:  # one connection must not end the lot of all others
            self._on_error(exc)

    def _ring(self) -> None:
        # A full bell rings already; a closed one has nobody left to hear it.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)

    def _react(self, to: Watch | Callable[[], None], events: int) -> None:
        if not isinstance(to, Watch):
            to()
        elif self.holds(to):  # an earlier event of this turn may have taken it
            to.ready(events)
