"""An island's line over real TCP: a body that breaks off is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from atoll.coordinator.app import Coordinator
from atoll.errors import Unreachable
from atoll.exchange import CoordinatorExchange
from atoll.exchange.api import Incoming, to_request
from atoll.exchange.calls import StateCall
from atoll.exchange.over_http import HttpTransport
from atoll.http import Download, HttpClient, HttpReply, download
from atoll.testing import Link
from atoll.testing.fixtures import outcome_of, plain_settings
from atoll.wire import verify_body
from tests.coordinator.large import found, update
from tests.coordinator.serving import address_of, bearer, line_to, serving
from tests.http.loopback import PATIENCE_S

ELEMENTS = 2**20
BODY_BYTES = 4 * ELEMENTS
HEADS_BYTES = 16 * 1024
"""More than the frame's own header and all heads take: 4 pieces, a few requests."""

ANCHOR = np.arange(ELEMENTS, dtype=np.float32)


class Island:
    """The one that trains: every round moves each element of the anchor by -1."""

    def __init__(self, line: HttpTransport) -> None:
        self.exchange = CoordinatorExchange(line, key=b"a", nonce=b"1")
        self._joined, self.base = found(self.exchange, "a", ANCHOR)
        self._round = 0

    def train(self) -> None:
        """Have one more round committed."""
        self._round += 1
        values = np.ones(ELEMENTS, np.float32)
        sealed = update(self._joined, values, base=self.base, round=self._round)
        self.exchange.publish(sealed)
        while self.exchange.outcome(0, self._round, wait_s=1.0) is None:
            continue
        self.base = self.exchange.state(0).header.base


@contextmanager
def trained(place: Path) -> Iterator[tuple[Coordinator, Island]]:
    """Return a run of 4 MB after its first round, and its island."""
    with (
        serving(place / "run", plain_settings()) as coordinator,
        line_to(coordinator) as line,
    ):
        island = Island(line)
        island.train()
        yield coordinator, island


@contextmanager
def through_link(coordinator: Coordinator) -> Iterator[tuple[Link, HttpTransport]]:
    address = address_of(coordinator.url)
    with Link(address) as link, line_to(coordinator, link.address) as line:
        yield link, line


@pytest.mark.parametrize("what", ["state", "outcome"])
def test_what_has_come_is_not_sent_again(what: str, tmp_path: Path) -> None:
    """4 MB that break in their middle are on the wire once; the frame verifies."""
    with (
        trained(tmp_path) as (coordinator, island),
        through_link(coordinator) as (link, line),
    ):
        exchange = CoordinatorExchange(line, key=b"b", nonce=b"1")
        link.close_after(1_500_000, direction="down")
        if what == "state":
            frame = exchange.state(0)
            assert frame.header.base == island.base
        else:
            frame = outcome_of(exchange, 1).agreed
    sent = link.bytes_down  # known for sure when the link has ended

    verify_body(frame.header, frame.body)
    # The first anchor counts up from 0; the mean is 1, so every element goes down by 1.
    expected = ANCHOR - 1 if what == "state" else np.ones(ELEMENTS, np.float32)
    assert frame.body.tobytes() == expected.tobytes()
    assert BODY_BYTES < sent < BODY_BYTES + HEADS_BYTES


@contextmanager
def asking(
    coordinator: Coordinator, address: tuple[str, int], fetching: Download
) -> Iterator[Callable[[], HttpReply]]:
    """Return what asks for the state, into this memory."""
    caller = HttpClient(*address, timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)
    sent = to_request(StateCall(0), run=coordinator.run)
    headers = {**sent.headers, "Authorization": bearer(coordinator.directory)}
    with closing(caller):
        yield lambda: caller.call(
            sent.method, sent.target, headers=headers, fetching=fetching
        )


def test_a_state_that_has_changed_comes_from_its_start(tmp_path: Path) -> None:
    """A round is committed between the two parts: the frame is the newer one, whole."""
    fetching = Download()
    with (
        trained(tmp_path) as (coordinator, island),
        Link(address_of(coordinator.url)) as link,
        asking(coordinator, link.address, fetching) as ask,
    ):
        link.close_after(1_500_000, direction="down")
        reply = download(ask, fetching, sleep=lambda _: island.train())
    frame = Incoming.of(reply.body).frame()

    verify_body(frame.header, frame.body)
    assert (frame.header.round, frame.header.base) == (2, island.base)
    assert frame.body.tobytes() == (ANCHOR - 2).tobytes()
    assert link.bytes_down > BODY_BYTES + 1_500_000


def test_it_goes_on_when_the_coordinator_has_been_started_again(tmp_path: Path) -> None:
    """The same state is the same bytes in every life of a coordinator."""
    fetching = Download()
    with (
        trained(tmp_path) as (coordinator, _),
        Link(address_of(coordinator.url)) as link,
        asking(coordinator, link.address, fetching) as ask,
    ):
        link.close_after(1_500_000, direction="down")
        with pytest.raises(Unreachable):
            ask()
    with (
        serving(tmp_path / "run", None) as again,
        Link(address_of(again.url)) as second,
        asking(again, second.address, fetching) as ask,
    ):
        frame = Incoming.of(ask().body).frame()

    verify_body(frame.header, frame.body)
    assert frame.body.tobytes() == (ANCHOR - 1).tobytes()
    assert second.bytes_down < BODY_BYTES - 1_500_000 + HEADS_BYTES


def test_a_line_that_gives_up_stops_asking(tmp_path: Path) -> None:
    """A body that broke off does not outlive its island's patience."""
    with (
        trained(tmp_path) as (coordinator, _),
        through_link(coordinator) as (link, line),
    ):
        line.close_after(0.1)
        link.close_after(1_500_000, direction="down")
        with pytest.raises(Unreachable):
            CoordinatorExchange(line, key=b"b", nonce=b"1").state(0)
