"""An answer that comes later is sent once, to whoever still waits for it."""

from __future__ import annotations

import queue
import threading

import pytest

from atoll.http import DeferredResponse, Request, Response
from tests.http.certificates import Certificate
from tests.http.loopback import PATIENCE_S, Dialogue, head, hello, listening, talking


class Promises:
    """A handler that promises, and lets the test keep the promise."""

    def __init__(self, wait_s: float = PATIENCE_S) -> None:
        self.made: queue.Queue[DeferredResponse] = queue.Queue()
        self.wait_s = wait_s

    def __call__(self, request: Request) -> Response | DeferredResponse:
        if not request.segments:
            return hello(request)
        later = DeferredResponse(
            wait_s=self.wait_s, default=lambda: Response(status=204)
        )
        self.made.put(later)
        return later

    def next(self) -> DeferredResponse:
        return self.made.get(timeout=PATIENCE_S)


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("size", [5, 1_000_000])
def test_an_answer_from_another_thread(
    size: int, encrypted: bool, certificate: Certificate
) -> None:
    """Small or large, it is sent on the connection that waits, which goes on."""
    promises = Promises()
    shown = certificate if encrypted else None
    with talking(promises, certificate=shown) as dialogue:
        dialogue.say(head("GET /wait"))
        later = promises.next()
        answer = Response(body=b"x" * size)
        thread = threading.Thread(target=later.set, args=[answer])
        thread.start()

        assert dialogue.hear().body == b"x" * size
        assert not later.set(Response(body=b"again"))
        assert dialogue.ask("GET /").body == b"hello"
        thread.join()


def test_an_answer_that_is_there_already() -> None:
    """A promise may be kept before the handler returns it."""

    def handle(request: Request) -> DeferredResponse:
        later = DeferredResponse(
            wait_s=PATIENCE_S, default=lambda: Response(status=204)
        )
        assert later.set(Response(body=b"now"))
        return later

    with talking(handle) as dialogue:
        assert dialogue.ask("GET /").body == b"now"


def test_without_an_answer_the_default_is_sent() -> None:
    """When its time is up, the request gets the default, and an answer is too late."""
    promises = Promises(wait_s=0.05)
    with talking(promises) as dialogue:
        assert dialogue.ask("GET /wait").status == 204
        assert not promises.next().set(Response(body=b"late"))
        assert dialogue.ask("GET /").body == b"hello"


def test_who_goes_while_waiting_is_told() -> None:
    """Both the promise and the tag learn that nobody waits any more."""
    closed: queue.Queue[object] = queue.Queue()
    promises = Promises()

    def tag(request: Request) -> Response | DeferredResponse:
        request.connection.tag = "tokyo"
        return promises(request)

    with listening(tag, on_closed=closed.put) as listener:
        dialogue = Dialogue(listener.address)
        dialogue.say(head("GET /wait"))
        later = promises.next()
        later.on_gone(lambda: closed.put("gone"))
        dialogue.close()

        assert {closed.get(timeout=1.0), closed.get(timeout=1.0)} == {"gone", "tokyo"}
        assert later.is_gone
        assert not later.set(Response())
        later.on_gone(lambda: closed.put("at once"))
        assert closed.get_nowait() == "at once"


def test_a_request_sent_while_waiting_is_answered_after() -> None:
    """What is pipelined behind a promise waits for it."""
    promises = Promises()
    with talking(promises) as dialogue:
        dialogue.say(head("GET /wait"))
        later = promises.next()
        dialogue.say(head("GET /"))
        later.set(Response(body=b"first"))

        assert dialogue.hear().body == b"first"
        assert dialogue.hear().body == b"hello"


def test_a_promise_after_a_large_body() -> None:
    """An upload may wait for its answer without its lane."""
    promises = Promises()

    def handle(request: Request) -> Response | DeferredResponse:
        request.body.read(2**30)
        return promises(request)

    with (
        listening(handle, bulk_lanes=1) as listener,
        Dialogue(listener.address) as first,
        Dialogue(listener.address) as second,
    ):
        for dialogue in (first, second):
            body = b"a" * 100_000
            dialogue.say(head("PUT /wait", content_length="100000") + body)
        for later in (promises.next(), promises.next()):
            later.set(Response(body=b"both"))

        assert first.hear().body == second.hear().body == b"both"


def test_closing_answers_who_waits() -> None:
    """A listener that closes sends the defaults and does not use up its grace."""
    promises = Promises()
    with (
        listening(promises) as listener,
        Dialogue(listener.address) as dialogue,
    ):
        dialogue.say(head("GET /wait"))
        promises.next()
        listener.close(grace_s=PATIENCE_S)

        assert dialogue.hear().status == 204
        assert dialogue.hear_end() == b""
