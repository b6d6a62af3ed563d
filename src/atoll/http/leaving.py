"""How connections end: lost by the other side, dropped by us, or after a last word."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from atoll.clock import Clock
from atoll.http.channel import Channel
from atoll.http.crew import Crew
from atoll.http.limits import Limits
from atoll.http.lot import Lot
from atoll.http.register import Register
from atoll.http.watches import Lingering

OnClosed = Callable[[object], None]


class Leaving:
    """Ends connections. The exit of every watch."""

    def __init__(
        self,
        *,
        lot: Lot,
        crew: Crew,
        register: Register,
        limits: Limits,
        clock: Clock,
        on_closed: OnClosed,
    ) -> None:
        self._lot, self._crew, self._register = lot, crew, register
        self._limits, self._clock, self._on_closed = limits, clock, on_closed

    def linger(self, channel: Channel) -> None:
        """Close, once the other side has read what was sent or time is up."""
        if channel.is_gone:
            self.lost(channel)
            return
        channel.end_sending()
        until_s = self._clock.now_s() + self._limits.linger_s
        self._lot.park(Lingering(self._lot, self, channel, until_s=until_s))

    def lost(self, channel: Channel) -> None:
        """Close a connection that the other side has closed."""
        self.drop(channel)
        if channel.tag is not None and not channel.is_ended_by_us:
            self.tell(partial(self._on_closed, channel.tag))

    def drop(self, channel: Channel) -> None:
        """Close a connection that we are done with."""
        channel.close()
        self._register.remove(channel)

    def tell(self, callback: Callable[[], None]) -> None:
        self._crew.tell.submit(callback)
