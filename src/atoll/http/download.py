"""A download that resumes: the part that arrived before a connection broke is kept.

Rule 1: a download resumes only if the body has an `ETag`: `If-Range` names the body
        that the rest must belong to, and a changed body is sent whole, from the start.
Rule 2: the rest must be exactly the missing bytes; the reader verifies the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from atoll.errors import CorruptError, Unreachable, UsageError

BodyBuffer = Callable[[int], memoryview]
Progress = Callable[[int, int], None]
T = TypeVar("T")

RESUMES: Final = 20
"""How often one body is resumed; then the caller decides."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
"""Bounds of the pause before a resume; doubled after each attempt without progress."""


class Download:
    """The memory for the body of a reply, and how much of it has arrived.

    Pass it to `HttpClient.call` again after `Unreachable`, and only the rest is
    requested, if possible. It belongs to one target, and to one thread at a time.

    Args:
        into: called with the length of a body, returns the memory for it; called
            again if the body has changed, and then the bytes so far do not count.
        progress: called with the bytes that have arrived, and their total.
    """

    def __init__(
        self, into: BodyBuffer | None = None, progress: Progress | None = None
    ) -> None:
        self._into, self._progress = into or new_buffer, progress
        self._view = memoryview(b"")
        self._etag = ""
        self.filled_bytes = 0

    @property
    def can_resume(self) -> bool:
        """Whether a part has arrived and the rest of the same body can be requested."""
        return bool(self._etag) and 0 < self.filled_bytes < len(self._view)

    @property
    def body(self) -> memoryview:
        """The whole body, once it has arrived."""
        return self._view

    def headers(self) -> dict[str, str]:
        """Return the headers that request the rest of the body."""
        if not self.can_resume:
            return {}
        return {"range": f"bytes={self.filled_bytes}-", "if-range": self._etag}

    def rest_of(
        self, status: int, headers: Mapping[str, str], size: int
    ) -> memoryview | None:
        """Return memory for the rest of the body; None if the reply is not the rest.

        Raises:
            CorruptError: the reply has another range than the requested one.
        """
        if status != 206 or not self.can_resume:
            return None
        first, total, etag = self.filled_bytes, len(self._view), self._etag
        expected = (f"bytes {first}-{total - 1}/{total}", total - first, etag)
        received = headers.get("content-range"), size, headers.get("etag", etag)
        if received != expected:
            self._etag = ""
            raise CorruptError(
                f"The rest of a body was requested, {expected[0]} of {etag}, and "
                f"{received[0]} of {received[2]} came, with {size} "
                "bytes. Ask for all of it."
            )
        return self._view[first:]

    def begin(self, status: int, headers: Mapping[str, str], size: int) -> memoryview:
        """Return the memory for a body that is sent from its first byte.

        Raises:
            UsageError: `into` returned too little memory.
        """
        view = self._into(size).cast("B")[:size]
        if len(view) < size:
            raise UsageError(f"{len(view)} bytes of memory were given for {size}.")
        etag = headers.get("etag", "")
        self._etag = etag if status == 200 and etag.startswith('"') else ""
        self._view, self.filled_bytes = view, 0
        return view

    def advance(self, size: int) -> None:
        """Count bytes that have arrived."""
        self.filled_bytes += size
        if self._progress is not None and size:
            self._progress(self.filled_bytes, len(self._view))


def download(
    ask: Callable[[], T], fetching: Download, *, pause: Callable[[float], None]
) -> T:
    """Call `ask` until `fetching` is complete, and return the last reply.

    Raises:
        Unreachable: no part has arrived, or it broke too often; a repetition is safe.
    """
    # The third of four nested retries: see `CoordinatorExchange._ask`.
    pause_s = FIRST_PAUSE_S
    for _ in range(RESUMES):
        before = fetching.filled_bytes
        try:
            return ask()
        except Unreachable:
            if not fetching.can_resume:
                raise
            has_moved = fetching.filled_bytes != before
            pause_s = FIRST_PAUSE_S if has_moved else min(2 * pause_s, LONGEST_PAUSE_S)
            pause(pause_s)
    return ask()


def new_buffer(size: int) -> memoryview:
    """Return new memory for a body."""
    return memoryview(bytearray(size))


def at_most(max_bytes: int, name: str) -> BodyBuffer:
    """Return a function that allocates memory for a body of at most `max_bytes`.

    For a larger body it raises `CorruptError`, before any of it is received; `name`
    names the body in the error.
    """

    def into(size: int) -> memoryview:
        if size > max_bytes:
            raise CorruptError(
                f"{size} bytes would be sent of {name}, and at most {max_bytes} are "
                "taken."
            )
        return new_buffer(size)

    return into
