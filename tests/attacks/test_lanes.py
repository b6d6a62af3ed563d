"""Transfers that crawl do not keep others from their lanes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from atoll.exchange import CoordinatorExchange
from tests.attacks.conftest import Serve
from tests.attacks.honest import enter, honest_line, take_part
from tests.attacks.test_connections import attacker, status_of, wait_until
from tests.coordinator.apart import Apart
from tests.coordinator.serving import request

NUM_ATTACKERS = 40
"""More than there are lanes each way."""

NUM_NAMES = 10
ELEMENTS = 100_000
"""An update of 400 kB and a state as large: both need a lane."""

TRICKLE_S = 0.1
DOCUMENT_BYTES = 4_000_000
"""A joining may be as long, and proves nothing before it has been read."""


@contextmanager
def trickling(socks: list[socket.socket]) -> Iterator[None]:
    """Send a byte on every connection now and then: it is never idle for long."""
    ended = threading.Event()

    def trickle() -> None:
        while not ended.wait(TRICKLE_S):
            for sock in socks:
                with suppress(OSError):  # it was ended, or takes nothing
                    sock.send(b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def slow_uploads(apart: Apart, stack: ExitStack) -> list[socket.socket]:
    """Begin joinings with a token, of several names, a few bytes of each."""
    socks = [stack.enter_context(attacker(apart)) for _ in range(NUM_ATTACKERS)]
    for number, sock in enumerate(socks):
        line = f"POST /islands/slow-{number % NUM_NAMES}"
        head = request(apart, line, content_length=str(DOCUMENT_BYTES))
        sock.sendall(head + b"{")
    return socks


def slow_downloads(apart: Apart, stack: ExitStack) -> list[socket.socket]:
    """Ask for the state, and read nothing of it."""
    with honest_line(apart) as line:
        exchange = CoordinatorExchange(line, key=b"founder", nonce=b"nonce")
        enter(exchange, "founder", elements=ELEMENTS)
        exchange.state(0)  # its file is written now, which others would be refused for
        exchange.leave("founder", 1)
    socks = [stack.enter_context(attacker(apart)) for _ in range(NUM_ATTACKERS)]
    for sock in socks:
        sock.sendall(request(apart, "GET /state/0"))
    return socks


Begin = Callable[[Apart, ExitStack], list[socket.socket]]


@pytest.mark.parametrize("begin", [slow_uploads, slow_downloads])
def test_lanes_that_crawl_are_given_to_who_waits(serve: Serve, begin: Begin) -> None:
    """All lanes are held by transfers that hardly move; an island takes part.

    The attack goes on for the whole test, and an audit names what was ended.
    """
    apart = serve()
    with ExitStack() as stack:
        socks = begin(apart, stack)
        wait_until(lambda: status_of(apart)["bulk_active"] >= 32, "all lanes are held")
        with trickling(socks):
            take_part(apart, elements=ELEMENTS, rounds=1)
        found = status_of(apart)

    assert found["shed"]["slow_transfer"] > 0
    events = (apart.directory / "events.jsonl").read_text().splitlines()
    answers = {json.loads(event).get("answer") for event in events}
    assert "slow_transfer" in answers
