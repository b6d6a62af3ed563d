"""A body that may come in parts: what came before a connection broke is kept.

Rule 1: a part is gone on with only if the body has an `ETag`: `If-Range` says which
        body the rest must be of, and one that has changed comes whole, from the start.
Rule 2: what comes as the rest must be exactly the rest; whether the whole is what it
        should be is for its reader to verify.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from atoll.errors import CorruptError, Unreachable, UsageError

Into = Callable[[int], memoryview]
Progress = Callable[[int, int], None]
T = TypeVar("T")

RESUMES: Final = 20
"""So often one body goes on; then whoever asked decides."""

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
"""Before it goes on; doubled each time that nothing has come."""


class Fetching:
    """Where the body of a reply goes, and how much of it is there.

    Given to `Caller.call` again after `Unreachable`, only the rest is asked for, if
    that is possible. One belongs to one target, and to one thread at a time.

    Args:
        into: asked, with its length, where a body is to be put; again if it has
            changed, and then nothing of what came before counts.
        progress: told the bytes that are there, and their total.
    """

    def __init__(
        self, into: Into | None = None, progress: Progress | None = None
    ) -> None:
        self._into, self._progress = into or anywhere, progress
        self._view = memoryview(b"")
        self._etag = ""
        self.filled_bytes = 0

    @property
    def can_resume(self) -> bool:
        """Whether a part is here, and the rest of the same body can be asked for."""
        return bool(self._etag) and 0 < self.filled_bytes < len(self._view)

    @property
    def body(self) -> memoryview:
        """The whole body, once it has come."""
        return self._view

    def headers(self) -> dict[str, str]:
        """Return what is asked for, besides the target."""
        if not self.can_resume:
            return {}
        return {"range": f"bytes={self.filled_bytes}-", "if-range": self._etag}

    def rest_of(
        self, status: int, headers: Mapping[str, str], size: int
    ) -> memoryview | None:
        """Return where the rest of the body goes; None if this reply is no rest of it.

        Raises:
            CorruptError: it is another part than was asked for.
        """
        if status != 206 or not self.can_resume:
            return None
        first, total, etag = self.filled_bytes, len(self._view), self._etag
        expected = (f"bytes {first}-{total - 1}/{total}", total - first, etag)
        said = headers.get("content-range"), size, headers.get("etag", etag)
        if said != expected:
            self._etag = ""
            raise CorruptError(
                f"The rest of a body was asked for, {expected[0]} of {etag}, and "
                f"{said[0]} of {said[2]} came, with {size} bytes. Ask for all of it."
            )
        return self._view[first:]

    def begin(self, status: int, headers: Mapping[str, str], size: int) -> memoryview:
        """Return where a body goes from its first byte on.

        Raises:
            UsageError: there is not enough memory for it.
        """
        view = self._into(size).cast("B")[:size]
        if len(view) < size:
            raise UsageError(f"{len(view)} bytes of memory were given for {size}.")
        etag = headers.get("etag", "")
        self._etag = etag if status == 200 and etag.startswith('"') else ""
        self._view, self.filled_bytes = view, 0
        return view

    def came(self, size: int) -> None:
        """Take note that the next bytes are there."""
        self.filled_bytes += size
        if self._progress is not None and size:
            self._progress(self.filled_bytes, len(self._view))


def fetch(
    ask: Callable[[], T], fetching: Fetching, *, pause: Callable[[float], None]
) -> T:
    """Return the reply that `ask` gets into `fetching`, from where it broke each time.

    Raises:
        Unreachable: no part is here, or it broke too often; asking again is safe.
    """
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


def anywhere(size: int) -> memoryview:
    """Return memory for a body that nobody has a place for."""
    return memoryview(bytearray(size))


def at_most(most_bytes: int, what: str) -> Into:
    """Return memory for a body that may not be larger; `what` names it.

    What this returns raises `CorruptError` for one that is, before any of it is taken.
    """

    def into(size: int) -> memoryview:
        if size > most_bytes:
            raise CorruptError(
                f"{size} bytes would be sent of {what}, and at most {most_bytes} are "
                "taken."
            )
        return anywhere(size)

    return into
