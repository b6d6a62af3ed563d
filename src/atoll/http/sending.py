"""Puts a response on a channel: its head, its body without joining, its trailer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from atoll.http.channel import Channel, Cut
from atoll.http.request import Request
from atoll.http.response import FilePart, FileParts, Response, has_body, head_of
from atoll.http.stream import Stream


def send(request: Request, response: Response, *, is_last: bool) -> None:
    """Send all of a response; of a stream, the head.

    Raises:
        Gone: the other side has closed the connection.
        Stalled: it takes too long.
        Cut: the body turned out shorter than announced.
        OSError: a file cannot be opened; nothing was sent.
    """
    channel = request.connection
    is_chunked = isinstance(response.body, Stream) and not request.is_old
    head = memoryview(head_of(response, is_last=is_last, is_chunked=is_chunked))
    channel.begin_body()
    if request.method == "HEAD" or not has_body(response.status):
        channel.send([head])
        return
    if isinstance(response.body, FilePart):
        _send_file(channel, head, response.body)
    elif isinstance(response.body, FileParts):
        _send_files(channel, head, response.body)
    else:
        _send_views(channel, head, response.body)
    if response.trailer is not None:
        channel.send([memoryview(_trailer(response))])


def send_last(channel: Channel, response: Response) -> None:
    """Send the answer to what was no request, as `send` does."""
    head = memoryview(head_of(response, is_last=True, is_chunked=False))
    assert isinstance(response.body, bytes)
    channel.begin_body()
    channel.send([head, memoryview(response.body)])


def _send_views(
    channel: Channel, head: memoryview, body: bytes | Sequence[memoryview] | Stream
) -> None:
    if isinstance(body, Stream):
        channel.send([head])
    elif isinstance(body, bytes):
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
