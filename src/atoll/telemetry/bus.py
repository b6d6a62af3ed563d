"""The event bus: events are emitted here and passed to their sinks.

Rule 1: an emitter never waits for a sink, and never gets a sink's exception.
Rule 2: every sink has its own queue and thread, so none delays another.
Rule 3: a sink gets events in the order of their numbers; events that it missed are
counted, and reported to the others when that number has doubled.

`JsonlWriter` is the sink that writes events as lines of JSON in a run's directory.
Rule 4: it raises nothing into the run. Events that cannot be written are counted, and
reported once until writing works again.
Rule 5: a line is written by one call, so a reader that follows the file sees whole
lines. A line that a full disk or a power cut has torn is followed by a new one: skip
lines that do not parse.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import UsageError
from atoll.telemetry.events import Event, checked

MAX_RETAINED = 1000
"""Events that are retained for late subscribers."""

MAX_WAITING = 2 * MAX_RETAINED
"""Queue length of a sink: the retained events for a late one, and as many new ones."""

CLOSE_S = 5.0
"""Time for sinks to handle their queued events when the bus closes."""

DROPPED = "events_dropped"

Sink = Callable[[Event], None]


@dataclass(frozen=True)
class Counters:
    """Counters of an event bus since it was made."""

    events: Mapping[str, int]
    """How often each event was emitted."""

    dropped: Mapping[str, int]
    """How many events each sink missed."""


class EventBus:
    """Numbers events, retains the last ones and passes them to sinks.

    Threads may share it. Do not use it in a signal handler: it would wait for a lock
    that the interrupted thread may hold.

    Args:
        process: Identifies this process of the coordinator in its events.
        unix_s: Returns the Unix time.
    """

    def __init__(
        self, *, process: str = "", unix_s: Callable[[], float] = time.time
    ) -> None:
        self.process, self._unix_s = process, unix_s
        self._lock = threading.Lock()
        self._retained: deque[Event] = deque(maxlen=MAX_RETAINED)
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._subscriptions: list[Subscription] = []

    @property
    def newest(self) -> int:
        """The number of the last event; 0 before the first."""
        with self._lock:
            return self._newest()

    def emit(self, name: str, **fields: object) -> Event:
        """Queue an event for every sink, and return without waiting.

        Raises:
            UsageError: name, fields or types are not in `EVENTS`. No sink gets it.
        """
        values = checked(name, fields)
        with self._lock:
            at_unix_s = self._unix_s()
            event = Event(self._newest() + 1, at_unix_s, name, values, self.process)
            self._retained.append(event)
            self._counts[name] += 1
            for subscription in self._subscriptions:
                self._dropped[subscription.name] += not subscription.offer(event)
        return event

    def after(self, number: int, *, limit: int = MAX_RETAINED) -> list[Event]:
        """Return the oldest retained events after `number`.

        A number above the newest is of an earlier coordinator process: then all
        retained events are returned.
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
        """Call `sink` with every event from now on, in its own thread.

        Args:
            sink: May be slow and may raise; the events it misses are counted.
            name: The name of the sink in counters and events.
            after: Begin with the retained events after this number.
            max_waiting: Events that wait for the sink before it misses some.
        """
        if max_waiting < 1:
            raise UsageError(f"max_waiting={max_waiting} must be at least 1.")
        subscription = Subscription(self, sink, name=name, max_waiting=max_waiting)
        with self._lock:
            self._dropped[name] += 0  # export the counter before its first count
            for event in [] if after is None else self._after(after):
                self._dropped[name] += not subscription.offer(event)
            self._subscriptions.append(subscription)
        subscription.start()
        return subscription

    def counters(self) -> Counters:
        """Return the counts of emitted and dropped events, for `prometheus.render`."""
        with self._lock:
            return Counters(dict(self._counts), dict(self._dropped))

    def close(self, *, within_s: float = CLOSE_S) -> None:
        """Let the sinks handle their queued events, for at most `within_s`.

        Safe to repeat. Events emitted afterwards are retained, and reach no sink.
        """
        until_s = time.monotonic() + within_s
        with self._lock:
            ending = list(self._subscriptions)
        for subscription in ending:
            subscription.end()
        for subscription in ending:
            subscription.close(within_s=max(0.0, until_s - time.monotonic()))

    def forget(self, subscription: Subscription) -> None:
        """Stop offering events to a subscription."""
        with self._lock:
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)

    def missed(self, sink: str) -> None:
        """Count an event that a sink raised on."""
        with self._lock:
            self._dropped[sink] += 1

    def _newest(self) -> int:
        return self._retained[-1].number if self._retained else 0

    def _after(self, number: int) -> list[Event]:
        if number > self._newest():
            return list(self._retained)
        return [event for event in self._retained if event.number > number]


