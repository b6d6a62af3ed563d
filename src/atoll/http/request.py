"""A request as a handler sees it: judged by its head, its body still on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import h11

from atoll.http.body import Body
from atoll.http.channel import Channel
from atoll.http.limits import Limits
from atoll.http.problem import Problem
from atoll.http.target import parse

_VISIBLE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What was asked. Names of headers are in lower case."""

    method: str
    target: str
    """Path and query, as they came."""

    segments: tuple[str, ...]
    """Of the path, decoded; none of them leads elsewhere."""

    query: Mapping[str, str]
    headers: Mapping[str, str]
    address: tuple[str, int]
    """Host and port of who asks."""

    certificate: bytes | None
    """What who asks has shown, in DER; verified by the TLS context, or None."""

    body: Body
    connection: Channel
    """Give it a `tag`, and `on_closed(tag)` is called when the other side goes."""

    is_last: bool
    """Whether who asks wants the connection closed afterwards."""

    is_old: bool
    """Whether it is HTTP/1.0, which knows no chunks."""

    @property
    def path(self) -> str:
        return "/" + "/".join(self.segments)

    @property
    def is_bulk(self) -> bool:
        """Whether the body needs a lane: it is large, or waits to be asked for."""
        return self.body.is_bulk


def read_request(channel: Channel, limits: Limits) -> Request:
    """Return the request whose head was read ahead.

    What follows the head stays read ahead.

    Raises:
        Problem: it is not a request we take. The connection is of no further use.
    """
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.max_head_bytes)
    parser.receive_data(bytes(channel.ahead))
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
    if len(channel.ahead) - len(rest) > limits.max_head_bytes:
        raise Problem(431, "head", f"The head exceeds {limits.max_head_bytes} bytes.")
    channel.replace_ahead(rest)
    return _request(event, channel, limits)


def _request(event: h11.Request, channel: Channel, limits: Limits) -> Request:
    headers = _headers(event)
    segments, query = parse(
        event.target.decode("latin-1"), max_path_bytes=limits.max_path_bytes
    )
    tokens = {each.strip().lower() for each in headers.get("connection", "").split(",")}
    is_old = event.http_version < b"1.1"
    return Request(
        method=event.method.decode("ascii"),
        target=event.target.decode("latin-1"),
        segments=segments,
        query=query,
        headers=headers,
        address=channel.address,
        certificate=channel.certificate,
        body=_body(headers, channel, limits),
        connection=channel,
        is_last=is_old or "close" in tokens,
        is_old=is_old,
    )


def _body(headers: Mapping[str, str], channel: Channel, limits: Limits) -> Body:
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
    return Body(
        channel,
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
    """Return the answer to bytes that are no request: never a fault of ours."""
    if exc.error_status_hint == 501:
        return Problem(411, "length", "Declare a Content-Length and no encoding.")
    return Problem(exc.error_status_hint, "head", f"This is not HTTP/1.1: {exc}.")
