"""Bodies come as declared, or the handler and the sender are told what was wrong."""

from __future__ import annotations

import queue
import socket
from typing import Any

import pytest

from atoll.http import Problem, Request, Response
from tests.http.loopback import PATIENCE_S, Dialogue, head, listening, talking

LARGE = bytes(range(256)) * 4096  # 1 MiB


def echo(request: Request) -> Response:
    """Read in two parts, of which the second is larger than what is left."""
    data = bytearray(request.body.length_bytes + 10)
    view = memoryview(data)
    first = request.body.readinto(view[: request.body.length_bytes // 3])
    size = first + request.body.readinto(view[first:])
    assert request.body.remaining == 0
    return Response(body=bytes(data[:size]))


def unread(request: Request) -> Response:
    return Response(status=409, body=b"no")


@pytest.mark.parametrize("size", [0, 1, 1000, 65536, 65537, len(LARGE)])
def test_a_body_is_read_exactly(size: int) -> None:
    """The handler reads the declared bytes, small or large, on a kept connection."""
    with talking(echo) as dialogue:
        for _ in range(2):
            assert dialogue.ask("PUT /", LARGE[:size]).body == LARGE[:size]


def test_a_body_longer_than_allowed_is_not_read() -> None:
    """A handler that bounds what it reads gets 413 for its sender."""

    def bounded(request: Request) -> Response:
        return Response(body=request.body.read(10))

    with talking(bounded) as dialogue:
        assert dialogue.ask("PUT /", b"0123456789").body == b"0123456789"
        assert dialogue.ask("PUT /", b"0123456789a").status == 413
        assert dialogue.ask("PUT /", b"again").body == b"again"


@pytest.mark.parametrize("size", [100, len(LARGE)])
def test_a_truncated_body_is_told_to_both_sides(size: int) -> None:
    """A body that ends early raises 400 in the handler, and is answered so."""
    told: queue.Queue[int] = queue.Queue()

    def reading(request: Request) -> Response:
        try:
            return echo(request)
        except Problem as problem:
            told.put(problem.status)
            raise

    with talking(reading) as dialogue:
        dialogue.say(head("PUT /", content_length=str(size)) + LARGE[: size - 1])
        dialogue.sock.shutdown(socket.SHUT_WR)
        heard = dialogue.hear()

    assert (heard.status, heard.error) == (400, "short_body")
    assert f"{size - 1} of {size} bytes" in heard.body.decode()
    # A small body is collected first: it never reached the handler.
    assert told.qsize() == (0 if size == 100 else 1)


def test_bytes_beyond_the_declared_length_are_another_request() -> None:
    """A body longer than declared ends where it was declared to; the rest is judged."""
    with talking(echo) as dialogue:
        dialogue.say(head("PUT /", content_length="3") + b"abcdef\r\n\r\n")

        assert dialogue.hear().body == b"abc"
        assert dialogue.hear().status == 400
        assert dialogue.hear_end() == b""


@pytest.mark.parametrize("size", [100, len(LARGE)])
def test_a_body_that_stops_is_answered_408(size: int) -> None:
    """An upload that goes silent ends after the idle time."""
    with talking(echo, idle_s=0.1) as dialogue:
        dialogue.say(head("PUT /", content_length=str(size)) + b"a")
        heard = dialogue.hear()

        assert (heard.status, heard.error) == (408, "slow_body")
        assert dialogue.hear_end() == b""


def test_a_body_that_crawls_is_answered_408() -> None:
    """An upload that is never silent for long, but too slow, ends as well."""
    limits: dict[str, Any] = {"idle_s": 0.2, "min_bytes_per_s": 1_000_000}
    with talking(echo, **limits) as dialogue:
        dialogue.say(head("PUT /", content_length=str(len(LARGE))))
        dialogue.sock.settimeout(0.02)
        heard = b""
        while not heard:
            dialogue.say(b"a")
            try:
                heard = dialogue.sock.recv(12)
            except TimeoutError:
                continue

    assert heard == b"HTTP/1.1 408"


def test_a_large_body_is_asked_for_once_the_handler_reads() -> None:
    """With Expect, the interim answer comes when the handler starts reading."""
    with talking(echo) as dialogue:
        asked = head("PUT /", content_length=str(len(LARGE)), expect="100-continue")
        dialogue.say(asked)

        assert dialogue.hear_head() == (100, {})
        dialogue.say(LARGE)
        assert dialogue.hear().body == LARGE
        assert dialogue.ask("PUT /", b"kept").body == b"kept"


def test_a_refusal_comes_before_the_body() -> None:
    """With Expect, a handler that does not read answers; the body stays away."""
    with talking(unread) as dialogue:
        dialogue.say(head("PUT /", content_length="9000000", expect="100-continue"))
        heard = dialogue.hear()

        assert (heard.status, heard.headers["connection"]) == (409, "close")
        assert dialogue.hear_end() == b""


@pytest.mark.parametrize("size", [10, 100_000, 2**20])
def test_a_short_unread_rest_is_skipped(size: int) -> None:
    """After a body nobody read, the connection goes on."""
    with talking(unread) as dialogue:
        for _ in range(3):
            assert dialogue.ask("PUT /", LARGE[:size]).status == 409


def test_a_long_unread_rest_closes_the_connection() -> None:
    """A body that is neither read nor short costs its sender the connection."""
    with talking(unread, drain_bytes=1000) as dialogue:
        dialogue.say(head("PUT /", content_length="9000000") + LARGE)
        heard = dialogue.hear()

        assert (heard.status, heard.headers["connection"]) == (409, "close")
        assert dialogue.hear_end() == b""


def test_a_slow_sender_of_a_small_body_holds_no_thread() -> None:
    """More small bodies on their way than threads: another request is served."""
    with listening(echo, small_threads=1) as listener:
        crowd = [Dialogue(listener.address) for _ in range(5)]
        for dialogue in crowd:
            dialogue.say(head("PUT /", content_length="4") + b"ab")
        with Dialogue(listener.address) as dialogue:
            dialogue.sock.settimeout(PATIENCE_S)

            assert dialogue.ask("PUT /", b"me first").body == b"me first"
        for dialogue in crowd:
            dialogue.say(b"cd")
            assert dialogue.hear().body == b"abcd"
            dialogue.close()
