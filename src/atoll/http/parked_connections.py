"""The reasons for which a connection is parked in the event loop, and their ends.

ParkedForHead      a request is awaited, or its head is arriving
ParkedForBody      a small body is arriving
ParkedForSkip      the unread rest of a body is read and dropped
ParkedForClose     the last response was sent: the other side may still read it
ParkedForResponse  a handler returned a deferred response
ParkedResponse     the unsent rest of a small response, whose reader is slow

Nothing here blocks the event loop: slow work runs on a thread of a pool. Rules of
unsent responses:

Rule 1: a connection has at most one, because its next request is not served before
        that response is sent. All of them together have `max_parked_bytes`.
Rule 2: each must make progress: within `idle_s` by some bytes, and at
        `min_bytes_per_s` on average. Otherwise its connection is closed.
Rule 3: when there are too many bytes, connections without a verified token are closed
        first, oldest first; then the oldest of the origin with the most bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from atoll.http.connection import (
    DATA,
    ENDED,
    Connection,
    ConnectionClosed,
    ListenerLimits,
)
from atoll.http.request import Request
from atoll.http.response import DeferredResponse, Problem, Response
from atoll.http.threads import (
    SCRATCH_BYTES,
    WRITE,
    EventLoop,
    ParkedConnection,
)
from atoll.runtime import Clock


class CloseHandler(Protocol):
    """Closes connections."""

    def lost(self, connection: Connection) -> None:
        """Close a connection that the other side has closed."""

    def drop(self, connection: Connection) -> None:
        """Close a connection that is no longer needed."""

    def run_callback(self, callback: Callable[[], None]) -> None:
        """Run a callback about a lost connection, on the callbacks' thread."""


class RequestHandler(CloseHandler, Protocol):
    """Serves requests."""

    def serve(self, connection: Connection) -> None:
        """Parse the head that has arrived, and serve its request."""

    def handle(self, request: Request) -> None:
        """Answer a request whose body has arrived."""

    def answer(self, request: Request, response: Response) -> None:
        """Send the response that was set on a deferred response."""

    def expire(self, request: Request, deferred: DeferredResponse) -> None:
        """Send the default of a deferred response that has expired."""

    def refuse(self, connection: Connection, problem: Problem) -> None:
        """Send the problem, and close."""


LINGER_BYTES: Final = 2**22


