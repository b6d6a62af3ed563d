"""Questions for an outcome leave nothing behind, and an island has one per fragment."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from atoll.exchange import CoordinatorExchange
from atoll.exchange.api import to_request
from atoll.exchange.calls import OutcomeCall
from atoll.exchange.over_http import HttpTransport
from atoll.protocol import Heartbeat, JoinReply
from atoll.testing.fixtures import plain_settings
from tests.attacks.conftest import Serve
from tests.attacks.honest import enter, honest_line, take_part
from tests.attacks.test_connections import status_of, wait_until
from tests.coordinator.apart import Apart, serving_apart
from tests.coordinator.serving import request
from tests.http.loopback import Dialogue

NUM_POLLS = 300


@contextmanager
def still(directory: Path) -> Iterator[tuple[Apart, JoinReply, HttpTransport]]:
    """Serve a founded run whose clock stands: no question's time is ever up."""
    settings = plain_settings(start_islands=2).to_dict()
    with (
        serving_apart(directory, settings, is_still=True) as apart,
        honest_line(apart) as line,
    ):
        exchange = CoordinatorExchange(line, key=b"key", nonce=b"nonce")
        yield apart, enter(exchange, "honest", elements=3), line


def poll(
    apart: Apart,
    stack: ExitStack,
    beat: Heartbeat | None = None,
    line: HttpTransport | None = None,
) -> Dialogue:
    """Ask for an outcome that does not come; a beat is proven as that of the line."""
    call = OutcomeCall(0, 1, 60.0, beat)
    sent = to_request(call, proof=line.proofs.of(call) if line else None)
    dialogue = stack.enter_context(Dialogue(apart.address))
    headers: dict[str, Any] = dict(sent.headers)
    dialogue.say(request(apart, f"{sent.method} {sent.target}", **headers))
    return dialogue


def wait_for_polls(apart: Apart, count: int) -> None:
    wait_until(lambda: status_of(apart)["long_polls"] == count, f"{count} long polls")


def test_a_poll_whose_connection_is_closed_is_forgotten(tmp_path: Path) -> None:
    """Hundreds are left behind: none of them is kept, though their time is not up."""
    with still(tmp_path / "run") as (apart, *_), ExitStack() as stack:
        polls = [poll(apart, stack) for _ in range(NUM_POLLS)]
        wait_for_polls(apart, NUM_POLLS)
        for dialogue in polls:
            dialogue.close()

        wait_for_polls(apart, 0)


def test_a_poll_that_hides_its_end_behind_bytes_is_forgotten(tmp_path: Path) -> None:
    """Who sends a lot after the question is disconnected: its end must be seen."""
    with still(tmp_path / "run") as (apart, *_), ExitStack() as stack:
        dialogue = poll(apart, stack)
        wait_for_polls(apart, 1)
        with suppress(ConnectionError):
            dialogue.say(b"x" * 2**20)

        wait_for_polls(apart, 0)


def test_a_newer_poll_of_an_island_replaces_the_older(tmp_path: Path) -> None:
    """The older one is answered at once; one question per fragment stays open."""
    with still(tmp_path / "run") as (apart, joined, line), ExitStack() as stack:
        beat = Heartbeat(island=joined.island, incarnation=joined.incarnation, step=0)
        older = poll(apart, stack, beat, line)
        wait_for_polls(apart, 1)
        newer = poll(apart, stack, beat, line)

        assert older.hear().status == 200
        wait_for_polls(apart, 1)
        newer.sock.settimeout(0.0)
        assert _is_silent(newer)


def _is_silent(dialogue: Dialogue) -> bool:
    try:
        dialogue.sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    return False


def test_polls_that_nobody_ends_keep_no_island_from_its_rounds(serve: Serve) -> None:
    """Hundreds of open questions, asked again when they end; an island takes part."""
    apart = serve()
    with honest_line(apart) as line:
        exchange = CoordinatorExchange(line, key=b"founder", nonce=b"nonce")
        enter(exchange, "founder", elements=3)
        exchange.leave("founder", 1)
    with ExitStack() as stack:
        for _ in range(NUM_POLLS):
            poll(apart, stack)

        take_part(apart)
