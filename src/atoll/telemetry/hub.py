"""Where events are emitted, and who hears of them.

Rule 1: whoever emits never waits for a sink, and never hears of one that raises.
Rule 2: every sink has a queue and a thread of its own, so none holds up another.
Rule 3: a sink gets events in the order of their numbers; what it missed is counted,
and told to the others when that number has doubled.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from atoll.errors import UsageError
from atoll.telemetry.events import Event, checked

KEPT = 1000
"""Events that are kept for whoever comes late."""

MAX_WAITING = 2 * KEPT
"""Events that wait for one sink; as many as a late one is given, and some to come."""

CLOSE_S = 5.0
"""How long sinks may take over what waits when all is over."""

DROPPED = "events_dropped"

Sink = Callable[[Event], None]


@dataclass(frozen=True)
class Counters:
    """What a hub has counted since it was made."""

    events: Mapping[str, int]
    """How often each event was emitted."""

    dropped: Mapping[str, int]
    """How many events each sink missed."""


class Events:
    """Gives events their numbers, keeps the last ones and hands them to sinks.

    Threads may share it. Not for handlers of signals: they would wait for a lock that
    the thread they interrupt may hold.

    Args:
        unix_s: Says what time of day it is.
    """

    def __init__(self, *, unix_s: Callable[[], float] = time.time) -> None:
        self._unix_s = unix_s
        self._lock = threading.Lock()
        self._kept: deque[Event] = deque(maxlen=KEPT)
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._subscriptions: list[Subscription] = []

    @property
    def newest(self) -> int:
        """The number of the last event; 0 before the first."""
        with self._lock:
            return self._newest()

    def emit(self, name: str, **fields: object) -> Event:
        """Tell every sink, and return without waiting for any.

        Raises:
            UsageError: name, fields or types are not in `EVENTS`. Nobody is told.
        """
        values = checked(name, fields)
        with self._lock:
            event = Event(self._newest() + 1, self._unix_s(), name, values)
            self._kept.append(event)
            self._counts[name] += 1
            for each in self._subscriptions:
                self._dropped[each.name] += not each.offer(event)
        return event

    def after(self, number: int, *, limit: int = KEPT) -> list[Event]:
        """Return the oldest events that are kept of those after `number`.

        A number from the future is from an earlier life: all that is kept follows it.
        """
        with self._lock:
            return self._after(number)[:limit]

    def subscribe(
        self,
        sink: Sink,
        *,
        name: str,
        after: int | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> Subscription:
        """Call `sink` with every event from now on, in a thread of its own.

        Args:
            sink: May be slow and may raise; the events it misses are counted.
            name: What the sink is called where that is told.
            after: Begin with what is kept of the events after this number.
            max_waiting: Events that wait for the sink before it misses some.
        """
        if max_waiting < 1:
            raise UsageError(f"max_waiting={max_waiting} must be at least 1.")
        subscription = Subscription(self, sink, name=name, max_waiting=max_waiting)
        with self._lock:
            self._dropped[name] += 0  # a counter that is there before it counts
            for event in [] if after is None else self._after(after):
                self._dropped[name] += not subscription.offer(event)
            self._subscriptions.append(subscription)
        subscription.start()
        return subscription

    def counters(self) -> Counters:
        """Return what was emitted and what was missed, for `prometheus.render`."""
        with self._lock:
            return Counters(dict(self._counts), dict(self._dropped))

    def close(self, *, within_s: float = CLOSE_S) -> None:
        """Let the sinks have what waits for them, at most for `within_s`.

        Safe to repeat. What is emitted afterwards is kept, and told to no sink.
        """
        until_s = time.monotonic() + within_s
        with self._lock:
            ending = list(self._subscriptions)
        for each in ending:
            each.end()
        for each in ending:
            each.close(within_s=max(0.0, until_s - time.monotonic()))

    def forget(self, subscription: Subscription) -> None:
        """Offer it nothing any more."""
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

    def missed(self, sink: str) -> None:
        """Count an event that a sink raised on."""
        with self._lock:
            self._dropped[sink] += 1

    def _newest(self) -> int:
        return self._kept[-1].number if self._kept else 0

    def _after(self, number: int) -> list[Event]:
        if number > self._newest():
            return list(self._kept)
        return [event for event in self._kept if event.number > number]


class Subscription:
    """One sink, its queue and its thread. `Events.subscribe` makes it."""

    def __init__(
        self, events: Events, sink: Sink, *, name: str, max_waiting: int
    ) -> None:
        self.name = name
        self._events = events
        self._sink = sink
        self._max_waiting = max_waiting
        self._waiting: deque[Event] = deque()
        self._changed = threading.Condition()
        self._is_ending = False
        self._dropped, self._reported, self._reason = 0, 0, ""
        # A daemon: a sink that hangs does not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, name=f"events-{name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def offer(self, event: Event) -> bool:
        """Say whether there was room for an event. Does not wait for the sink."""
        with self._changed:
            if self._is_ending:
                return True
            if len(self._waiting) >= self._max_waiting:
                self._drop(event, "slow")
                return False
            self._waiting.append(event)
            self._changed.notify()
            return True

    def end(self) -> None:
        """Take nothing new; the sink still gets what waits. Does not wait for it."""
        self._events.forget(self)
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def close(self, *, within_s: float = CLOSE_S) -> bool:
        """End, and say whether the sink had everything within the time.

        Safe to repeat, and from the sink itself, which then has the rest afterwards.
        """
        self.end()
        if self._thread is threading.current_thread():
            return False
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (event := self._next()) is not None:
            try:
                self._sink(event)
            except Exception as exc:  # one bad sink must not silence the others
                self._events.missed(self.name)
                with self._changed:
                    self._drop(event, f"raised {type(exc).__name__}")
            self._report()
        self._report(is_last=True)

    def _next(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            return self._waiting.popleft() if self._waiting else None

    def _drop(self, event: Event, reason: str) -> None:
        # What is told of drops is not told again when it is dropped, for ever.
        if event.name != DROPPED:
            self._dropped += 1
            self._reason = reason

    def _report(self, *, is_last: bool = False) -> None:
        with self._changed:
            dropped, reason = self._dropped, self._reason
            enough = self._reported + 1 if is_last else max(1, 2 * self._reported)
            if self._waiting or dropped < enough:
                return
            self._reported = dropped
        self._events.emit(DROPPED, sink=self.name, dropped=dropped, reason=reason)
