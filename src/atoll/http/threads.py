"""The threads of a listener: an event loop, and pools with lanes for bulk bodies.

The event loop is one thread that watches every connection that no other thread uses.
Rule 1: each parked connection defines what happens when bytes arrive and when its
        deadline passes; both run on the event loop's thread and never block.
Rule 2: a thread that takes a connection out of the event loop owns it until it is
        parked again.
Rule 3: only the event loop's thread touches the state of the loop; others use `call`.

The pools have a fixed number of threads:

small   handlers of small requests, and their responses
in      bulk bodies that are read, each with its handler
out     bulk bodies that are sent
tell    callbacks about closed connections: one thread, so that none blocks the loop

Within a pool, urgent actions run before all others, except for one in `SHARE`: a client
with many urgent requests cannot starve the others.

Bulk bodies use lanes, a limit on concurrent transfers, so that they never starve small
requests. A body without a lane, or with too many bytes in flight, stays parked and
unread: that is the back-pressure.

Rule 4: an owner, which is an island at its origin, has at most `lanes_per_owner`.
Rule 5: the next lane goes to the origin, then to the owner, that has the fewest; then
        to the oldest request.
Rule 6: while a body waits for a lane, transfers slower than a rate that rises with the
        number of waiting bodies are ended. So are those of an origin or an owner beyond
        its fair share, up to a higher rate. The call is safe to repeat, and its owner
        repeats it.
Rule 7: only time spent waiting for the other side counts, measured over `lane_grace_s`
        of it at least, from when the first body had to wait.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from atoll.http.connection import Connection, ListenerLimits
from atoll.runtime import Clock

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

TICK_S: Final = 0.05
"""How late a deadline may be handled."""

SCRATCH_BYTES: Final = 2**16


@dataclass(eq=False, kw_only=True)
class ParkedConnection(ABC):
    """A connection in the event loop, with its reactions to events and its deadline."""

    event_loop: EventLoop
    connection: Connection
    until_s: float
    events: int = READ

    def leave(self) -> bool:
        """Take it out of the event loop; False if it is no longer parked for this."""
        return self.event_loop.take(self)

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
        self._thread = threading.Thread(target=self._run, name="http-loop", daemon=True)

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


Action = Callable[[], None]

SHARE = 4
"""Every fourth action is taken from the queue that is not urgent."""


class ThreadPool:
    """A fixed number of daemon threads, which never keep the process from ending."""

    def __init__(
        self, name: str, count: int, *, on_error: Callable[[Exception], None]
    ) -> None:
        self._on_error = on_error
        self._num_taken = 0
        self._urgent: deque[Action | None] = deque()
        self._normal: deque[Action | None] = deque()
        self._available: queue.SimpleQueue[None] = queue.SimpleQueue()
        """A semaphore: as many items as both queues have actions, so that a thread that
        took one finds an action."""

        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, action: Action, *, is_urgent: bool = False) -> None:
        """Run `action` when a thread is free. Does not wait."""
        (self._urgent if is_urgent else self._normal).append(action)
        self._available.put(None)

    def end(self) -> None:
        """Let every thread end after the submitted actions."""
        for _ in self._threads:
            self._normal.append(None)
            self._available.put(None)

    def join(self, until_s: float) -> None:
        """Wait for the threads, at most until `until_s` of `time.monotonic`."""
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _run(self) -> None:
        while (action := self._next()) is not None:
            try:
                action()
            except Exception as exc:  # one request must not end the thread of others
                self._on_error(exc)
            del action  # else the thread keeps the last request in memory

    def _next(self) -> Action | None:
        self._available.get()
        self._num_taken += 1  # approximate: without a lock, increments can be lost
        queues = [self._urgent, self._normal]
        if self._num_taken % SHARE == 0:
            queues.reverse()
        while True:  # another thread may have emptied a queue
            for actions in queues:
                with suppress(IndexError):
                    return actions.popleft()


Owner = tuple[str, str]
"""An origin, and the island there; an empty name for callers without one."""


@dataclass
class _Mark:
    """Bytes moved and time waited when the current measurement began."""

    moved_bytes: int
    waited_s: float


class BulkLanes:
    """Runs bulk transfers, each on its own thread.

    Its state belongs to the loop's thread.
    """

    def __init__(
        self,
        *,
        event_loop: EventLoop,
        threads: ThreadPool,
        limits: ListenerLimits,
        clock: Clock,
        max_bytes: int | None,
        is_sending: bool,
        on_cut: Callable[[Connection], None],
    ) -> None:
        self._event_loop, self._threads = event_loop, threads
        self._limits, self._clock = limits, clock
        self._max_bytes, self._is_sending = max_bytes, is_sending
        self._on_cut = on_cut
        self._waiting: list[QueuedTransfer] = []
        self._active: dict[QueuedTransfer, _Mark | None] = {}
        self._bytes = 0
        event_loop.every_tick(self._tick)

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, queued: QueuedTransfer) -> None:
        """Run the transfer when there is a lane. From any thread."""
        self._event_loop.call(partial(self._arrive, queued))

    def leave_queue(self, queued: QueuedTransfer) -> None:
        """Remove a transfer that waited too long. On the loop's thread."""
        self._waiting.remove(queued)
        self._admit()

    def _arrive(self, queued: QueuedTransfer) -> None:
        self._event_loop.add(queued)
        self._waiting.append(queued)
        self._admit()

    def _admit(self) -> None:
        while (queued := self._next()) is not None and self._has_room(queued):
            self._waiting.remove(queued)
            self._event_loop.take(queued)
            self._active[queued] = None
            self._bytes += queued.size_bytes
            self._threads.submit(partial(self._run, queued))

    def _next(self) -> QueuedTransfer | None:
        """Return the waiting body that gets the next lane."""
        of_origin, of_owner = self._lane_counts()
        allowed = [
            queued
            for queued in self._waiting
            if not queued.owner[1]
            or of_owner[queued.owner] < self._limits.lanes_per_owner
        ]
        return min(
            allowed,
            key=lambda queued: (of_origin[queued.owner[0]], of_owner[queued.owner]),
            default=None,
        )

    def _lane_counts(self) -> tuple[Counter[str], Counter[Owner]]:
        """Return the number of active lanes per origin and per owner."""
        of_owner = Counter(queued.owner for queued in self._active)
        of_origin: Counter[str] = Counter()
        for (origin, _), count in of_owner.items():
            of_origin[origin] += count
        return of_origin, of_owner

    def _has_room(self, queued: QueuedTransfer) -> bool:
        # A body larger than `max_bytes` runs alone; otherwise it would wait forever.
        if len(self._active) >= self._limits.bulk_lanes:
            return False
        if self._max_bytes is None or self._bytes == 0:
            return True
        return self._bytes + queued.size_bytes <= self._max_bytes

    def _run(self, queued: QueuedTransfer) -> None:
        try:
            queued.run()
        finally:
            self._event_loop.call(partial(self._leave, queued))

    def _leave(self, queued: QueuedTransfer) -> None:
        del self._active[queued]
        self._bytes -= queued.size_bytes
        self._admit()

    # Slow transfers.

    def _tick(self) -> None:
        blocked = self._next()
        if blocked is None:
            if not self._waiting and any(self._active.values()):
                self._active = dict.fromkeys(self._active)
            return
        rates = {transfer: self._rate(transfer) for transfer in self._active}
        for transfer in self._too_slow(blocked, rates):
            self._active[transfer] = None
            self._on_cut(transfer.connection)
            transfer.connection.cut(is_sending=self._is_sending)

    def _rate(self, queued: QueuedTransfer) -> float | None:
        """Return the bytes per second of waiting time; None before `lane_grace_s`."""
        connection, mark = queued.connection, self._active[queued]
        now = _Mark(
            connection.bytes_in + connection.bytes_out,
            connection.waited_s(self._clock.now_s()),
        )
        if mark is None:
            self._active[queued] = now
            return None
        waited_s = now.waited_s - mark.waited_s
        if waited_s < self._limits.lane_grace_s:
            return None
        if waited_s > 2 * self._limits.lane_grace_s:
            self._active[queued] = now  # a fast start must not hide a stall
        return (now.moved_bytes - mark.moved_bytes) / waited_s

    def _too_slow(
        self, blocked: QueuedTransfer, rates: dict[QueuedTransfer, float | None]
    ) -> list[QueuedTransfer]:
        """Return the transfers to end.

        Of those below the rate, the slowest, as many as there are bodies waiting. If
        none is below it, the slowest one beyond its fair share.
        """
        limits = self._limits
        min_rate = limits.waiting_bytes_per_s * min(
            len(self._waiting), limits.max_rises
        )
        measured = {
            transfer: rate for transfer, rate in rates.items() if rate is not None
        }
        crawling = [transfer for transfer, rate in measured.items() if rate < min_rate]
        if crawling:
            return sorted(crawling, key=lambda transfer: measured[transfer])[
                : len(self._waiting)
            ]
        greedy = [
            transfer
            for transfer, rate in measured.items()
            if rate < limits.fair_bytes_per_s
            and self._is_beyond_share(transfer, blocked)
        ]
        return sorted(greedy, key=lambda transfer: measured[transfer])[:1]

    def _is_beyond_share(self, queued: QueuedTransfer, blocked: QueuedTransfer) -> bool:
        """Return whether its origin or owner has two lanes more than the blocked one's.

        With two more, it still has at least as many as the other after losing one.
        """
        of_origin, of_owner = self._lane_counts()
        owner, blocked_owner = queued.owner, blocked.owner
        if owner[0] != blocked_owner[0]:
            return of_origin[owner[0]] >= of_origin[blocked_owner[0]] + 2
        return of_owner[owner] >= of_owner[blocked_owner] + 2


