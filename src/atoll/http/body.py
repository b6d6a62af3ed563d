"""A request's body: exactly as many bytes as were declared, read when asked for."""

from __future__ import annotations

from atoll.http.channel import Channel
from atoll.http.pace import Cutoff, Gone, Stalled
from atoll.http.problem import Problem, busy

CONTINUE = memoryview(b"HTTP/1.1 100 Continue\r\n\r\n")


class Body:
    """The bytes that follow a head. Only the thread that runs the handler reads it."""

    def __init__(
        self, channel: Channel, length_bytes: int, *, is_awaited: bool, small_bytes: int
    ) -> None:
        self.length_bytes = length_bytes
        """As declared."""

        self.remaining = length_bytes
        """What was not read yet."""

        self.is_awaited = is_awaited
        """Whether the other side holds it back until we ask for it."""

        self.is_broken = False
        """Whether it failed to arrive: nothing after it can be understood."""

        self.is_bulk = length_bytes > small_bytes or is_awaited
        self._channel = channel
        self._is_begun = False

    def readinto(self, view: memoryview) -> int:
        """Fill `view`, or what of it is left to read, and return how much that was.

        Raises:
            Problem: the body ended early (400), comes too slowly (408), or more
                slowly than others who wait allow (503). Nothing more can be read,
                and the connection will be closed.
        """
        self._begin()
        view = view.cast("B")
        want = min(len(view), self.remaining)
        filled = 0
        while filled < want:
            size = self._next(view[filled:want])
            filled += size
            self.remaining -= size
        return want

    def read(self, limit_bytes: int) -> bytes:
        """Return all that remains.

        Raises:
            Problem: that is more than `limit_bytes` (413), or as in `readinto`.
        """
        if self.remaining > limit_bytes:
            raise Problem(
                413,
                "length",
                f"{self.length_bytes} bytes were declared; {limit_bytes} are allowed.",
            )
        data = bytearray(self.remaining)
        self.readinto(memoryview(data))
        return bytes(data)

    def skip_ahead(self) -> None:
        """Forget what of the body was read ahead of need."""
        skipped = len(self._channel.take_ahead(self.remaining))
        self.remaining -= skipped

    def _begin(self) -> None:
        if self._is_begun or not self.remaining:
            return
        self._is_begun = True
        self._channel.begin_body()
        if self.is_awaited:
            self.is_awaited = False
            try:
                unsent = self._channel.send_some(CONTINUE)
            except Gone as exc:
                raise self._ended(exc) from exc
            if len(unsent):  # earlier answers were not read, and this one would wait
                raise self._ended(Stalled("100 Continue could not be sent"))

    def _next(self, view: memoryview) -> int:
        if self._channel.ahead:
            taken = self._channel.take_ahead(len(view))
            view[: len(taken)] = taken
            return len(taken)
        try:
            size = self._channel.receive(view)
        except (Gone, Stalled) as exc:
            raise self._ended(exc) from exc
        if not size:
            raise self._ended(Gone("the connection was closed"))
        return size

    def _ended(self, exc: Gone | Stalled) -> Problem:
        self.is_broken = True
        arrived = f"{self.length_bytes - self.remaining} of {self.length_bytes} bytes"
        if isinstance(exc, Cutoff):
            return busy(f"After {arrived} the body was ended: {exc}.")
        if isinstance(exc, Stalled):
            return Problem(408, "slow_body", f"After {arrived}, {exc}. Send again.")
        self._channel.is_gone = True
        return Problem(400, "short_body", f"The body ended after {arrived}.")
