"""A TCP link in userspace: rate, delay, jitter and cuts between two real programs.

It needs no privilege and no kernel module. Pieces of a stream are held until they are
due, so what a link slows down it slows down in real time. It is no model of TCP: its
streams begin at full speed, and nothing is lost unless a method here says so.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from atoll.clock import Clock, SystemClock
from atoll.errors import UsageError
from atoll.testing.link_flow import Flow, Piece, Way
from atoll.testing.link_pace import Line, in_flight_bytes, piece_bytes
from atoll.testing.link_relay import Relay

Direction = Literal["up", "down"]
"""Up is from who connects to the target, down is back."""

Rate = float | None
"""Bytes per second; None for as fast as it goes."""


class Link:
    """Carries TCP connections from a port of this machine to `target`.

    All connections share one line in each direction, as they would share a cable.
    Faults begin and end when their method returns.

    Args:
        rate_bytes_per_s: of each direction, or a pair: up, down.
        delay_s: one way. Opening a connection to the link itself takes no time.
        jitter_s: at most so much is added to the delay of a piece of a stream, drawn
            from `seed`. Nothing overtakes anything.
        buffer_bytes: how much may wait to enter the line. A stream has at most this
            and what its line holds (rate times delay) on the way: then its sender has
            to wait. Unless given 256 KB, or 25 ms at rates where that is more.

    Raises:
        UsageError: a value is out of range.
        OSError: the target's name is not known.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        rate_bytes_per_s: Rate | tuple[Rate, Rate] = None,
        delay_s: float = 0.0,
        jitter_s: float = 0.0,
        seed: int = 0,
        buffer_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        rates = rate_bytes_per_s
        pair = rates if isinstance(rates, tuple) else (rates, rates)
        _check(pair, delay_s=delay_s, jitter_s=jitter_s, buffer_bytes=buffer_bytes)
        up, down = (
            _way(
                rate,
                delay_s=delay_s,
                jitter_s=jitter_s,
                seed=2 * seed + number,
                buffer_bytes=buffer_bytes,
            )
            for number, rate in enumerate(pair)
        )
        self._relay = Relay(target, up=up, down=down, clock=clock or SystemClock())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Reset every connection and stop listening. Safe to repeat."""
        self._relay.close()

    @property
    def address(self) -> tuple[str, int]:
        """Where to connect to instead of the target."""
        return self._relay.address

    @property
    def bytes_up(self) -> int:
        """Delivered to the target since the link was made."""
        return self._relay.up.num_bytes

    @property
    def bytes_down(self) -> int:
        """Delivered to those who connected since the link was made."""
        return self._relay.down.num_bytes

    @property
    def bytes_lost(self) -> int:
        """Sent by the target and swallowed by `lose_replies`."""
        return self._relay.down.num_lost_bytes

    def wait_carried(
        self, num_bytes: int, *, direction: Direction = "up", timeout_s: float = 30.0
    ) -> bool:
        """Wait until so many bytes were delivered since the link was made.

        Returns:
            Whether they were. What `lose_replies` swallows counts as delivered.
        """
        way = self._way(direction)
        with self._relay.progress:
            return self._relay.progress.wait_for(
                lambda: way.num_bytes + way.num_lost_bytes >= num_bytes, timeout_s
            )

    def cut(self) -> None:
        """Carry nothing more, and tell nobody: a partition.

        Streams stand still, with what is on the line, and nobody hears of an end. Who
        connects is kept waiting: the kernel says connected, but nobody is there. What
        is given up before the line is mended never reaches the target.
        """
        self._relay.do(self._relay.cut)

    def mend(self) -> None:
        """Carry everything again: the end of `cut`, `lose_replies`, `close_after`.

        Streams go on where they stood. Those with lost replies cannot, and are reset.
        """
        self._relay.do(self._relay.mend)

    def reset(self) -> None:
        """Break every connection, with a reset to both sides; new ones are carried."""
        self._relay.do(self._relay.reset)

    def close_after(self, num_bytes: int, *, direction: Direction = "up") -> None:
        """Break the first connection to carry so many bytes from now on, once.

        Its receiver gets exactly these bytes and then the end of the stream, its sender
        a reset. So `close_after(1000)` shortens an upload, and
        `close_after(0, direction="down")` loses a reply and its connection.
        """
        if num_bytes < 0:
            raise UsageError(f"close_after({num_bytes}) must be at least 0.")
        way = self._way(direction)
        self._relay.do(lambda: self._relay.close_after(num_bytes, way))

    def lose_replies(self) -> None:
        """Swallow what the target sends, the ends of its streams included.

        The target believes it has answered, and who asked waits.
        """

        def lose() -> None:
            self._relay.down.is_losing = True

        self._relay.do(lose)

    def _way(self, direction: Direction) -> Way:
        if direction not in ("up", "down"):
            raise UsageError(f'direction="{direction}" must be "up" or "down".')
        return self._relay.up if direction == "up" else self._relay.down


def _way(
    rate: Rate,
    *,
    delay_s: float,
    jitter_s: float,
    seed: int,
    buffer_bytes: int | None,
) -> Way:
    if buffer_bytes is None:
        # Deep enough that a thread which is not scheduled for a while loses no time.
        buffer_bytes = max(2**18, in_flight_bytes(rate, 0.025) if rate else 0)
    line: Line[tuple[Flow, Piece]] = Line(
        rate_bytes_per_s=rate,
        delay_s=delay_s,
        jitter_s=jitter_s,
        queue_bytes=buffer_bytes,
        seed=seed,
    )
    window_bytes = in_flight_bytes(rate, delay_s + jitter_s) + buffer_bytes
    return Way(line, piece_bytes=piece_bytes(rate), window_bytes=window_bytes)


def _check(
    rates: tuple[Rate, ...],
    *,
    delay_s: float,
    jitter_s: float,
    buffer_bytes: int | None,
) -> None:
    for rate in rates:
        if rate is not None and not 0 < rate < math.inf:
            raise UsageError(
                f"rate_bytes_per_s={rate} must be positive and finite. "
                "Leave it out for a line that is as fast as it goes."
            )
    for name, value in (("delay_s", delay_s), ("jitter_s", jitter_s)):
        if not 0 <= value < math.inf:
            raise UsageError(f"{name}={value} must be finite and at least 0.")
    if buffer_bytes is not None and buffer_bytes < 1:
        raise UsageError(f"buffer_bytes={buffer_bytes} must be at least 1.")
