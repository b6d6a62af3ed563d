"""Frames inside an HTTP body: read in order, and never beyond its declared end.

The reader of a body gives `Incoming` a function that returns the next bytes: from a
connection, or from memory. A size that a header declares is checked against the rest of
the body before memory is reserved for it.

Islands that have reduced a round among themselves send one body: the headers of their
updates; then, if they have agreed, the agreed frame and a voucher of each of them, in
the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll import wire
from atoll.errors import CorruptError, UsageError
from atoll.exchange.api.request_head import RequestHead
from atoll.exchange.base import U8, Frame
from atoll.exchange.calls import AgreedCall
from atoll.wire.digests import Bytes, view_of
from atoll.wire.frame import VOUCHER_BYTES
from atoll.wire.roster import FETCH_AGAIN

Read = Callable[[int], Bytes]
"""Returns exactly that many bytes of the body, or raises `Unreachable`."""

MAX_OUTCOMES = 2
"""An island keeps, and uploads, at most the last two outcomes of each fragment."""


class Incoming:
    """The body of one request or reply."""

    def __init__(
        self, read: Read, total_bytes: int, *, max_body_bytes: int = wire.MAX_BODY_BYTES
    ) -> None:
        self._read, self.left_bytes = read, total_bytes
        self._max_body_bytes = max_body_bytes

    @classmethod
    def of(cls, data: Bytes, *, max_body_bytes: int = wire.MAX_BODY_BYTES) -> Incoming:
        """Return a body that is in memory; frames taken from it are views."""
        view, end = view_of(data), 0

        def read(size: int) -> Bytes:
            nonlocal end
            start, end = end, end + size
            return view[start:end]

        return cls(read, len(view), max_body_bytes=max_body_bytes)

    def take(self, size_bytes: int) -> Bytes:
        """Return the next bytes.

        Raises:
            CorruptError: the body has fewer.
        """
        if size_bytes > self.left_bytes:
            raise CorruptError(
                f"{self.left_bytes} bytes are left of a body whose next part has "
                f"{size_bytes}. {FETCH_AGAIN}"
            )
        self.left_bytes -= size_bytes
        return self._read(size_bytes)

    def rest(self, *, name: str, max_bytes: int) -> Bytes:
        """Return all remaining bytes, unless they are above a limit."""
        if self.left_bytes > max_bytes:
            raise UsageError(
                f"The {name} has {self.left_bytes} bytes, above the limit of "
                f"{max_bytes}. docs/http.md states the limits."
            )
        return self.take(self.left_bytes)

    def header(self, *, max_bytes: int = wire.MAX_HEADER_BYTES) -> wire.Header:
        """Return the next header; its body, if one follows, is not taken yet.

        `max_bytes` is the most that a header of the fragment can have.
        """
        prefix = view_of(self.take(wire.PREFIX_BYTES)).tobytes()
        limits = {
            "max_header_bytes": min(
                max_bytes, wire.MAX_HEADER_BYTES, wire.PREFIX_BYTES + self.left_bytes
            ),
            "max_body_bytes": self._max_body_bytes,
        }
        length = wire.header_length(prefix, **limits)
        rest = view_of(self.take(length - wire.PREFIX_BYTES))
        return wire.unpack(prefix + rest.tobytes(), **limits)

    def body(self, header: wire.Header) -> U8:
        """Return the body that a header announces; it is not verified here."""
        view = view_of(self.take(header.body_bytes))
        return np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)

    def expect(self, header: wire.Header) -> None:
        """Return if exactly a header's body remains; the caller reads it elsewhere.

        Raises:
            CorruptError: the body has fewer bytes, or more.
        """
        self.leave(header)
        self.finish()

    def leave(self, header: wire.Header) -> None:
        """Return if a header's body can follow; the caller reads it elsewhere.

        Raises:
            CorruptError: the body has fewer bytes.
        """
        if header.body_bytes > self.left_bytes:
            self.take(header.body_bytes)
        self.left_bytes -= header.body_bytes

    def frame(self) -> Frame:
        """Return the next frame."""
        header = self.header()
        return Frame(header, self.body(header))

    def frames(self, *, max_frames: int) -> tuple[Frame, ...]:
        """Return every frame of the body."""
        frames: list[Frame] = []
        while self.left_bytes:
            if len(frames) == max_frames:
                raise UsageError(
                    f"The body has more than {max_frames} frames. Send fewer."
                )
            frames.append(self.frame())
        return tuple(frames)

    def recovery(self) -> tuple[tuple[wire.Header, ...], Frame]:
        """Return the headers of the last outcomes, and the state they lead to."""
        outcomes, header = self.recovery_headers()
        state = Frame(header, self.body(header))
        self.finish()
        return outcomes, state

    def recovery_headers(
        self, *, max_bytes: int = wire.MAX_HEADER_BYTES
    ) -> tuple[tuple[wire.Header, ...], wire.Header]:
        """Return the headers of the last outcomes, and that of the state after them.

        The state's body is not taken yet. No header may have more than `max_bytes`.
        """
        outcomes: list[wire.Header] = []
        header = self.header(max_bytes=max_bytes)
        while header.kind is wire.FrameKind.AGREED:
            if len(outcomes) == MAX_OUTCOMES:
                raise UsageError(
                    f"More than {MAX_OUTCOMES} outcomes precede a state. "
                    "Send the last ones only."
                )
            outcomes.append(header)
            header = self.header(max_bytes=max_bytes)
        return tuple(outcomes), header

    def finish(self) -> None:
        """Raise CorruptError unless all bytes were taken."""
        if self.left_bytes:
            raise CorruptError(
                f"{self.left_bytes} bytes follow the end of a body. {FETCH_AGAIN}"
            )


def buffers_of(frame: Frame) -> tuple[Bytes, ...]:
    """Return the buffers of a frame to send, without a copy of its body."""
    if len(frame.body) != frame.header.body_bytes:
        raise UsageError(
            f"a body of {len(frame.body)} bytes is not the one that the "
            f"{frame.header.name} was sealed for, of {frame.header.body_bytes}."
        )
    return (wire.pack(frame.header), view_of(frame.body))


MAX_GATHERED = 4096
"""The most islands of one collective."""


def gathered_parts(call: AgreedCall) -> tuple[Bytes, ...]:
    """Return the body of a call, without a copy of the agreed frame's."""
    heads = tuple(wire.pack(header) for header in call.updates)
    if call.agreed is None:
        return heads
    return (*heads, *buffers_of(call.agreed), *call.vouchers)