class Subscription:
    """One sink, its queue and its thread. `EventBus.subscribe` makes it."""

    def __init__(
        self, events: EventBus, sink: Sink, *, name: str, max_waiting: int
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
        """Queue an event; return False if there is no room. Does not wait."""
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
        """Take no new events; the sink still gets the queued ones. Does not wait."""
        self._events.forget(self)
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def close(self, *, within_s: float = CLOSE_S) -> bool:
        """End, and return whether the sink handled all events within the time.

        Safe to repeat, and to call from the sink itself, which gets the rest later.
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
        # Do not count a dropped report of drops: it would cause reports forever.
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


NAME = "events"
MAX_BYTES = 64_000_000
"""A file that would become longer is rotated."""

KEEP = 4
"""Number of files, including the current one."""


class JsonlWriter:
    """A sink that appends to `events.jsonl`; older ones are `events.1.jsonl` and so on.

    For one thread, that of its subscription.

    Args:
        directory: The run's directory. It is first used at the first event.
        on_failure: Called with a message when writing begins to fail.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_failure: Callable[[str], object] = lambda _: None,
        max_bytes: int = MAX_BYTES,
        keep: int = KEEP,
    ) -> None:
        if keep < 1 or max_bytes < 1:
            raise UsageError(f"keep={keep} and max_bytes={max_bytes} must be above 0.")
        self.path = directory / f"{NAME}.jsonl"
        self.lost = 0
        """Events that could not be written."""

        self._on_failure = on_failure
        self._max_bytes = max_bytes
        self._keep = keep
        self._handle: int | None = None
        self._size = 0
        self._is_torn = False
        self._is_failing = False

    def __call__(self, event: Event) -> None:
        try:
            self._append(line_of(event))
            self._is_failing = False
        except OSError as exc:
            self.lost += 1
            self.close()
            self._say(exc)

    def close(self) -> None:
        """Close the file; the next event opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # it repeats the error of a failed write
                os.close(handle)

    def _say(self, exc: OSError) -> None:
        if self._is_failing:
            return
        self._is_failing = True
        self._on_failure(
            f"Events cannot be written to {self.path}: {exc.strerror or exc}. The run "
            "continues without them; free some space there, or check its permissions."
        )

    def _append(self, line: bytes) -> None:
        handle = self._opened()
        if self._size and self._size + len(line) > self._max_bytes:
            self.close()
            self._put_aside()
            handle = self._opened()
        rest = memoryview(b"\n" * self._is_torn + line)
        while rest:
            written = os.write(handle, rest)
            self._size += written
            rest = rest[written:]
            self._is_torn = bool(rest)

    def _opened(self) -> int:
        if self._handle is None:
            # Private: it has the names and addresses of islands.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._handle = os.open(self.path, flags, 0o600)
            self._size = os.fstat(self._handle).st_size
            last = os.pread(self._handle, 1, self._size - 1) if self._size else b"\n"
            self._is_torn = last != b"\n"
        return self._handle

    def _put_aside(self) -> None:
        aside = [self.path.with_name(f"{NAME}.{n}.jsonl") for n in range(1, self._keep)]
        files = [self.path, *aside]
        for older, newer in zip(files[:0:-1], files[-2::-1], strict=True):
            with suppress(FileNotFoundError):
                newer.replace(older)
        if not aside:
            self.path.unlink()


def line_of(event: Event) -> bytes:
    """Return an event as one line of ASCII, without terminal control characters."""
    text = json.dumps(event.as_dict(), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"
