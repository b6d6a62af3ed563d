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

from atoll.errors import CorruptError, UsageError
from atoll.exchange.api.routes import RequestHead
from atoll.exchange.base import U8, Frame
from atoll.exchange.calls import AgreedCall
from atoll.wire import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    FrameKind,
    Header,
    header_length,
    pack,
    unpack,
)
from atoll.wire.digests import Bytes, view_of
from atoll.wire.proofs import VOUCHER_BYTES
from atoll.wire.text import FETCH_AGAIN

Read = Callable[[int], Bytes]
"""Returns exactly that many bytes of the body, or raises `Unreachable`."""

MAX_OUTCOMES = 2
"""An island keeps the last two outcomes of each fragment, and brings no more."""


class Incoming:
    """The body of one request or reply."""

    def __init__(
        self, read: Read, total_bytes: int, *, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self._read, self.left_bytes = read, total_bytes
        self._max_body_bytes = max_body_bytes

    @classmethod
    def of(cls, data: Bytes, *, max_body_bytes: int = MAX_BODY_BYTES) -> Incoming:
        """Return a body that is in memory; frames taken from it are views."""
        view, at = view_of(data), 0

        def read(size: int) -> Bytes:
            nonlocal at
            start, at = at, at + size
            return view[start:at]

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

    def rest(self, *, what: str, most: int) -> Bytes:
        """Return all that is left, unless it is above a limit."""
        if self.left_bytes > most:
            raise UsageError(
                f"The {what} has {self.left_bytes} bytes, above the limit of {most}. "
                "docs/http.md states the limits."
            )
        return self.take(self.left_bytes)

    def header(self, *, most: int = MAX_HEADER_BYTES) -> Header:
        """Return the next header; its body, if it comes, is still to be taken.

        `most` is what the header of this fragment can have in bytes.
        """
        prefix = view_of(self.take(PREFIX_BYTES)).tobytes()
        most = min(most, MAX_HEADER_BYTES, PREFIX_BYTES + self.left_bytes)
        limits = {"max_header_bytes": most, "max_body_bytes": self._max_body_bytes}
        length = header_length(prefix, **limits)
        rest = view_of(self.take(length - PREFIX_BYTES))
        return unpack(prefix + rest.tobytes(), **limits)

    def body(self, header: Header) -> U8:
        """Return the body that a header announces; it is not verified here."""
        view = view_of(self.take(header.body_bytes))
        return np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)

    def expect(self, header: Header) -> None:
        """Return if a header's body is all that is left; somebody else reads it.

        Raises:
            CorruptError: the body has fewer bytes, or more.
        """
        self.leave(header)
        self.finish()

    def leave(self, header: Header) -> None:
        """Return if a header's body can follow; somebody else reads it.

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

    def frames(self, *, most: int) -> tuple[Frame, ...]:
        """Return every frame of the body."""
        found: list[Frame] = []
        while self.left_bytes:
            if len(found) == most:
                raise UsageError(f"More than {most} frames come at once. Bring fewer.")
            found.append(self.frame())
        return tuple(found)

    def recovery(self) -> tuple[tuple[Header, ...], Frame]:
        """Return the headers of the last outcomes, and the state they lead to."""
        outcomes, header = self.recovery_headers()
        state = Frame(header, self.body(header))
        self.finish()
        return outcomes, state

    def recovery_headers(
        self, *, most: int = MAX_HEADER_BYTES
    ) -> tuple[tuple[Header, ...], Header]:
        """Return the headers of the last outcomes, and that of the state after them.

        Its body is still to be taken. No header may have more than `most` bytes.
        """
        outcomes: list[Header] = []
        header = self.header(most=most)
        while header.kind is FrameKind.AGREED:
            if len(outcomes) == MAX_OUTCOMES:
                raise UsageError(
                    f"More than {MAX_OUTCOMES} outcomes come before a state. "
                    "Bring the last ones only."
                )
            outcomes.append(header)
            header = self.header(most=most)
        return tuple(outcomes), header

    def finish(self) -> None:
        """Raise CorruptError unless everything was taken."""
        if self.left_bytes:
            raise CorruptError(
                f"{self.left_bytes} bytes follow the end of a body. {FETCH_AGAIN}"
            )


def buffers_of(frame: Frame) -> tuple[Bytes, ...]:
    """Return a frame as it travels, without a copy of its body."""
    if len(frame.body) != frame.header.body_bytes:
        raise UsageError(
            f"a body of {len(frame.body)} bytes is not the one that the "
            f"{frame.header.name} was sealed for, of {frame.header.body_bytes}."
        )
    return (pack(frame.header), view_of(frame.body))


MAX_GATHERED = 4096
"""Islands of one collective."""


def gathered_parts(call: AgreedCall) -> tuple[Bytes, ...]:
    """Return the body of a call, without a copy of the agreed frame's."""
    heads = tuple(pack(each) for each in call.updates)
    if call.agreed is None:
        return heads
    return (*heads, *buffers_of(call.agreed), *call.vouchers)


def read_gathered(asked: RequestHead, body: Incoming) -> AgreedCall:
    """Return the call that such a body makes.

    Raises:
        UsageError: it has too few or too many headers, or they belong elsewhere.
        CorruptError: a header is wrong, or the body is longer than what it holds.
    """
    updates: list[Header] = []
    agreed: Frame | None = None
    vouchers: tuple[bytes, ...] = ()
    while body.left_bytes and agreed is None:
        header = body.header()
        _require_place(asked, header)
        if header.kind is FrameKind.AGREED and updates:
            agreed = Frame(header, body.body(header))
            vouchers = _vouchers(body, len(updates))
        else:
            _require_update(header, len(updates))
            updates.append(header)
    if not updates:
        raise UsageError("No update is brought. Bring the header of at least one.")
    who = asked.island, asked.incarnation
    return AgreedCall(*who, tuple(updates), agreed, vouchers)


def _vouchers(body: Incoming, count: int) -> tuple[bytes, ...]:
    said = view_of(body.take(count * VOUCHER_BYTES)).tobytes()
    starts = range(0, len(said), VOUCHER_BYTES)
    return tuple(said[start : start + VOUCHER_BYTES] for start in starts)


def _require_place(asked: RequestHead, header: Header) -> None:
    here, said = (asked.fragment, asked.round), (header.fragment, header.round)
    if said != here:
        raise UsageError(
            f"The {header.name} does not belong to fragment {here[0]}, round "
            f"{here[1]}, as the path says. Send it to its own path."
        )


def _require_update(header: Header, before: int) -> None:
    if header.kind is not FrameKind.UPDATE:
        raise UsageError(
            f"The {header.name} stands where the header of an update must. "
            "Bring the updates' headers, then the agreed frame."
        )
    if before == MAX_GATHERED:
        raise UsageError(
            f"More than {MAX_GATHERED} updates come together. "
            "Let fewer islands share a collective."
        )
