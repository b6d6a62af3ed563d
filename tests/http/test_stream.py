"""A stream reaches its reader while it is pushed, and is not held up by it."""

from __future__ import annotations

import queue
import threading

import pytest

from atoll.http import Request, Response, ResponseStream
from tests.http.certificates import Certificate
from tests.http.loopback import PATIENCE_S, Dialogue, head, hello, listening, talking


class Streams:
    """A handler that opens a stream for each request, and lets the test feed it."""

    def __init__(self, max_buffered_bytes: int = 2**20) -> None:
        self.opened: queue.Queue[ResponseStream] = queue.Queue()
        self._max_buffered_bytes = max_buffered_bytes

    def __call__(self, request: Request) -> Response:
        if not request.segments:
            return hello(request)
        stream = ResponseStream(max_buffered_bytes=self._max_buffered_bytes)
        stream.push(b"first")
        self.opened.put(stream)
        return Response(headers={"content-type": "text/event-stream"}, body=stream)

    def next(self) -> ResponseStream:
        return self.opened.get(timeout=PATIENCE_S)


@pytest.mark.parametrize("encrypted", [False, True])
def test_what_is_pushed_arrives_and_the_connection_goes_on(
    encrypted: bool, certificate: Certificate
) -> None:
    """Each push arrives before the next; closing ends the body, not the connection."""
    streams = Streams()
    shown = certificate if encrypted else None
    with talking(streams, certificate=shown) as dialogue:
        dialogue.say(head("GET /events"))
        assert dialogue.hear_head()[1]["transfer-encoding"] == "chunked"
        stream, chunks = streams.next(), dialogue.hear_chunks()

        assert next(chunks) == b"first"
        for word in (b"second", b"third"):
            assert stream.push(word)
            assert next(chunks) == word
        stream.push(b"last")
        stream.close()
        assert b"".join(chunks) == b"last"
        assert not stream.push(b"too late")
        assert dialogue.ask("GET /").body == b"hello"


def test_a_long_stream_arrives_whole() -> None:
    """More than the network holds is sent as fast as it is read."""
    streams = Streams(max_buffered_bytes=2**26)
    data = bytes(range(256)) * 100_000
    with talking(streams) as dialogue:
        dialogue.say(head("GET /events"))
        stream = streams.next()
        stream.push(data)
        stream.push(data)
        stream.close()

        assert dialogue.hear().body == b"first" + data + data


def test_an_old_reader_gets_no_chunks() -> None:
    """HTTP/1.0 reads until the connection is closed."""
    streams = Streams()
    with talking(streams) as dialogue:
        dialogue.say(b"GET /events HTTP/1.0\r\n\r\n")
        dialogue.hear_head()
        streams.next().close()

        assert dialogue.hear_end() == b"first"


def test_a_reader_that_goes_is_told() -> None:
    """Whoever pushes learns that nobody reads."""
    streams, gone = Streams(), threading.Event()
    with listening(streams) as listener:
        with Dialogue(listener.address) as dialogue:
            dialogue.say(head("GET /events"))
            dialogue.hear_head()
            stream = streams.next()
            stream.on_gone(gone.set)

        assert gone.wait(PATIENCE_S)
        assert not stream.push(b"anybody?")


def test_a_slow_reader_is_dropped() -> None:
    """A reader that falls behind by more than the buffer loses its stream."""
    streams, gone = Streams(max_buffered_bytes=100_000), threading.Event()
    with talking(streams) as dialogue:
        dialogue.say(head("GET /events"))
        dialogue.hear_head()
        stream = streams.next()
        stream.on_gone(gone.set)
        while stream.push(b"x" * 10_000):
            continue

        assert gone.wait(PATIENCE_S)
        assert stream.is_gone
        dialogue.hear_end()


def test_closing_ends_a_stream() -> None:
    """A listener that closes does not wait for a body without an end."""
    streams, gone = Streams(), threading.Event()
    with listening(streams) as listener, Dialogue(listener.address) as dialogue:
        dialogue.say(head("GET /events"))
        assert dialogue.hear_head()[0] == 200
        streams.next().on_gone(gone.set)
        listener.close(grace_s=PATIENCE_S)

        assert gone.wait(PATIENCE_S)
        dialogue.hear_end()
