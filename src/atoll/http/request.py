"""A request as a handler sees it: the parsed head, and a body that is read on demand.

Rule 1: a malformed target is refused, never repaired.
Rule 2: a body has exactly the declared number of bytes, and is read when the handler
        asks for it.
Rule 3: a download resumes by one `Range: bytes=a-b`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

import h11

from atoll.http.connection import (
    Connection,
    ConnectionClosed,
    ListenerLimits,
    TransferPreempted,
    TransferStalled,
)
from atoll.http.response import (
    OCTETS,
    Problem,
    Response,
    ResponseBody,
    busy,
    length_of,
    range_of,
)

_VISIBLE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One request. Names of headers are in lower case."""

    method: str
    target: str
    """Path and query, still encoded."""

    segments: tuple[str, ...]
    """Segments of the path, decoded; none is `.` or `..`."""

    query: Mapping[str, str]
    headers: Mapping[str, str]
    address: tuple[str, int]
    """Host and port of the client."""

    certificate: bytes | None
    """The client's certificate in DER, verified by the TLS context, or None."""

    body: RequestBody
    connection: Connection
    """Set its `tag`, and `on_closed(tag)` is called when the client disconnects."""

    is_last: bool
    """Whether the client wants the connection closed afterwards."""

    @property
    def path(self) -> str:
        return "/" + "/".join(self.segments)

    @property
    def is_bulk(self) -> bool:
        """Whether the body needs a lane: it is large, or awaits `100 Continue`."""
        return self.body.is_bulk


def read_request(connection: Connection, limits: ListenerLimits) -> Request:
    """Return the request whose head was read ahead.

    Bytes after the head stay read ahead.

    Raises:
        Problem: the request is malformed or too large. Close the connection.
    """
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.max_head_bytes)
    parser.receive_data(bytes(connection.ahead))
    try:
        event = parser.next_event()
    except h11.RemoteProtocolError as exc:
        raise _refused(exc) from None
    if not isinstance(event, h11.Request):
        raise Problem(400, "head", "The head has no end.")
    if event.http_version not in {b"1.0", b"1.1"}:
        raise Problem(400, "head", "Only HTTP/1.1 is spoken here.")
    # h11 bounds only heads that are not complete yet.
    rest, _ = parser.trailing_data
    if len(connection.ahead) - len(rest) > limits.max_head_bytes:
        raise Problem(431, "head", f"The head exceeds {limits.max_head_bytes} bytes.")
    connection.replace_ahead(rest)
    return _request(event, connection, limits)


def _request(
    event: h11.Request, connection: Connection, limits: ListenerLimits
) -> Request:
    headers = _headers(event)
    segments, query = parse_target(
        event.target.decode("latin-1"), max_path_bytes=limits.max_path_bytes
    )
    tokens = {
        token.strip().lower() for token in headers.get("connection", "").split(",")
    }
    return Request(
        method=event.method.decode("ascii"),
        target=event.target.decode("latin-1"),
        segments=segments,
        query=query,
        headers=headers,
        address=connection.address,
        certificate=connection.certificate,
        body=_body(headers, connection, limits),
        connection=connection,
        is_last=event.http_version < b"1.1" or "close" in tokens,
    )


def _body(
    headers: Mapping[str, str], connection: Connection, limits: ListenerLimits
) -> RequestBody:
    if "transfer-encoding" in headers:
        raise Problem(411, "length", "Chunks are not taken: declare a Content-Length.")
    expectation = headers.get("expect", "").lower()
    if expectation not in {"", "100-continue"}:
        raise Problem(417, "expect", f"The expectation {expectation!r} is unknown.")
    size = int(headers.get("content-length", "0"))
    if size > limits.max_body_bytes:
        raise Problem(
            413,
            "length",
            f"{size} bytes were declared; {limits.max_body_bytes} are allowed.",
        )
    return RequestBody(
        connection,
        size,
        is_awaited=bool(expectation) and size > 0,
        small_bytes=limits.small_bytes,
    )


