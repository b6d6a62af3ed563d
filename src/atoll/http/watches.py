"""Why a connection without an answer is parked, and what ends its parking.

Heading     a request is awaited, or its head is coming
Collecting  a small body is coming
Skipping    the unread rest of a body passes by
Lingering   the last response was sent: the other side may still read it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from atoll.http.channel import DATA, ENDED, Channel
from atoll.http.desk import Desk, Exit
from atoll.http.lot import READ, Lot, Watch
from atoll.http.problem import Problem
from atoll.http.request import Request

LINGER_BYTES: Final = 2**22


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


class Passing(Watch):
    """Is dropped when its time is up, or when the listener closes."""

    def __init__(
        self,
        lot: Lot,
        exit: Exit,
        channel: Channel,
        *,
        until_s: float,
        events: int = READ,
    ) -> None:
        super().__init__(channel, until_s=until_s, events=events)
        self._lot, self._exit = lot, exit

    def due(self) -> None:
        if self._lot.take(self):
            self._exit.drop(self.channel)

    def hurry(self) -> None:
        self.due()


class Skipping(Passing):
    """Ends when the rest of a body has passed."""

    def __init__(
        self,
        lot: Lot,
        exit: Exit,
        channel: Channel,
        *,
        until_s: float,
        size: int,
        after: Callable[[], None],
    ) -> None:
        super().__init__(lot, exit, channel, until_s=until_s)
        self._left, self._after = size, after

    def ready(self, events: int) -> None:
        said, skipped = self.channel.skip(self._lot.scratch, self._left)
        self._left -= skipped
        if said == ENDED and self._lot.take(self):
            self._exit.lost(self.channel)
        elif not self._left and self._lot.take(self):
            self._after()


class Lingering(Passing):
    """Ends when the other side closes too: closing first could destroy what we said."""

    def __init__(
        self, lot: Lot, exit: Exit, channel: Channel, *, until_s: float
    ) -> None:
        super().__init__(lot, exit, channel, until_s=until_s)
        self._left = LINGER_BYTES

    def begin(self) -> None:
        """Look at nothing: what TLS holds is of no interest."""

    def ready(self, events: int) -> None:
        said, skipped = self.channel.skip_raw(self._lot.scratch)
        self._left -= skipped
        if said == ENDED or self._left <= 0:
            self.due()