def read_gathered(head: RequestHead, body: Incoming) -> AgreedCall:
    """Return the call of a body that `gathered_parts` has written.

    Raises:
        UsageError: it has too few or too many headers, or those of another round.
        CorruptError: a header is wrong, or the body has extra bytes.
    """
    updates: list[wire.Header] = []
    agreed: Frame | None = None
    vouchers: tuple[bytes, ...] = ()
    while body.left_bytes and agreed is None:
        header = body.header()
        _require_path(head, header)
        if header.kind is wire.FrameKind.AGREED and updates:
            agreed = Frame(header, body.body(header))
            vouchers = _vouchers(body, len(updates))
        else:
            _require_update(header, len(updates))
            updates.append(header)
    if not updates:
        raise UsageError("The body has no update. Send the header of at least one.")
    return AgreedCall(head.island, head.incarnation, tuple(updates), agreed, vouchers)


def _vouchers(body: Incoming, count: int) -> tuple[bytes, ...]:
    data = view_of(body.take(count * VOUCHER_BYTES)).tobytes()
    starts = range(0, len(data), VOUCHER_BYTES)
    return tuple(data[start : start + VOUCHER_BYTES] for start in starts)


def _require_path(head: RequestHead, header: wire.Header) -> None:
    if (header.fragment, header.round) != (head.fragment, head.round):
        raise UsageError(
            f"The {header.name} does not belong to fragment {head.fragment}, round "
            f"{head.round}, which are in the path. Send it to its own path."
        )


def _require_update(header: wire.Header, before: int) -> None:
    if header.kind is not wire.FrameKind.UPDATE:
        raise UsageError(
            f"The {header.name} is in the position of an update's header. "
            "Send the updates' headers, then the agreed frame."
        )
    if before == MAX_GATHERED:
        raise UsageError(
            f"The body has more than {MAX_GATHERED} updates. "
            "Let fewer islands share a collective."
        )