def _headers(event: h11.Request) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        if not _VISIBLE.fullmatch(value):
            raise Problem(400, "header", f"The header {name!r} holds a control byte.")
        if name in {"authorization", "range", "expect"} and name in headers:
            raise Problem(400, "header", f"The header {name!r} is given twice.")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _refused(exc: h11.RemoteProtocolError) -> Problem:
    """Return the problem for bytes that are not a request: the client's fault."""
    if exc.error_status_hint == 501:
        return Problem(411, "length", "Declare a Content-Length and no encoding.")
    return Problem(exc.error_status_hint, "head", f"This is not HTTP/1.1: {exc}.")


MAX_SEGMENT_BYTES: Final = 255
MAX_QUERY_KEYS: Final = 32

_ESCAPES = re.compile(r"%(?![0-9A-Fa-f]{2})")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\]")


def parse_target(
    target: str, *, max_path_bytes: int
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the decoded segments of the path and the query.

    Raises:
        Problem: a segment is empty, `.` or `..`, holds a slash, a backslash or a
            control character, encoded or not, is too long or not UTF-8; a key of the
            query is given twice.
    """
    path, _, query = target.partition("?")
    if len(target) > max_path_bytes:
        raise Problem(
            414,
            "path",
            f"The target has {len(target)} bytes; {max_path_bytes} are allowed.",
        )
    if not path.startswith("/"):
        raise Problem(400, "path", "The target must be a path that starts with '/'.")
    raw = [] if path == "/" else path[1:].split("/")
    return tuple(_segment(segment) for segment in raw), dict(_pairs(query))


def _segment(raw: str) -> str:
    text = _decode(raw)
    if text in {"", ".", ".."} or _UNSAFE.search(text):
        raise Problem(400, "path", f"The path holds the segment {text!r}.")
    if len(text.encode()) > MAX_SEGMENT_BYTES:
        raise Problem(
            400, "path", f"A segment of the path is longer than {MAX_SEGMENT_BYTES}."
        )
    return text


def _pairs(query: str) -> Mapping[str, str]:
    values: dict[str, str] = {}
    for pair in query.split("&") if query else ():
        key, _, value = (_decode(part.replace("+", " ")) for part in _parted(pair))
        if key in values or len(values) >= MAX_QUERY_KEYS:
            raise Problem(400, "query", f"The query holds {key!r} twice, or too much.")
        values[key] = value
    return values


def _parted(pair: str) -> tuple[str, str, str]:
    return pair.partition("=")


def _decode(raw: str) -> str:
    if _ESCAPES.search(raw):
        raise Problem(400, "escape", "A '%' is not followed by two hex digits.")
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise Problem(400, "escape", "The target is not UTF-8.") from None


CONTINUE = memoryview(b"HTTP/1.1 100 Continue\r\n\r\n")


class RequestBody:
    """The bytes that follow a head. Only the thread that runs the handler reads it."""

    def __init__(
        self,
        connection: Connection,
        length_bytes: int,
        *,
        is_awaited: bool,
        small_bytes: int,
    ) -> None:
        self.length_bytes = length_bytes
        """The declared length."""

        self.remaining = length_bytes
        """Bytes not read yet."""

        self.is_awaited = is_awaited
        """Whether the client waits for `100 Continue` before it sends the body."""

        self.is_broken = False
        """Whether it failed to arrive: the bytes after it cannot be parsed."""

        self.is_bulk = length_bytes > small_bytes or is_awaited
        self._connection = connection
        self._is_begun = False

    def readinto(self, view: memoryview) -> int:
        """Read into `view` until it is full or the body ends; return the bytes read.

        Raises:
            Problem: the body ended early (400), arrives too slowly (408), or too
                slowly while other bodies wait for its lane (503). Nothing more can be
                read, and the connection will be closed.
        """
        self._begin()
        view = view.cast("B")
        want = min(len(view), self.remaining)
        filled = 0
        while filled < want:
            size = self._next(view[filled:want])
            filled += size
            self.remaining -= size
        return want

    def read(self, limit_bytes: int) -> bytes:
        """Return all that remains.

        Raises:
            Problem: more than `limit_bytes` remain (413), or as in `readinto`.
        """
        if self.remaining > limit_bytes:
            raise Problem(
                413,
                "length",
                f"{self.length_bytes} bytes were declared; {limit_bytes} are allowed.",
            )
        data = bytearray(self.remaining)
        self.readinto(memoryview(data))
        return bytes(data)

    def skip_ahead(self) -> None:
        """Discard the part of the body that was read ahead."""
        skipped = len(self._connection.take_ahead(self.remaining))
        self.remaining -= skipped

    def _begin(self) -> None:
        if self._is_begun or not self.remaining:
            return
        self._is_begun = True
        self._connection.begin_body()
        if self.is_awaited:
            self.is_awaited = False
            try:
                unsent = self._connection.send_some(CONTINUE)
            except ConnectionClosed as exc:
                raise self._ended(exc) from exc
            if len(unsent):  # the client does not read, and sending would block
                raise self._ended(TransferStalled("100 Continue could not be sent"))

    def _next(self, view: memoryview) -> int:
        if self._connection.ahead:
            data = self._connection.take_ahead(len(view))
            view[: len(data)] = data
            return len(data)
        try:
            size = self._connection.receive(view)
        except (ConnectionClosed, TransferStalled) as exc:
            raise self._ended(exc) from exc
        if not size:
            raise self._ended(ConnectionClosed("the connection was closed"))
        return size

    def _ended(self, exc: ConnectionClosed | TransferStalled) -> Problem:
        self.is_broken = True
        arrived = f"{self.length_bytes - self.remaining} of {self.length_bytes} bytes"
        if isinstance(exc, TransferPreempted):
            return busy(f"After {arrived} the body was ended: {exc}.")
        if isinstance(exc, TransferStalled):
            return Problem(408, "slow_body", f"After {arrived}, {exc}. Send again.")
        self._connection.is_gone = True
        return Problem(400, "short_body", f"The body ended after {arrived}.")


_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def ranged(
    request: Request,
    body: ResponseBody,
    *,
    etag: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return 206 with the requested range, 416 if it is empty, else 200 with the body.

    A header that is not one range of bytes is ignored, as the standard allows; so is a
    range of another version of the body, by `If-Range` and `etag`.
    """
    total = length_of(body)
    extra = {name.lower(): value for name, value in (headers or {}).items()}
    response_headers = {"content-type": OCTETS, "accept-ranges": "bytes", **extra}
    if etag is not None:
        response_headers["etag"] = f'"{etag}"'
    wanted = _wanted(request, response_headers.get("etag"))
    if wanted is None:
        return Response(headers=response_headers, body=body)
    first, last = _resolved(wanted, total)
    if first >= last:
        return Response(status=416, headers={"content-range": f"bytes */{total}"})
    response_headers["content-range"] = f"bytes {first}-{last - 1}/{total}"
    return Response(
        status=206, headers=response_headers, body=range_of(body, first, last - first)
    )


def _wanted(request: Request, etag: str | None) -> tuple[str, str] | None:
    match = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if match is None or request.method != "GET":
        return None
    if request.headers.get("if-range", etag) != etag:
        return None
    first, last = match.groups()
    is_backwards = first and last and int(first) > int(last)
    return None if is_backwards or not (first or last) else (first, last)


def _resolved(wanted: tuple[str, str], total: int) -> tuple[int, int]:
    """Return the first byte and the end of the range; it may be empty."""
    first, last = wanted
    if not first:
        return max(0, total - int(last)), total
    end = min(int(last) + 1, total) if last else total
    return int(first), end
