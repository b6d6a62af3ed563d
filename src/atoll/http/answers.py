"""Answers that take their time, while their connection is parked.

Waiting    a handler gave back a Later
Streaming  a response goes on for as long as somebody pushes
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from atoll.http.channel import ENDED, Channel
from atoll.http.desk import Desk, Exit
from atoll.http.later import Later
from atoll.http.lot import READ, SCRATCH_BYTES, WRITE, Lot, Watch
from atoll.http.pace import Gone
from atoll.http.request import Request
from atoll.http.response import Response
from atoll.http.stream import Stream


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
        said = self.channel.fill(self._lot.scratch)
        # Its end must be noticed, so reading goes on; nobody may send much meanwhile.
        is_flood = len(self.channel.ahead) > SCRATCH_BYTES
        if (said == ENDED or is_flood) and self._lot.take(self):
            for callback in self._later.lose():
                self._desk.tell(callback)
            if is_flood:
                self._desk.drop(self.channel)
            else:
                self._desk.lost(self.channel)

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
        exit: Exit,
        channel: Channel,
        stream: Stream,
        *,
        is_chunked: bool,
        after: Callable[[], None],
    ) -> None:
        super().__init__(channel, until_s=math.inf)
        self._lot, self._exit, self._stream = lot, exit, stream
        self._is_chunked, self._after = is_chunked, after
        self._unsent = memoryview(b"")
        self._has_ended = False

    def begin(self) -> None:
        self._stream.attach(partial(self._lot.call, self._pump))
        super().begin()

    def ready(self, events: int) -> None:
        if events & READ and self.channel.fill(self._lot.scratch) == ENDED:
            self._end(partial(self._exit.lost, self.channel))
        elif len(self.channel.ahead) > SCRATCH_BYTES:
            self._end(partial(self._exit.drop, self.channel))
        elif events & WRITE:
            self._pump()

    def due(self) -> None:
        """Go on: a stream has no deadline."""

    def hurry(self) -> None:
        self._end(partial(self._exit.drop, self.channel))

    def _pump(self) -> None:
        if not self._lot.holds(self):
            return
        if self._stream.is_gone:  # too far behind
            self._end(partial(self._exit.drop, self.channel))
            return
        try:
            self._send()
        except Gone:
            self._end(partial(self._exit.lost, self.channel))

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
                self._exit.tell(callback)
            then()