@dataclass(eq=False, kw_only=True)
class QueuedTransfer(ParkedConnection):
    """A connection that waits for a lane; its body stays unread."""

    owner: Owner
    size_bytes: int
    run: Callable[[], None]
    refuse: Callable[[], None]
    lanes: BulkLanes
    events: int = 0

    def begin(self) -> None:
        """Read nothing: the body stays in the socket."""

    def ready(self, events: int) -> None:
        """Do nothing: the selector watches no events of it."""

    def on_deadline(self) -> None:
        if self.leave():
            self.lanes.leave_queue(self)
            self.refuse()


class ThreadPools:
    """Every thread except the event loop's."""

    def __init__(
        self,
        *,
        event_loop: EventLoop,
        limits: ListenerLimits,
        clock: Clock,
        on_error: Callable[[Exception], None],
        on_cut: Callable[[Connection], None],
    ) -> None:
        self.small = ThreadPool("http-small", limits.small_threads, on_error=on_error)
        self.callbacks = ThreadPool("http-tell", 1, on_error=on_error)
        self._in = ThreadPool("http-in", limits.bulk_lanes, on_error=on_error)
        self._out = ThreadPool("http-out", limits.bulk_lanes, on_error=on_error)
        lanes = partial(
            BulkLanes, event_loop=event_loop, limits=limits, clock=clock, on_cut=on_cut
        )
        self.lanes_in = lanes(
            threads=self._in,
            max_bytes=limits.max_body_bytes_in_flight,
            is_sending=False,
        )
        # Sent bodies are in memory or in files already: they need no bound.
        self.lanes_out = lanes(threads=self._out, max_bytes=None, is_sending=True)

    def start(self) -> None:
        for threads in self._all():
            threads.start()

    def close(self, until_s: float) -> None:
        """End every thread that is not stuck, by `until_s` of `time.monotonic`."""
        for threads in self._all():
            threads.end()
        for threads in self._all():
            threads.join(until_s)

    def _all(self) -> list[ThreadPool]:
        return [self.small, self.callbacks, self._in, self._out]