@dataclass(eq=False, kw_only=True)
class ParkedForHead(ParkedConnection):
    """Ends when a head is complete or too long, at its deadline, or at the end."""

    handler: RequestHandler
    head_until_s: Callable[[], float]
    max_head_bytes: int
    has_begun: bool = False

    def begin(self) -> None:
        if self.connection.ahead:
            self._arrived()
        if self.event_loop.holds(self):
            super().begin()

    def ready(self, events: int) -> None:
        state = self.connection.fill(self.event_loop.scratch)
        if state == DATA:
            self._arrived()
        elif state == ENDED and self.leave():
            self.handler.lost(self.connection)

    def on_deadline(self) -> None:
        self.leave()
        if self.connection.ahead:
            slow = Problem(408, "slow_head", "The head took too long. Send it again.")
            self.handler.refuse(self.connection, slow)
        else:
            self.handler.drop(self.connection)

    def on_listener_closing(self) -> None:
        if self.leave():
            self.handler.drop(self.connection)

    def _arrived(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.until_s = min(self.until_s, self.head_until_s())
        is_long = len(self.connection.ahead) > self.max_head_bytes
        if (self.connection.has_head() or is_long) and self.leave():
            self.handler.serve(self.connection)


@dataclass(eq=False, kw_only=True)
class ParkedForBody(ParkedConnection):
    """Ends when a small body has arrived in full, so that no thread waits for it."""

    handler: RequestHandler
    request: Request

    def ready(self, events: int) -> None:
        state = self.connection.fill(self.event_loop.scratch)
        if state == ENDED and self.leave():
            self.connection.is_gone = True
            self.handler.refuse(self.connection, self._problem(400, "short_body"))
        elif len(self.connection.ahead) >= self.request.body.length_bytes:
            self.leave()
            self.handler.handle(self.request)

    def on_deadline(self) -> None:
        self.leave()
        self.handler.refuse(self.connection, self._problem(408, "slow_body"))

    def _problem(self, status: int, code: str) -> Problem:
        arrived, length = len(self.connection.ahead), self.request.body.length_bytes
        message = f"Only {arrived} of {length} bytes of the body came."
        return Problem(status, code, f"{message} Send it again.")


@dataclass(eq=False, kw_only=True)
class ParkedUntilDeadline(ParkedConnection):
    """Is closed at its deadline, or when the listener closes."""

    closer: CloseHandler

    def on_deadline(self) -> None:
        if self.leave():
            self.closer.drop(self.connection)

    def on_listener_closing(self) -> None:
        self.on_deadline()


@dataclass(eq=False, kw_only=True)
class ParkedForSkip(ParkedUntilDeadline):
    """Ends when the rest of a body was read and discarded."""

    remaining_bytes: int
    after: Callable[[], None]

    def ready(self, events: int) -> None:
        state, skipped = self.connection.skip(
            self.event_loop.scratch, self.remaining_bytes
        )
        self.remaining_bytes -= skipped
        if state == ENDED and self.leave():
            self.closer.lost(self.connection)
        elif not self.remaining_bytes and self.leave():
            self.after()


@dataclass(eq=False, kw_only=True)
class ParkedForClose(ParkedUntilDeadline):
    """Ends when the other side closes too: closing first could lose the response."""

    remaining_bytes: int = LINGER_BYTES

    def begin(self) -> None:
        """Wait for the selector: bytes that TLS has buffered are not needed."""

    def ready(self, events: int) -> None:
        state, skipped = self.connection.skip_raw(self.event_loop.scratch)
        self.remaining_bytes -= skipped
        if state == ENDED or self.remaining_bytes <= 0:
            self.on_deadline()


@dataclass(eq=False, kw_only=True)
class ParkedForResponse(ParkedConnection):
    """Ends when the deferred response is set, expires, or loses its client."""

    handler: RequestHandler
    request: Request
    deferred: DeferredResponse

    def begin(self) -> None:
        self.deferred.attach(
            lambda response: self.event_loop.call(self._deliver(response))
        )
        super().begin()

    def ready(self, events: int) -> None:
        state = self.connection.fill(self.event_loop.scratch)
        # Keep reading to notice the end of the connection; bound the bytes read ahead.
        is_flood = len(self.connection.ahead) > SCRATCH_BYTES
        if (state == ENDED or is_flood) and self.leave():
            for callback in self.deferred.lose():
                self.handler.run_callback(callback)
            if is_flood:
                self.handler.drop(self.connection)
            else:
                self.handler.lost(self.connection)

    def on_deadline(self) -> None:
        if self.deferred.expire():
            self.leave()
            self.handler.expire(self.request, self.deferred)
        else:
            self.until_s = (
                math.inf
            )  # the response was set, and is about to be delivered

    def on_listener_closing(self) -> None:
        self.on_deadline()

    def _deliver(self, response: Response) -> Callable[[], None]:
        def deliver() -> None:
            if self.leave():
                self.handler.answer(self.request, response)
            elif response.done is not None:
                self.handler.run_callback(response.done)

        return deliver


class ParkedResponses:
    """Sends the rest of small responses as fast as their readers take it.

    Its state belongs to the loop's thread.
    """

    def __init__(
        self,
        event_loop: EventLoop,
        closer: CloseHandler,
        *,
        limits: ListenerLimits,
        clock: Clock,
        on_shed: Callable[[Connection], None],
    ) -> None:
        self._event_loop, self._closer, self._limits, self._clock = (
            event_loop,
            closer,
            limits,
            clock,
        )
        self._on_shed = on_shed
        self._responses: dict[ParkedResponse, None] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def park(
        self, connection: Connection, rest: memoryview, then: Callable[[], None]
    ) -> None:
        """Send `rest`, then call `then`, on the loop's thread. From any thread."""
        now_s = self._clock.now_s()
        parked = ParkedResponse(
            event_loop=self._event_loop,
            connection=connection,
            until_s=now_s,
            responses=self,
            rest=rest,
            then=then,
            since_s=now_s,
            size_bytes=len(rest),
        )
        self._event_loop.call(partial(self._add, parked))

    # The following methods are called on the loop's thread.

    def until_s(self, parked: ParkedResponse) -> float:
        """Return the deadline of a response that makes no more progress."""
        limits, now_s = self._limits, self._clock.now_s()
        slowest_s = limits.idle_s + parked.sent_bytes / limits.min_bytes_per_s
        return min(now_s + limits.idle_s, parked.since_s + slowest_s)

    def finish(self, parked: ParkedResponse) -> None:
        """Continue with a connection whose response is sent."""
        if self._remove(parked):
            parked.then()

    def lose(self, parked: ParkedResponse) -> None:
        """Close a connection whose reader has closed it."""
        if self._remove(parked):
            self._closer.lost(parked.connection)

    def drop(self, parked: ParkedResponse) -> None:
        """Close a connection whose reader is too slow."""
        if self._remove(parked):
            self._on_shed(parked.connection)
            self._closer.drop(parked.connection)

    def _add(self, parked: ParkedResponse) -> None:
        parked.until_s = self.until_s(parked)
        self._responses[parked] = None
        self._bytes += parked.size_bytes
        self._event_loop.add(parked)
        while self._bytes > self._limits.max_parked_bytes:
            self.drop(self._next_to_drop())

    def _remove(self, parked: ParkedResponse) -> bool:
        if not parked.leave():
            return False
        del self._responses[parked]
        self._bytes -= parked.size_bytes
        return True

    def _next_to_drop(self) -> ParkedResponse:
        for parked in self._responses:
            if not parked.connection.is_verified:
                return parked
        bytes_by_origin: Counter[str] = Counter()
        for parked in self._responses:
            bytes_by_origin[parked.connection.origin] += parked.size_bytes
        ((largest_origin, _),) = bytes_by_origin.most_common(1)
        return next(
            parked
            for parked in self._responses
            if parked.connection.origin == largest_origin
        )


@dataclass(eq=False, kw_only=True)
class ParkedResponse(ParkedConnection):
    """The unsent rest of one response."""

    responses: ParkedResponses
    rest: memoryview
    then: Callable[[], None]
    since_s: float
    size_bytes: int
    events: int = WRITE

    @property
    def sent_bytes(self) -> int:
        return self.size_bytes - len(self.rest)

    def begin(self) -> None:
        """Wait for the selector: it reports a writable socket immediately."""

    def ready(self, events: int) -> None:
        try:
            self.rest = self.connection.send_some(self.rest)
        except ConnectionClosed:
            self.responses.lose(self)
            return
        if len(self.rest):
            self.until_s = self.responses.until_s(self)
        else:
            self.responses.finish(self)

    def on_deadline(self) -> None:
        self.responses.drop(self)
