"""Bulk bodies wait for their lane without being read, and starve nobody."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from atoll.http import Listener, Request, Response, ShedReason
from atoll.http.threads import TICK_S
from tests.http.loopback import PATIENCE_S, Dialogue, head, hello, listening

SIZE = 200_000
BODY = b"a" * SIZE
LARGE = Response(body=b"x" * 30_000_000)


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


def slow_upload(listener: Listener, stack: ExitStack, name: str) -> Dialogue:
    """Begin an upload, and send no more than its first byte."""
    dialogue = stack.enter_context(Dialogue(listener.address))
    dialogue.say(head(f"PUT /{name}", content_length=str(SIZE)) + b"a")
    return dialogue


def receive(request: Request) -> Response:
    if request.method == "GET":
        return LARGE if request.segments else hello(request)
    return Response(body=request.body.read(SIZE)[:1])


def owner_of(request: Request) -> str:
    return request.segments[0] if request.method == "PUT" else ""


def wait_for_active(listener: Listener, count: int) -> None:
    with Dialogue(listener.address) as dialogue:
        while listener.counts.bulk_active != count:
            assert dialogue.ask("GET /").body == b"hello"


def test_slow_uploads_give_their_lane_to_who_waits() -> None:
    """Two lanes crawl: one of them is ended with 503 when a third body comes."""
    shed: list[ShedReason] = []
    with (
        listening(
            receive,
            bulk_lanes=2,
            lane_grace_s=0.2,
            on_shed=lambda _, why: shed.append(why),
        ) as listener,
        ExitStack() as stack,
    ):
        slow = [slow_upload(listener, stack, name) for name in "ab"]
        wait_for_active(listener, 2)

        assert upload(listener, stack, "c").hear().body == b"a"
        assert shed == [ShedReason.SLOW_TRANSFER]
        wait_for_active(listener, 1)
        for dialogue in slow:
            dialogue.sock.settimeout(0.0)
        ended = [dialogue for dialogue in slow if _has_answer(dialogue)]
        (heard,) = [dialogue.hear() for dialogue in ended]
        assert (heard.status, heard.error) == (503, "busy")
        assert heard.headers["retry-after"] == "5"


def _has_answer(dialogue: Dialogue) -> bool:
    try:
        return bool(dialogue.sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        dialogue.sock.settimeout(PATIENCE_S)


def test_a_slow_upload_keeps_its_lane_while_nobody_waits() -> None:
    """Beside a free lane a crawling body is not ended, whoever passes by.

    It waits for many times the grace and the time between two looks at transfers.
    """
    lane_grace_s = 0.05
    with (
        listening(receive, bulk_lanes=2, lane_grace_s=lane_grace_s) as listener,
        ExitStack() as stack,
    ):
        slow = slow_upload(listener, stack, "slow")
        wait_for_active(listener, 1)
        waits_until_s = time.monotonic() + 10 * (lane_grace_s + TICK_S)
        while time.monotonic() < waits_until_s:
            with ExitStack() as passing:
                assert upload(listener, passing, "fast").hear().body == b"a"
        slow.say(BODY[1:])

        assert slow.hear().body == b"a"
        assert listener.counts.shed["slow_transfer"] == 0


def test_readers_that_do_not_read_lose_their_lane() -> None:
    """Long before their idle time, because somebody waits."""
    limits: dict[str, Any] = {"bulk_lanes": 2, "lane_grace_s": 0.2, "idle_s": 600.0}
    with listening(receive, **limits) as listener, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(Dialogue(listener.address)).say(head("GET /large"))
        with Dialogue(listener.address) as dialogue:
            assert len(dialogue.ask("GET /large").body) == 30_000_000


def test_an_owner_has_a_few_lanes_only() -> None:
    """Three bodies of one island: two move, and another island's does, too."""
    gate = Gate()
    with (
        listening(gate, bulk_lanes=4, lanes_per_owner=2, owner=owner_of) as listener,
        ExitStack() as stack,
    ):
        uploads = [upload(listener, stack, "greedy") for _ in range(3)]
        uploads.append(upload(listener, stack, "modest"))
        entered = [gate.entered.get(timeout=PATIENCE_S) for _ in range(3)]
        with Dialogue(listener.address) as small:
            assert small.ask("GET /").body == b"hello"
        assert gate.entered.empty()
        gate.open.set()

        assert [each.hear().body for each in uploads] == [b"a"] * 4
    assert sorted(entered) == ["/greedy", "/greedy", "/modest"]


def test_an_owner_beyond_its_share_gives_up_its_slowest() -> None:
    """Both lanes are of one island and fast enough; another one waits, and gets one."""
    with (
        listening(
            receive,
            bulk_lanes=2,
            lane_grace_s=0.2,
            waiting_bytes_per_s=1,
            owner=owner_of,
        ) as listener,
        ExitStack() as stack,
    ):
        slow = [slow_upload(listener, stack, "greedy") for _ in range(2)]
        wait_for_active(listener, 2)
        other = upload(listener, stack, "modest")
        ended = threading.Event()

        def trickle() -> None:  # above the rate of those who crawl
            while not ended.wait(0.01):
                for dialogue in slow:
                    with suppress(OSError):
                        dialogue.say(b"a")

        trickling = threading.Thread(target=trickle)
        trickling.start()
        try:
            assert other.hear().body == b"a"
        finally:
            ended.set()
            trickling.join()
        assert listener.counts.shed["slow_transfer"] == 1
