"""Responses of a handler: raised errors, bodies and deferred responses.

A body is never joined or copied: memory views and ranges of files are sent unchanged. A
handler that cannot answer yet returns a deferred response, which holds no thread.
"""

from __future__ import annotations

import json
import os
import re
import threading
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


BodyPart = memoryview | FilePart
ResponseBody = bytes | Sequence[BodyPart] | FilePart
"""Parts are sent in order; each file is opened when its range is sent."""


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
        """Length of the body with its trailer."""
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


def parts_of(body: ResponseBody) -> Sequence[BodyPart]:
    """Return the parts of a body."""
    if isinstance(body, bytes):
        return [memoryview(body)]
    return [body] if isinstance(body, FilePart) else body


def length_of(body: ResponseBody) -> int:
    """Return the length of a body in bytes."""
    return sum(map(_size_of, parts_of(body)))


def range_of(body: ResponseBody, first: int, size: int) -> list[BodyPart]:
    """Return a range of a body, without copying views or files."""
    selected: list[BodyPart] = []
    start, last = 0, first + size
    for part in parts_of(body):
        part_bytes = _size_of(part)
        low, high = max(first - start, 0), min(last - start, part_bytes)
        if low < high and isinstance(part, FilePart):
            selected.append(replace(part, first=part.first + low, length=high - low))
        elif low < high and isinstance(part, memoryview):
            selected.append(part.cast("B")[low:high])
        start += part_bytes
    return selected


def _size_of(part: BodyPart) -> int:
    return part.length if isinstance(part, FilePart) else part.nbytes


def head_of(response: Response, *, is_last: bool) -> bytes:
    """Return the encoded status line and headers."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    if has_body(response.status):
        headers["content-length"] = str(response.length_bytes)
    if is_last:
        headers["connection"] = "close"
    lines = [f"HTTP/1.1 {response.status} {_phrase(response.status)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def encoded_last(problem: Problem) -> bytes:
    """Return the bytes of a problem after which the connection is closed."""
    response = as_problem(problem)
    assert isinstance(response.body, bytes)
    return head_of(response, is_last=True) + response.body


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
