"""What a handler gives back: a status, headers, and a body that is never joined."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from atoll.errors import UsageError
from atoll.http.problem import Problem
from atoll.http.stream import Stream

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
    """Ranges of files, one after the other; each is opened when its turn comes."""

    parts: tuple[FilePart, ...]


Body = bytes | Sequence[memoryview] | FilePart | FileParts | Stream


@dataclass(frozen=True, kw_only=True)
class Response:
    """An answer. It may be given to many requests."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = b""
    """Views are sent as they are: leave their memory alone until `done`."""

    trailer: Callable[[], bytes] | None = None
    """Makes the last bytes of the body, after all others were sent; it may wait.

    If it raises, or gives another number of bytes than `trailer_bytes`, the connection
    is closed: the other side has a body that is too short, and knows it.
    """

    trailer_bytes: int = 0
    done: Callable[[], None] | None = None
    """Called once for each request it answers, sent or not: the body is not needed."""

    def __post_init__(self) -> None:
        if (self.trailer is None) != (self.trailer_bytes == 0):
            raise UsageError(
                f"trailer_bytes={self.trailer_bytes} must say how long the trailer is."
            )
        for name, value in self.headers.items():
            if not (_NAME.fullmatch(name) and _VALUE.fullmatch(value)):
                raise UsageError(f"{name!r}: {value!r} cannot be a header.")

    @property
    def length_bytes(self) -> int:
        """What the body has, with its trailer; a stream has no length."""
        return length_of(self.body) + self.trailer_bytes

    def is_bulk(self, small_bytes: int) -> bool:
        """Return whether sending it may take long, and so needs a lane."""
        return self.length_bytes > small_bytes or self.trailer is not None


def as_json(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `value` as an answer in JSON."""
    text = json.dumps(value, separators=(",", ":"))
    return Response(
        status=status,
        headers={"content-type": JSON, **(headers or {})},
        body=text.encode(),
    )


def as_problem(problem: Problem) -> Response:
    """Return what is told about a problem: its code and its one sentence."""
    said = {"error": problem.code, "message": problem.message}
    return as_json(said, status=problem.status, headers=problem.headers)


def length_of(body: Body) -> int:
    """Return how many bytes a body has; none for a stream."""
    if isinstance(body, FilePart):
        return body.length
    if isinstance(body, FileParts):
        return sum(part.length for part in body.parts)
    if isinstance(body, Stream):
        return 0
    return len(body) if isinstance(body, bytes) else sum(view.nbytes for view in body)


def cut(body: Body, first: int, size: int) -> Body:
    """Return a range of a body, without copying views or files."""
    if isinstance(body, FilePart):
        return replace(body, first=body.first + first, length=size)
    if isinstance(body, FileParts):
        return _cut_files(body, first, first + size)
    if isinstance(body, bytes):
        return body[first : first + size]
    if isinstance(body, Stream):
        raise UsageError("A stream has no ranges.")
    return _cut_views(body, first, first + size)


def _cut_views(views: Sequence[memoryview], first: int, last: int) -> list[memoryview]:
    kept, start = [], 0
    for view in views:
        flat = view.cast("B")
        low, high = max(first - start, 0), min(last - start, len(flat))
        if low < high:
            kept.append(flat[low:high])
        start += len(flat)
    return kept


def _cut_files(body: FileParts, first: int, last: int) -> FileParts:
    kept, start = [], 0
    for part in body.parts:
        low, high = max(first - start, 0), min(last - start, part.length)
        if low < high:
            kept.append(replace(part, first=part.first + low, length=high - low))
        start += part.length
    return FileParts(tuple(kept))


def head_of(response: Response, *, is_last: bool, is_chunked: bool) -> bytes:
    """Return the status line and headers, as they are sent."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    if is_chunked:
        headers["transfer-encoding"] = "chunked"
    elif not isinstance(response.body, Stream) and has_body(response.status):
        headers["content-length"] = str(response.length_bytes)
    if is_last:
        headers["connection"] = "close"
    lines = [f"HTTP/1.1 {response.status} {_phrase(response.status)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def has_body(status: int) -> bool:
    """Return whether an answer with this status has a body, be it an empty one."""
    return status not in {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Other"
