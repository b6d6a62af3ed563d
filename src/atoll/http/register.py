"""Open connections, which of them to close when there are too many, and byte counts.

Rule 1: a connection is unverified until a request on it has shown a valid token. Those
        have a small budget, per origin and in all; beyond it the oldest one goes,
        once it has had a moment to show its token.
Rule 2: when there is no room at all, an unverified connection goes; without one, a
        verified connection that has been silent for longer than any island that lives.
        Otherwise the new connection is turned away.
"""

from __future__ import annotations

import threading
from typing import Final

from atoll.http.channel import Channel
from atoll.http.limits import Limits
from atoll.http.shed import Shed

SILENT_S: Final = 30.0
"""Twice a lease: the connection that an island beats on is never silent for so long."""


class Register:
    """Knows every open connection. From any thread."""

    def __init__(self, limits: Limits, *, max_connections: int) -> None:
        self.is_closing = False
        self._limits = limits
        self._max_connections = max_connections
        self._channels: dict[Channel, None] = {}
        self._unverified: dict[str, dict[Channel, None]] = {}
        """By origin, oldest first."""

        self._num_unverified = 0
        self._shed: set[Channel] = set()
        """Not closed yet, and counted as closed."""

        self._changed = threading.Condition()
        self._past_in = 0
        self._past_out = 0

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def num_unverified(self) -> int:
        return self._num_unverified

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """What came in and what went out so far."""
        with self._changed:
            came = self._past_in + sum(each.bytes_in for each in self._channels)
            went = self._past_out + sum(each.bytes_out for each in self._channels)
        return came, went

    def victim(
        self, origin: str, *, is_verified: bool, now_s: float
    ) -> tuple[Channel | None, Shed] | None:
        """Return which connection must go before one of `origin` is added, and why.

        None: there is room. No connection: the new one must go. The connection that
        is returned counts as closed from now on; the caller aborts it.
        """
        with self._changed:
            is_full = len(self._channels) - len(self._shed) >= self._max_connections
            found = None if is_verified else self._over_budget(origin, now_s)
            if found is None and is_full:
                found = self._oldest_of_most() or self._longest_silent(now_s)
            if found is not None:
                why = Shed.IDLE if found.is_verified else Shed.NO_TOKEN
                self._remove_unverified(found)
                self._shed.add(found)
                return found, why
            return (None, Shed.FULL) if is_full else None

    def add(self, channel: Channel) -> None:
        with self._changed:
            self._channels[channel] = None
            if not channel.is_verified:
                self._unverified.setdefault(channel.origin, {})[channel] = None
                self._num_unverified += 1

    def verified(self, channel: Channel) -> None:
        """Take a connection out of the budget of unverified ones. Safe to repeat."""
        with self._changed:
            self._remove_unverified(channel)

    def remove(self, channel: Channel) -> None:
        """Forget a connection that is closed. Safe to repeat."""
        with self._changed:
            if channel in self._channels:
                del self._channels[channel]
                self._remove_unverified(channel)
                self._shed.discard(channel)
                self._past_in += channel.bytes_in
                self._past_out += channel.bytes_out
                self._changed.notify_all()

    def wait_until_empty(self, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._channels, wait_s)

    def abort(self) -> None:
        """Wake every thread that waits for a connection: all are over."""
        with self._changed:
            for channel in self._channels:
                channel.abort()

    def close(self) -> None:
        """Close whatever is still open."""
        with self._changed:
            left = list(self._channels)
        for channel in left:
            channel.close()
            self.remove(channel)

    def _over_budget(self, origin: str, now_s: float) -> Channel | None:
        if self._num_unverified >= max(1, self._max_connections // 2):
            return self._oldest_of_most()  # descriptors are scarce
        limits, found = self._limits, None
        of_origin = self._unverified.get(origin, {})
        if len(of_origin) >= limits.max_unverified_per_origin:
            found = next(iter(of_origin))
        elif self._num_unverified >= limits.max_unverified:
            found = self._oldest_of_most()
        if found is None or now_s - found.opened_s < limits.unverified_grace_s:
            return None
        return found

    def _oldest_of_most(self) -> Channel | None:
        """Return the oldest unverified one of the origin that has the most of them."""
        if not self._unverified:
            return None
        most = max(self._unverified, key=lambda origin: len(self._unverified[origin]))
        return next(iter(self._unverified[most]))

    def _longest_silent(self, now_s: float) -> Channel | None:
        open_ = (each for each in self._channels if each not in self._shed)
        found = min(open_, key=lambda each: each.silent_since_s, default=None)
        if found is None or now_s - found.silent_since_s < SILENT_S:
            return None
        return found

    def _remove_unverified(self, channel: Channel) -> None:
        of_origin = self._unverified.get(channel.origin, {})
        if channel in of_origin:
            del of_origin[channel]
            self._num_unverified -= 1
            if not of_origin:
                del self._unverified[channel.origin]
