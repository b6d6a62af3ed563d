"""Puts a response on a channel: its head, its body without joining, its trailer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from atoll.http.channel import Channel, Cut
from atoll.http.request import Request
from atoll.http.response import (
    Body,
    FilePart,
    FileParts,
    Response,
    has_body,
    head_of,
)
from atoll.http.stream import Stream


def packed(request: Request, response: Response, *, is_last: bool) -> bytes:
    """Return a small response as one string of bytes; of a stream, the head.

    Raises:
        Cut: a file is shorter than announced.
        OSError: a file cannot be opened.
    """
    is_chunked = isinstance(response.body, Stream) and not request.is_old
    head = head_of(response, is_last=is_last, is_chunked=is_chunked)
    if request.method == "HEAD" or not has_body(response.status):
        return head
    return b"".join([head, *_parts_of(response.body)])


def packed_last(response: Response) -> bytes:
    """Return the answer to what was no request."""
    assert isinstance(response.body, bytes)
    return head_of(response, is_last=True, is_chunked=False) + response.body


def _parts_of(body: Body) -> Iterator[bytes | memoryview]:
    if isinstance(body, bytes):
        yield body
    elif isinstance(body, FilePart | FileParts):
        parts = body.parts if isinstance(body, FileParts) else (body,)
        for part in parts:
            yield _content(part)
    elif not isinstance(body, Stream):
        yield from body


def _content(part: FilePart) -> bytes:
    with _opened(part) as fd:
        data = os.pread(fd, part.length, part.first)
    if len(data) != part.length:
        raise Cut(f"the file ended {part.length - len(data)} bytes early")
    return data


def send(request: Request, response: Response, *, is_last: bool) -> None:
    """Send all of a bulk response, in a thread that may wait.

    Raises:
        Gone: the other side has closed the connection.
        Stalled: it takes too long.
        Cut: the body turned out shorter than announced.
        OSError: a file cannot be opened; nothing was sent.
    """
    channel = request.connection
    head = memoryview(head_of(response, is_last=is_last, is_chunked=False))
    channel.begin_body()
    if request.method == "HEAD" or not has_body(response.status):
        channel.send([head])
        return
    if isinstance(response.body, FilePart):
        _send_file(channel, head, response.body)
    elif isinstance(response.body, FileParts):
        _send_files(channel, head, response.body)
    else:
        assert not isinstance(response.body, Stream)
        _send_views(channel, head, response.body)
    if response.trailer is not None:
        channel.send([memoryview(_trailer(response))])


def _send_views(
    channel: Channel, head: memoryview, body: bytes | Sequence[memoryview]
) -> None:
    if isinstance(body, bytes):
        channel.send([head, memoryview(body)])
    else:
        channel.send([head, *(view.cast("B") for view in body)])


def _send_file(channel: Channel, head: memoryview, part: FilePart) -> None:
    with _opened(part) as fd:
        channel.send([head])
        channel.send_file(fd, part.first, part.length)


def _send_files(channel: Channel, head: memoryview, body: FileParts) -> None:
    channel.send([head])
    for part in body.parts:
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(_opened(part))
            except OSError as exc:  # too late to say so: what was announced is cut
                raise Cut(f"a file that cannot be opened: {exc}") from exc
            channel.send_file(fd, part.first, part.length)


@contextmanager
def _opened(part: FilePart) -> Iterator[int]:
    if isinstance(part.file, int):
        yield part.file
        return
    fd = os.open(part.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _trailer(response: Response) -> bytes:
    assert response.trailer is not None
    data = response.trailer()
    if len(data) != response.trailer_bytes:
        raise Cut(f"a trailer of {len(data)} bytes for {response.trailer_bytes}")
    return data
