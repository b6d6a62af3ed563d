"""Responses of a handler: raised errors, bodies, streams and deferred responses.

A body is never joined or copied: memory views, ranges of files and streams are sent
unchanged. A handler that cannot answer yet returns a deferred response, which holds no
thread; a stream has no known end and is fed from any thread.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final

from atoll.errors import UsageError

RETRY_AFTER_S: Final = 5


class Problem(Exception):
    """Ends a request with `status` and a short JSON body.

    A handler may raise one; a body that does not arrive as declared raises one.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})


def busy(reason: str = "Too many bodies are being transferred.") -> Problem:
    """Return the problem of a body that gets no lane, or loses it."""
    return Problem(
        503,
        "busy",
        f"{reason} Try again in {RETRY_AFTER_S} s.",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


BUFFERED_BYTES: Final = 2**20


class ResponseStream:
    """Feeds one response. A reader that falls `max_buffered_bytes` behind is dropped.

    No thread waits for it: pushed data is buffered, and sent when the socket is
    writable.
    """

    def __init__(self, *, max_buffered_bytes: int = BUFFERED_BYTES) -> None:
        self._max_buffered_bytes = max_buffered_bytes
        self._lock = threading.Lock()
        self._parts: deque[bytes] = deque()
        self._size = 0
        self._is_closed = False
        self._is_gone = False
        self._is_notified = False
        self._on_data: Callable[[], None] | None = None
        self._gone_callbacks: list[Callable[[], None]] = []

    @property
    def is_gone(self) -> bool:
        """Whether the reader has disconnected or was dropped."""
        return self._is_gone

    def push(self, data: bytes) -> bool:
        """Buffer `data` for the reader; return False if there is no reader left."""
        with self._lock:
            if self._is_gone or self._is_closed:
                return False
            self._parts.append(data)
            self._size += len(data)
            is_kept = self._size <= self._max_buffered_bytes
            if not is_kept:
                self._is_gone = True
        self._notify()
        return is_kept

    def close(self) -> None:
        """End the body after the pushed data."""
        with self._lock:
            self._is_closed = True
        self._notify()

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back once when the reader disconnects, is dropped, or has read all."""
        with self._lock:
            if not self._is_gone:
                self._gone_callbacks.append(callback)
                return
        callback()

    # The following methods are for the listener.

    def attach(self, on_data: Callable[[], None]) -> None:
        """Have `on_data` called when there is data to take."""
        with self._lock:
            self._on_data = on_data
        on_data()

    def take(self) -> tuple[bytes, bool]:
        """Return the data pushed since the last call, and whether it has ended."""
        with self._lock:
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            self._is_notified = False
            return data, self._is_closed

    def lose(self) -> list[Callable[[], None]]:
        """Mark the reader as gone; return the callbacks that the caller must run."""
        with self._lock:
            self._is_gone = True
            callbacks, self._gone_callbacks = self._gone_callbacks, []
            self._parts.clear()
        return callbacks

    def _notify(self) -> None:
        with self._lock:
            on_data = None if self._is_notified else self._on_data
            self._is_notified = self._on_data is not None
        if on_data is not None:
            on_data()


JSON = "application/json"
OCTETS = "application/octet-stream"

_NAME = re.compile(r"[A-Za-z0-9-]+")
_VALUE = re.compile(r"[\x20-\x7e\xa0-\xff]*")


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A range of a file; a path is opened when it is sent, a descriptor stays yours."""

    file: str | os.PathLike[str] | int
    first: int = 0
    length: int


@dataclass(frozen=True)
class FileParts:
    """Ranges of files, in order; each file is opened when its range is sent."""

    parts: tuple[FilePart, ...]


ResponseBody = bytes | Sequence[memoryview] | FilePart | FileParts | ResponseStream


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response. It may answer many requests."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: ResponseBody = b""
    """Views are sent without a copy: do not change their memory until `done`."""

    trailer: Callable[[], bytes] | None = None
    """Returns the last bytes of the body, after all others were sent; it may block.

    If it raises, or returns another number of bytes than `trailer_bytes`, the
    connection is closed: the reader sees that the body is too short.
    """

    trailer_bytes: int = 0
    done: Callable[[], None] | None = None
    """Called once per answered request, sent or not: the body is no longer needed."""

    def __post_init__(self) -> None:
        if (self.trailer is None) != (self.trailer_bytes == 0):
            raise UsageError(
                f"trailer_bytes={self.trailer_bytes} must be the length of the "
                "trailer, and 0 without one."
            )
        for name, value in self.headers.items():
            if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
                raise UsageError(f"{name!r}: {value!r} cannot be a header.")

    @property
    def length_bytes(self) -> int:
        """Length of the body with its trailer; 0 for a stream."""
        return length_of(self.body) + self.trailer_bytes

    def is_bulk(self, small_bytes: int) -> bool:
        """Return whether it needs a lane, because sending it may take long."""
        return self.length_bytes > small_bytes or self.trailer is not None


def as_json(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response with `value`."""
    text = json.dumps(value, separators=(",", ":"))
    return Response(
        status=status,
        headers={"content-type": JSON, **(headers or {})},
        body=text.encode(),
    )


def as_problem(problem: Problem) -> Response:
    """Return the response for a problem: JSON with its code and message."""
    document = {"error": problem.code, "message": problem.message}
    return as_json(document, status=problem.status, headers=problem.headers)


def length_of(body: ResponseBody) -> int:
    """Return the length of a body in bytes; 0 for a stream."""
    if isinstance(body, FilePart):
        return body.length
    if isinstance(body, FileParts):
        return sum(part.length for part in body.parts)
    if isinstance(body, ResponseStream):
        return 0
    return len(body) if isinstance(body, bytes) else sum(view.nbytes for view in body)


def range_of(body: ResponseBody, first: int, size: int) -> ResponseBody:
    """Return a range of a body, without copying views or files."""
    if isinstance(body, FilePart):
        return replace(body, first=body.first + first, length=size)
    if isinstance(body, FileParts):
        return _cut_files(body, first, first + size)
    if isinstance(body, bytes):
        return body[first : first + size]
    if isinstance(body, ResponseStream):
        raise UsageError("A stream has no ranges.")
    return _cut_views(body, first, first + size)


def _cut_views(views: Sequence[memoryview], first: int, last: int) -> list[memoryview]:
    selected, start = [], 0
    for view in views:
        flat = view.cast("B")
        low, high = max(first - start, 0), min(last - start, len(flat))
        if low < high:
            selected.append(flat[low:high])
        start += len(flat)
    return selected


def _cut_files(body: FileParts, first: int, last: int) -> FileParts:
    selected, start = [], 0
    for part in body.parts:
        low, high = max(first - start, 0), min(last - start, part.length)
        if low < high:
            selected.append(replace(part, first=part.first + low, length=high - low))
        start += part.length
    return FileParts(tuple(selected))


def head_of(response: Response, *, is_last: bool, is_chunked: bool) -> bytes:
    """Return the encoded status line and headers."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    if is_chunked:
        headers["transfer-encoding"] = "chunked"
    elif not isinstance(response.body, ResponseStream) and has_body(response.status):
        headers["content-length"] = str(response.length_bytes)
    if is_last:
        headers["connection"] = "close"
    lines = [f"HTTP/1.1 {response.status} {_phrase(response.status)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def has_body(status: int) -> bool:
    """Return whether a response with this status has a body, possibly empty."""
    return status not in {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Other"


class DeferredResponse:
    """Returned by a handler that cannot answer yet.

    Exactly one response is sent: the first that is set, or after `wait_s` the result of
    `default`. If the client has disconnected, none is sent.
    """

    def __init__(self, *, wait_s: float, default: Callable[[], Response]) -> None:
        self.wait_s = wait_s
        self.default = default
        self._lock = threading.Lock()
        self._response: Response | None = None
        self._is_settled = False
        self._is_gone = False
        self._deliver: Callable[[Response], None] | None = None
        self._gone_callbacks: list[Callable[[], None]] = []

    @property
    def is_gone(self) -> bool:
        """Whether the client has disconnected meanwhile."""
        return self._is_gone

    def set(self, response: Response) -> bool:
        """Set the response, from any thread; return False if it is too late."""
        with self._lock:
            if self._is_settled:
                return False
            self._is_settled = True
            self._response = response
            deliver = self._deliver
        if deliver is not None:
            deliver(response)
        return True

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back once if the client disconnects before the response."""
        with self._lock:
            if not self._is_gone:
                self._gone_callbacks.append(callback)
                return
        callback()

    # The following methods are for the listener.

    def attach(self, deliver: Callable[[Response], None]) -> None:
        """Have `deliver` called with the response; immediately if it is set already."""
        with self._lock:
            self._deliver = deliver
            response = self._response
        if response is not None:
            deliver(response)

    def expire(self) -> bool:
        """Settle it without a response; return False if one was set before."""
        with self._lock:
            was_settled, self._is_settled = self._is_settled, True
        return not was_settled

    def lose(self) -> list[Callable[[], None]]:
        """Mark the client as gone; return the callbacks that the caller must run."""
        with self._lock:
            self._is_gone = self._is_settled = True
            callbacks, self._gone_callbacks = self._gone_callbacks, []
        return callbacks
