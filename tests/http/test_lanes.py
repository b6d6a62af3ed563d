"""Bulk bodies wait for their lane without being read, and starve nobody."""

from __future__ import annotations

import queue
import threading
from contextlib import ExitStack
from typing import Any

from atoll.http import Listener, Request, Response
from tests.http.loopback import PATIENCE_S, Dialogue, head, hello, listening

SIZE = 200_000
BODY = b"a" * SIZE


class Gate:
    """A handler that holds bulk uploads until they may pass."""

    def __init__(self) -> None:
        self.entered: queue.Queue[str] = queue.Queue()
        self.open = threading.Event()

    def __call__(self, request: Request) -> Response:
        if request.method == "GET":
            return hello(request)
        self.entered.put(request.path)
        assert self.open.wait(PATIENCE_S)
        return Response(body=request.body.read(SIZE)[:1])


def upload(listener: Listener, stack: ExitStack, name: str) -> Dialogue:
    """Begin an upload."""
    dialogue = stack.enter_context(Dialogue(listener.address))
    dialogue.say(head(f"PUT /{name}", content_length=str(SIZE)) + BODY)
    return dialogue


def test_bulk_bodies_beyond_the_lanes_wait_in_order() -> None:
    """Two lanes, five uploads: two are handled, all are in the end."""
    gate = Gate()
    with listening(gate, bulk_lanes=2) as listener, ExitStack() as stack:
        uploads = [upload(listener, stack, str(number)) for number in range(5)]
        entered = {gate.entered.get(timeout=PATIENCE_S) for _ in range(2)}
        with Dialogue(listener.address) as small:
            assert small.ask("GET /").body == b"hello"
        assert listener.counts.bulk_active == 2
        assert gate.entered.empty()
        gate.open.set()

        assert [each.hear().body for each in uploads] == [b"a"] * 5
    assert len(entered) == 2


def test_bytes_in_flight_are_bounded() -> None:
    """An upload that would exceed the bound is not read until another has ended."""
    gate = Gate()
    with (
        listening(gate, max_body_bytes_in_flight=SIZE + 1) as listener,
        ExitStack() as stack,
    ):
        first = upload(listener, stack, "first")
        assert gate.entered.get(timeout=PATIENCE_S) == "/first"
        second = upload(listener, stack, "second")
        with Dialogue(listener.address) as small:
            assert small.ask("GET /").body == b"hello"
        assert gate.entered.empty()
        gate.open.set()

        assert first.hear().body == second.hear().body == b"a"


def test_a_body_beyond_the_bound_is_read_alone() -> None:
    """The bound is no limit of a single body."""
    gate = Gate()
    gate.open.set()
    with (
        listening(gate, max_body_bytes_in_flight=10) as listener,
        ExitStack() as stack,
    ):
        assert upload(listener, stack, "only").hear().body == b"a"


def test_who_waits_too_long_for_a_lane_is_sent_away() -> None:
    """After its time the answer is 503, and says when to come again."""
    gate = Gate()
    with (
        listening(gate, bulk_lanes=1, lane_wait_s=0.1) as listener,
        ExitStack() as stack,
    ):
        first = upload(listener, stack, "first")
        assert gate.entered.get(timeout=PATIENCE_S) == "/first"
        heard = upload(listener, stack, "second").hear()
        gate.open.set()

        assert (heard.status, heard.error) == (503, "busy")
        assert heard.headers["retry-after"] == "5"
        assert first.hear().body == b"a"


def test_readers_that_do_not_read_starve_nobody() -> None:
    """All lanes out are stuck; small requests and uploads go on, the stuck end."""
    large = Response(body=b"x" * 30_000_000)

    def handle(request: Request) -> Response:
        if request.method == "PUT":
            return Response(body=request.body.read(SIZE)[:1])
        return large if request.segments else hello(request)

    limits: dict[str, Any] = {"bulk_lanes": 2, "small_threads": 2, "idle_s": 1.0}
    with listening(handle, **limits) as listener, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(Dialogue(listener.address)).say(head("GET /large"))
        with Dialogue(listener.address) as dialogue:
            assert dialogue.ask("GET /").body == b"hello"
            assert dialogue.ask("PUT /", BODY).body == b"a"
            # The lanes of the stuck are free again after their idle time.
            assert len(dialogue.ask("GET /large").body) == 30_000_000
