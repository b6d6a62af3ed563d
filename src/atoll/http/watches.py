"""Why a connection is parked, and what ends its parking: one class for each reason.

Greeting    TLS's handshake waits for the other side's next message
Heading     a request is awaited, or its head is coming
Collecting  a small body is coming
Waiting     a handler gave back a Later
Streaming   a response goes on for as long as somebody pushes
Skipping    the unread rest of a body passes by
Lingering   the last response was sent: the other side may still read it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from atoll.http.channel import DATA, ENDED, Channel, Gone
from atoll.http.later import Later
from atoll.http.lot import READ, SCRATCH_BYTES, WRITE, Lot, Watch
from atoll.http.problem import Problem
from atoll.http.request import Request
from atoll.http.response import Response
from atoll.http.stream import Stream

LINGER_BYTES: Final = 2**22


class Desk(Protocol):
    """Takes connections over from their watches. Nothing here blocks the lot."""

    def greet(self, channel: Channel, until_s: float) -> None: ...

    def serve(self, channel: Channel) -> None: ...

    def handle(self, request: Request) -> None: ...

    def answer(self, request: Request, response: Response) -> None: ...

    def expire(self, request: Request, later: Later) -> None: ...

    def refuse(self, channel: Channel, problem: Problem) -> None: ...

    def follow(self, channel: Channel) -> None: ...

    def lost(self, channel: Channel) -> None: ...

    def drop(self, channel: Channel) -> None: ...

    def tell(self, callback: Callable[[], None]) -> None: ...


class Greeting(Watch):
    """Ends when the other side says something, or takes too long."""

    def __init__(
        self, lot: Lot, desk: Desk, channel: Channel, *, until_s: float, events: int
    ) -> None:
        super().__init__(channel, until_s=until_s, events=events)
        self._lot, self._desk = lot, desk

    def begin(self) -> None:
        """Look at nothing: no byte of TLS was read."""

    def ready(self, events: int) -> None:
        if self._lot.take(self):
            self._desk.greet(self.channel, self.until_s)

    def due(self) -> None:
        if self._lot.take(self):
            self._desk.drop(self.channel)

    def hurry(self) -> None:
        self.due()


class Heading(Watch):
    """Ends when a head is complete, or too long, or too late, or never comes."""

    def __init__(
        self,
        lot: Lot,
        desk: Desk,
        channel: Channel,
        *,
        until_s: float,
        head_until_s: Callable[[], float],
        max_head_bytes: int,
    ) -> None:
        super().__init__(channel, until_s=until_s)
        self._lot, self._desk = lot, desk
        self._head_until_s = head_until_s
        self._max_head_bytes = max_head_bytes
        self._has_begun = False

    def begin(self) -> None:
        if self.channel.ahead:
            self._arrived()
        if self._lot.holds(self):
            super().begin()

    def ready(self, events: int) -> None:
        said = self.channel.fill(self._lot.scratch)
        if said == DATA:
            self._arrived()
        elif said == ENDED and self._lot.take(self):
            self._desk.lost(self.channel)

    def due(self) -> None:
        self._lot.take(self)
        if self.channel.ahead:
            slow = Problem(408, "slow_head", "The head took too long. Send it again.")
            self._desk.refuse(self.channel, slow)
        else:
            self._desk.drop(self.channel)

    def hurry(self) -> None:
        if self._lot.take(self):
            self._desk.drop(self.channel)

    def _arrived(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.until_s = min(self.until_s, self._head_until_s())
        is_long = len(self.channel.ahead) > self._max_head_bytes
        if (self.channel.has_head() or is_long) and self._lot.take(self):
            self._desk.serve(self.channel)


class Collecting(Watch):
    """Ends when all of a small body is there, so that no thread waits for it."""

    def __init__(
        self, lot: Lot, desk: Desk, request: Request, *, until_s: float
    ) -> None:
        super().__init__(request.connection, until_s=until_s)
        self._lot, self._desk, self._request = lot, desk, request

    def ready(self, events: int) -> None:
        said = self.channel.fill(self._lot.scratch)
        if said == ENDED and self._lot.take(self):
            self.channel.is_gone = True
            self._desk.refuse(self.channel, self._problem(400, "short_body"))
        elif len(self.channel.ahead) >= self._request.body.length_bytes:
            self._lot.take(self)
            self._desk.handle(self._request)

    def due(self) -> None:
        self._lot.take(self)
        self._desk.refuse(self.channel, self._problem(408, "slow_body"))

    def _problem(self, status: int, code: str) -> Problem:
        arrived, length = len(self.channel.ahead), self._request.body.length_bytes
        came = f"Only {arrived} of {length} bytes of the body came."
        return Problem(status, code, f"{came} Send it again.")


class Waiting(Watch):
    """Ends when the Later has its answer, or its time is up, or nobody waits."""

    def __init__(
        self, lot: Lot, desk: Desk, request: Request, later: Later, *, until_s: float
    ) -> None:
        super().__init__(request.connection, until_s=until_s)
        self._lot, self._desk = lot, desk
        self._request, self._later = request, later

    def begin(self) -> None:
        self._later.attach(lambda response: self._lot.call(self._deliver(response)))
        super().begin()

    def ready(self, events: int) -> None:
        if self.channel.fill(self._lot.scratch) == ENDED and self._lot.take(self):
            for callback in self._later.lose():
                self._desk.tell(callback)
            self._desk.lost(self.channel)
        elif len(self.channel.ahead) > SCRATCH_BYTES:
            self._lot.listen_for(self, 0)

    def due(self) -> None:
        if self._later.expire():
            self._lot.take(self)
            self._desk.expire(self._request, self._later)
        else:
            self.until_s = math.inf  # the answer is on its way

    def hurry(self) -> None:
        self.due()

    def _deliver(self, response: Response) -> Callable[[], None]:
        def deliver() -> None:
            if self._lot.take(self):
                self._desk.answer(self._request, response)
            elif response.done is not None:
                self._desk.tell(response.done)

        return deliver


class Streaming(Watch):
    """Ends when the stream does, or its reader goes or falls too far behind."""

    def __init__(
        self,
        lot: Lot,
        desk: Desk,
        channel: Channel,
        stream: Stream,
        *,
        is_chunked: bool,
        after: Callable[[], None],
    ) -> None:
        super().__init__(channel, until_s=math.inf)
        self._lot, self._desk, self._stream = lot, desk, stream
        self._is_chunked, self._after = is_chunked, after
        self._unsent = memoryview(b"")
        self._has_ended = False

    def begin(self) -> None:
        self._stream.attach(partial(self._lot.call, self._pump))
        super().begin()

    def ready(self, events: int) -> None:
        if events & READ and self.channel.fill(self._lot.scratch) == ENDED:
            self._end(partial(self._desk.lost, self.channel))
        elif len(self.channel.ahead) > SCRATCH_BYTES:
            self._end(partial(self._desk.drop, self.channel))
        elif events & WRITE:
            self._pump()

    def due(self) -> None:
        """Go on: a stream has no deadline."""

    def hurry(self) -> None:
        self._end(partial(self._desk.drop, self.channel))

    def _pump(self) -> None:
        if not self._lot.holds(self):
            return
        if self._stream.is_gone:  # too far behind
            self._end(partial(self._desk.drop, self.channel))
            return
        try:
            self._send()
        except Gone:
            self._end(partial(self._desk.lost, self.channel))

    def _send(self) -> None:
        while self._unsent or self._refill():
            sent = self.channel.send_now(self._unsent)
            self._unsent = self._unsent[sent:]
            if not sent:
                self._lot.listen_for(self, READ | WRITE)
                return
        self._lot.listen_for(self, READ)
        if self._has_ended:
            self._end(self._after)

    def _refill(self) -> bool:
        if self._has_ended:
            return False
        data, self._has_ended = self._stream.take()
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data += b"0\r\n\r\n" if self._has_ended else b""
        self._unsent = memoryview(data)
        return bool(data)

    def _end(self, then: Callable[[], None]) -> None:
        if self._lot.take(self):
            for callback in self._stream.lose():
                self._desk.tell(callback)
            then()


class Skipping(Watch):
    """Ends when the rest of a body has passed."""

    def __init__(
        self, lot: Lot, desk: Desk, channel: Channel, *, until_s: float, size: int
    ) -> None:
        super().__init__(channel, until_s=until_s)
        self._lot, self._desk, self._left = lot, desk, size

    def ready(self, events: int) -> None:
        said, skipped = self.channel.skip(self._lot.scratch, self._left)
        self._left -= skipped
        if said == ENDED and self._lot.take(self):
            self._desk.lost(self.channel)
        elif not self._left and self._lot.take(self):
            self._desk.follow(self.channel)

    def due(self) -> None:
        if self._lot.take(self):
            self._desk.drop(self.channel)

    def hurry(self) -> None:
        self.due()


class Lingering(Watch):
    """Ends when the other side closes too: closing first could destroy what we said."""

    def __init__(
        self, lot: Lot, desk: Desk, channel: Channel, *, until_s: float
    ) -> None:
        super().__init__(channel, until_s=until_s)
        self._lot, self._desk, self._left = lot, desk, LINGER_BYTES

    def begin(self) -> None:
        """Look at nothing: what TLS holds is of no interest."""

    def ready(self, events: int) -> None:
        said, skipped = self.channel.skip_raw(self._lot.scratch)
        self._left -= skipped
        if said == ENDED or self._left <= 0:
            self.due()

    def due(self) -> None:
        if self._lot.take(self):
            self._desk.drop(self.channel)

    def hurry(self) -> None:
        self.due()
