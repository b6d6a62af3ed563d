"""Connections without a token hold no thread and no descriptor that islands need."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.security import Role
from atoll.testing.fixtures import plain_settings
from tests.attacks.conftest import Serve
from tests.attacks.honest import take_part
from tests.coordinator.apart import Apart, serving_apart
from tests.coordinator.serving import asking, bearer
from tests.http.loopback import PATIENCE_S, head

NUM_ATTACKERS = 24
"""More than the threads that serve small requests."""

SEGMENT_BYTES = 536
"""With small segments and a small window, the sender's buffer is full soon."""

PIPELINED = 60_000
"""Requests whose answers, of 80 bytes or more, exceed the largest send buffer, 4 MiB:
no connection runs out of them, however far the kernel lets its buffer grow."""

NUM_FILES = 256
GIVE_UP_S = 60.0


def attacker(apart: Apart) -> socket.socket:
    """Connect as somebody who will not read."""
    sock = socket.socket()
    sock.settimeout(PATIENCE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
    sock.connect(apart.address)
    return sock


def send_on(sock: socket.socket, unsent: memoryview) -> memoryview:
    """Send what fits without waiting; return the rest."""
    sock.setblocking(False)
    try:
        while unsent:
            unsent = unsent[sock.send(unsent) :]
    except (BlockingIOError, ConnectionError):  # full, or dropped by the server
        pass
    return unsent


def pipeline_until_stuck(apart: Apart, unsent: dict[socket.socket, memoryview]) -> None:
    """Send requests until every connection has an answer that is not read.

    The server may have dropped some for that. A parked answer leaves when the kernel
    enlarges a send buffer; later answers fill that too, and the next one is parked.
    """

    def are_stuck() -> bool:
        for sock, rest in unsent.items():
            unsent[sock] = send_on(sock, rest)
        connections = status_of(apart)
        dropped = connections["shed"]["slow_reader"]
        return bool(connections["parked_answers"] + dropped == len(unsent))

    wait_until(are_stuck, "an answer is parked for every connection")


def status_of(apart: Apart) -> dict[str, Any]:
    """Return the part of the status document that is about connections."""
    heard = asking(apart, "GET /status", role=Role.OPERATOR)
    found: dict[str, Any] = json.loads(heard.body)["connections"]
    return found


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Ask again until something is so; every question is an answered request."""
    gives_up_s = time.monotonic() + GIVE_UP_S
    while not is_true():
        assert time.monotonic() < gives_up_s, f"never: {what}"


@contextmanager
def attackers(apart: Apart, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(attacker(apart)) for _ in range(count)]


@pytest.mark.parametrize("line", ["GET /health", "GET /status", "GET /nowhere"])
def test_readers_that_do_not_read_hold_no_thread(serve: Serve, line: str) -> None:
    """Many connections pipeline requests and read nothing; an island takes part.

    The answers are parked, one per connection, until the server drops those that made
    no progress for 20 s, which a busy machine may need to take part.
    """
    apart = serve()
    with attackers(apart, NUM_ATTACKERS) as socks:
        unsent = dict.fromkeys(socks, memoryview(head(line) * PIPELINED))
        pipeline_until_stuck(apart, unsent)
        take_part(apart)

        pipeline_until_stuck(apart, unsent)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /health HTTP/1.1\r\nhost: ",
        head("POST /invites/redeem", content_length="60000") + b"{",
        head("PUT /fragments/0/rounds/1/updates/a", content_length="2000000"),
        head("POST /invites/redeem", content_length="10", expect="100-continue"),
    ],
    ids=["nothing", "head", "body", "bulk", "continue"],
)
def test_slow_senders_hold_no_thread(serve: Serve, said: bytes) -> None:
    """Whatever part of a request does not come, an island takes part meanwhile."""
    apart = serve()
    with attackers(apart, NUM_ATTACKERS) as socks:
        for sock in socks:
            sock.sendall(said)

        take_part(apart)


def test_idle_connections_leave_descriptors_for_the_journal(tmp_path: Path) -> None:
    """More idle connections than descriptors: an island joins, publishes, commits.

    Nothing in the coordinator misses a file meanwhile.
    """
    settings = plain_settings().to_dict()
    with (
        serving_apart(tmp_path / "run", settings, num_files=NUM_FILES) as apart,
        attackers(apart, NUM_FILES + 50),
    ):
        take_part(apart)
        wait_until(
            lambda: status_of(apart)["shed"]["too_many"] > 0, "the oldest were shed"
        )
        num_open = len(os.listdir(f"/proc/{apart.process}/fd"))
        events = (apart.directory / "events.jsonl").read_text().splitlines()
        names = {json.loads(event)["event"] for event in events}

        assert num_open < NUM_FILES - 64
        assert not names & {"fault", "disk_failed"}


def test_a_connection_with_a_token_outlives_idle_ones(serve: Serve) -> None:
    """Hundreds of idle connections come after it and are shed; it stays."""
    apart = serve()
    with socket.create_connection(apart.address, timeout=PATIENCE_S) as own:
        reader = own.makefile("rb")
        ask = head(
            "GET /info", authorization=bearer(apart.directory), atoll_protocol="2"
        )
        own.sendall(ask)
        assert b" 200 " in _answer(reader)
        with attackers(apart, 600):
            wait_until(
                lambda: status_of(apart)["shed"]["too_many"] > 300, "many were shed"
            )
            own.sendall(ask)

            assert b" 200 " in _answer(reader)


def _answer(reader: Any) -> bytes:
    """Return the first line of an answer, after all of it was read."""
    line: bytes = reader.readline()
    length = 0
    while (field := reader.readline().strip()) != b"":
        name, _, value = field.partition(b": ")
        if name == b"content-length":
            length = int(value)
    reader.read(length)
    return line
