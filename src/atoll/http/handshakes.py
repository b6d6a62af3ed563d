"""TLS's handshake, which costs no thread while it waits, and why one is refused.

A refusal is told twice: to the caller, whose connection lingers so that the last word
arrives, and to whoever listens for refusals here. A caller that merely goes away is
refused nothing: whatever checks that a port is open does so all day.
"""

from __future__ import annotations

import enum
import ssl
from collections.abc import Callable
from functools import partial
from typing import Protocol

from atoll.http.channel import Channel
from atoll.http.crew import Crew
from atoll.http.desk import Exit
from atoll.http.lot import Lot
from atoll.http.pace import Gone
from atoll.http.problem import Problem
from atoll.http.response import as_problem, head_of
from atoll.http.watches import Passing


class Unfit(enum.Enum):
    """What was wrong with a handshake."""

    NO_CERTIFICATE = "no_certificate"
    WRONG_CERTIFICATE = "wrong_certificate"
    NO_TLS = "no_tls"
    OLD_TLS = "old_tls"
    BAD_TLS = "bad_tls"


OnUnfit = Callable[[str, Unfit], None]
"""Told the IP address of a caller, and why its handshake was refused."""

_NO_TLS = {"HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER"}
_UNFIT = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": Unfit.NO_CERTIFICATE,
    "CERTIFICATE_VERIFY_FAILED": Unfit.WRONG_CERTIFICATE,
    "UNSUPPORTED_PROTOCOL": Unfit.OLD_TLS,
    "VERSION_TOO_LOW": Unfit.OLD_TLS,
} | dict.fromkeys(_NO_TLS, Unfit.NO_TLS)


def unfit(exc: BaseException | None) -> Unfit | None:
    """Return what a failed handshake lacked; None if the caller ended it itself."""
    if not isinstance(exc, ssl.SSLError) or isinstance(exc, ssl.SSLEOFError):
        return None
    reason = exc.reason or ""
    # An alert is what the other side says of us.
    return None if "_ALERT_" in reason else _UNFIT.get(reason, Unfit.BAD_TLS)


class Hall(Exit, Protocol):
    """Where those go whose handshake is over."""

    def welcome(self, channel: Channel) -> None:
        """Await the first request."""

    def linger(self, channel: Channel) -> None:
        """Close, once the other side has read what was sent."""


class Handshakes:
    """Makes handshakes, on the crew's threads whenever something has come."""

    def __init__(self, hall: Hall, *, lot: Lot, crew: Crew, on_unfit: OnUnfit) -> None:
        self._hall, self._lot, self._crew = hall, lot, crew
        self._on_unfit = on_unfit

    def greet(self, channel: Channel, until_s: float) -> None:
        """Go on with a handshake, which must be over at `until_s`."""
        self._crew.small.submit(partial(self._greet, channel, until_s))

    def _greet(self, channel: Channel, until_s: float) -> None:
        try:
            events = channel.handshake()
        except Gone as gone:
            self._failed(channel, unfit(gone.__cause__))
            return
        if not events:
            self._hall.welcome(channel)
            return
        go_on = partial(self.greet, channel, until_s)
        watch = Greeting(
            self._lot, self._hall, channel, until_s=until_s, events=events, go_on=go_on
        )
        self._lot.park(watch)

    def _failed(self, channel: Channel, why: Unfit | None) -> None:
        if why is None:
            self._hall.drop(channel)
            return
        self._hall.tell(partial(self._on_unfit, channel.address[0], why))
        if why is Unfit.NO_TLS:
            channel.send_plainly(_plain_answer())
        self._hall.linger(channel)


class Greeting(Passing):
    """Ends when the other side says something, or takes too long."""

    def __init__(
        self,
        lot: Lot,
        exit: Exit,
        channel: Channel,
        *,
        until_s: float,
        events: int,
        go_on: Callable[[], None],
    ) -> None:
        super().__init__(lot, exit, channel, until_s=until_s, events=events)
        self._go_on = go_on

    def begin(self) -> None:
        """Look at nothing: no byte of TLS was read."""

    def ready(self, events: int) -> None:
        if self._lot.take(self):
            self._go_on()


def _plain_answer() -> bytes:
    """Return what somebody reads who has written http:// in place of https://."""
    said = Problem(400, "no_tls", "This port speaks TLS. Write https:// to it.")
    response = as_problem(said)
    assert isinstance(response.body, bytes)
    return head_of(response, is_last=True, is_chunked=False) + response.body
