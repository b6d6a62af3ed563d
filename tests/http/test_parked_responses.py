"""A small answer that is not read waits without a thread, within bounds."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from atoll.http import Listener, Request, Response, ShedReason
from tests.http.certificates import Certificate, unchecked
from tests.http.loopback import PATIENCE_S, Dialogue, head, hello, listening

SMALL = b"x" * 60_000
PIPELINED = 5


def unread(listener: Listener, stack: ExitStack, tls: Any = None) -> socket.socket:
    """Ask often for a small answer, and read none: the kernel holds some of them."""
    sock = socket.socket()
    sock.settimeout(PATIENCE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    sock.connect(listener.address)
    if tls is not None:
        sock = tls.wrap_socket(sock)
    stack.enter_context(sock)
    sock.sendall(head("GET /small") * PIPELINED)
    return sock


def handle(request: Request) -> Response:
    return Response(body=SMALL) if request.segments else hello(request)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def wait_for_parked(listener: Listener, count: int) -> None:
    with Dialogue(listener.address) as dialogue:
        for _ in range(10_000):
            if listener.counts.parked_answers == count:
                return
            assert dialogue.ask("GET /").body == b"hello"
    raise AssertionError(f"{listener.counts} does not come to {count}")


def test_one_thread_serves_while_many_do_not_read(stack: ExitStack) -> None:
    """One thread, five stuck readers: others are answered, and the stuck are, too."""
    with listening(handle, small_threads=1) as listener:
        socks = [unread(listener, stack) for _ in range(5)]
        wait_for_parked(listener, 5)
        assert listener.counts.parked_bytes <= 5 * (len(SMALL) + 1000)

        got = b""
        while got.count(b"HTTP/1.1 200") < PIPELINED or not got.endswith(SMALL):
            got += socks[0].recv(2**20)
        assert got.count(SMALL) == PIPELINED


def test_an_answer_that_does_not_go_on_ends_its_connection(stack: ExitStack) -> None:
    """After the idle time it is closed, and reported."""
    shed: queue.Queue[ShedReason] = queue.Queue()
    with listening(
        handle, idle_s=1.0, on_shed=lambda _, why: shed.put(why)
    ) as listener:
        unread(listener, stack)

        assert shed.get(timeout=PATIENCE_S) is ShedReason.SLOW_READER
        assert listener.counts.shed["slow_reader"] == 1
        wait_for_parked(listener, 0)


def test_all_of_them_together_have_a_bound(stack: ExitStack) -> None:
    """Where no byte may be parked, every reader that does not read is given up."""
    with listening(handle, max_parked_bytes=1) as listener:
        for _ in range(3):
            unread(listener, stack)
        while listener.counts.shed["slow_reader"] < 3:
            with Dialogue(listener.address) as dialogue:
                assert dialogue.ask("GET /").body == b"hello"

        assert (listener.counts.parked_answers, listener.counts.parked_bytes) == (0, 0)


def test_a_slow_reader_over_tls_gets_every_byte(
    certificate: Certificate, stack: ExitStack
) -> None:
    """What TLS could not write at once goes on where it was."""
    with listening(handle, tls=certificate.shown(), small_threads=1) as listener:
        sock = unread(listener, stack, unchecked())
        got = bytearray()
        while got.count(SMALL) < PIPELINED:
            data = sock.recv(2**16)
            assert data
            got += data
        assert got.count(b"HTTP/1.1 200") == PIPELINED


def test_closing_leaves_no_parked_answer_behind(stack: ExitStack) -> None:
    """A listener that closes ends within its grace, whoever does not read."""
    with listening(handle) as listener:
        unread(listener, stack)
        wait_for_parked(listener, 1)
        listener.close(grace_s=0.1)

        assert listener.counts.connections == 0
