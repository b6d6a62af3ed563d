"""A listener keeps connections, bounds them, and survives its handlers."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time

import pytest

from atoll.errors import UsageError
from atoll.http import Listener, ListenerLimits, Request, Response
from atoll.runtime import SystemClock
from tests.http.loopback import PATIENCE_S, Dialogue, head, hello, listening, talking


def test_a_connection_is_kept_and_can_be_given_up() -> None:
    """Requests follow each other on one connection until one asks to close it."""
    with talking() as dialogue:
        for _ in range(5):
            assert dialogue.ask("GET /").body == b"hello"
        heard = dialogue.ask("GET /", Connection="close")

        assert heard.headers["connection"] == "close"
        assert dialogue.hear_end() == b""


def test_a_fault_of_a_handler_is_told_to_us_only() -> None:
    """The other side gets 500 and no detail; `on_error` gets the exception."""
    faults: queue.Queue[tuple[str, Exception]] = queue.Queue()

    def handle(request: Request) -> Response:
        if request.segments:
            raise ZeroDivisionError("a secret")
        return hello(request)

    def note(request: Request | None, exc: Exception) -> None:
        assert request is not None
        faults.put((request.path, exc))

    with talking(handle, on_error=note) as dialogue:
        heard = dialogue.ask("GET /bad")

        assert (heard.status, heard.error) == (500, "fault")
        assert b"secret" not in heard.body
        assert dialogue.ask("GET /").body == b"hello"
    path, exc = faults.get(timeout=PATIENCE_S)
    assert path == "/bad"
    assert isinstance(exc, ZeroDivisionError)


def test_one_connection_too_many_is_turned_away() -> None:
    """Beyond the cap the answer is 503; a connection that ends makes room."""
    with (
        listening(max_connections=2) as listener,
        Dialogue(listener.address) as first,
        Dialogue(listener.address) as second,
    ):
        assert first.ask("GET /").status == second.ask("GET /").status == 200
        with Dialogue(listener.address) as third:
            assert third.hear().status == 503
        first.ask("GET /", Connection="close")
        first.hear_end()
        first.close()
        until_s = time.monotonic() + PATIENCE_S
        while listener.counts.connections > 1 and time.monotonic() < until_s:
            second.ask("GET /")
        with Dialogue(listener.address) as fourth:
            assert fourth.ask("GET /").status == 200


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("when", ["idle", "head", "body"])
def test_a_tagged_connection_that_is_closed_is_told(how: str, when: str) -> None:
    """The tag is told within a tenth of a second, wherever the connection is."""
    closed: queue.Queue[object] = queue.Queue()

    def tag(request: Request) -> Response:
        request.connection.tag = "tokyo"
        request.body.read(2**30)
        return hello(request)

    with listening(tag, on_closed=closed.put) as listener:
        dialogue = Dialogue(listener.address)
        dialogue.ask("GET /")
        if when == "head":
            dialogue.say(b"GET /")
        if when == "body":
            dialogue.say(head("PUT /", content_length="1000000") + b"a")
        if how == "rst":
            linger = struct.pack("ii", 1, 0)
            dialogue.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        dialogue.close()

        # Ten times the promise, for a machine that does something else as well.
        assert closed.get(timeout=1.0) == "tokyo"


def test_a_connection_that_we_close_is_not_told() -> None:
    """The hint is about who has died, not about whom we sent away."""
    closed: queue.Queue[object] = queue.Queue()

    def tag(request: Request) -> Response:
        request.connection.tag = "tokyo"
        return hello(request)

    with listening(tag, on_closed=closed.put, keep_alive_s=0.05) as listener:
        for connection in ("close", "keep-alive"):
            with Dialogue(listener.address) as dialogue:
                dialogue.ask("GET /", Connection=connection)
                dialogue.hear_end()
    assert closed.empty()


def test_closing_lets_a_request_end() -> None:
    """What is under way is answered; silent connections end at once."""
    entered, leave = threading.Event(), threading.Event()

    def handle(request: Request) -> Response:
        entered.set()
        assert leave.wait(PATIENCE_S)
        return hello(request)

    with (
        listening(handle) as listener,
        Dialogue(listener.address) as busy,
        Dialogue(listener.address) as silent,
    ):
        busy.say(head("GET /"))
        assert entered.wait(PATIENCE_S)
        closing = threading.Thread(target=listener.close, args=[PATIENCE_S])
        closing.start()

        assert silent.hear_end() == b""
        leave.set()
        heard = busy.hear()
        assert (heard.body, heard.headers["connection"]) == (b"hello", "close")
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_closing_never_hangs() -> None:
    """A handler that does not return, and a body that does not come, are left."""
    entered, leave = threading.Event(), threading.Event()

    def handle(request: Request) -> Response:
        entered.set()
        leave.wait(PATIENCE_S)
        return hello(request)

    with (
        listening(handle) as listener,
        Dialogue(listener.address) as stuck,
        Dialogue(listener.address) as slow,
    ):
        stuck.say(head("GET /"))
        slow.say(head("PUT /", content_length="1000000") + b"a")
        assert entered.wait(PATIENCE_S)
        start_s = time.monotonic()
        listener.close(grace_s=0.1)
        took_s = time.monotonic() - start_s
        leave.set()

    # The grace, half a second until all are closed, and one for two kinds of threads.
    assert took_s < 3.0


def test_closing_a_listener_that_never_started() -> None:
    """A listener that only took its port gives it back."""
    listener = Listener(hello, host="127.0.0.1", port=0, clock=SystemClock())
    listener.close(grace_s=0.0)

    again = Listener(
        hello, host="127.0.0.1", port=listener.address[1], clock=SystemClock()
    )
    again.close(grace_s=0.0)


def test_a_port_that_is_taken_is_refused() -> None:
    """Two listeners cannot have one port; the message says which."""
    with listening() as listener:
        port = listener.address[1]
        with pytest.raises(UsageError, match=rf"127\.0\.0\.1:{port}: Address already"):
            Listener(hello, host="127.0.0.1", port=port, clock=SystemClock())


def test_limits_are_positive() -> None:
    """A limit of nothing would stop everything."""
    with pytest.raises(UsageError, match="bulk_lanes=0 must be positive"):
        ListenerLimits(bulk_lanes=0)
