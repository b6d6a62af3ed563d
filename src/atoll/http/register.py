"""Which connections are open, and what all of them have moved."""

from __future__ import annotations

import threading

from atoll.http.channel import Channel


class Register:
    """Knows every open connection. From any thread."""

    def __init__(self, max_connections: int) -> None:
        self.is_closing = False
        self._max_connections = max_connections
        self._channels: set[Channel] = set()
        self._changed = threading.Condition()
        self._past_in = 0
        self._past_out = 0

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def is_full(self) -> bool:
        return len(self._channels) >= self._max_connections

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """What came in and what went out so far."""
        with self._changed:
            came = self._past_in + sum(each.bytes_in for each in self._channels)
            went = self._past_out + sum(each.bytes_out for each in self._channels)
        return came, went

    def add(self, channel: Channel) -> None:
        with self._changed:
            self._channels.add(channel)

    def remove(self, channel: Channel) -> None:
        """Forget a connection that is closed. Safe to repeat."""
        with self._changed:
            if channel in self._channels:
                self._channels.remove(channel)
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
