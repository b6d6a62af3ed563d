"""Connections without a verified token have a budget, and go before all others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from atoll.http import ListenerLimits, Request, Response, ShedReason, origin_of
from atoll.http.connection import Connection
from atoll.http.registry import SILENT_S, ConnectionRegistry
from atoll.runtime import SystemClock
from tests.http.loopback import Dialogue, hello, listening


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def channel(
    stack: ExitStack, host: str, *, is_verified: bool = False, silent_s: float = 0.0
) -> Connection:
    """Return a connection that seems to come from `host`."""
    sock, other = socket.socketpair()
    stack.enter_context(sock)
    stack.enter_context(other)
    found = Connection(sock, (host, 1), limits=ListenerLimits(), clock=SystemClock())
    found.is_verified = is_verified
    found.silent_since_s = 100.0 - silent_s
    found.opened_s = 0.0
    return found


def registered(
    *channels: Connection, most: int = 100, **limits: int
) -> ConnectionRegistry:
    register = ConnectionRegistry(ListenerLimits(**limits), max_connections=most)
    for each in channels:
        register.add(each)
    return register


def victim(
    register: ConnectionRegistry, host: str
) -> tuple[Connection | None, ShedReason] | None:
    return register.victim(origin_of(host), is_verified=False, now_s=100.0)


def test_the_oldest_of_an_origin_goes_beyond_its_budget(stack: ExitStack) -> None:
    """Two of one address are allowed: a third ends the first, another address none."""
    first, second = (channel(stack, "10.0.0.1") for _ in range(2))
    register = registered(first, second, max_unverified_per_origin=2)

    assert victim(register, "10.0.0.2") is None
    assert victim(register, "10.0.0.1") == (first, ShedReason.NO_TOKEN)
    assert victim(register, "10.0.0.1") is None  # the first one counts as gone


def test_a_burst_has_a_moment_to_show_its_tokens(stack: ExitStack) -> None:
    """A young connection stays beyond the budget, up to half of all there may be."""
    young = [channel(stack, "10.0.0.1") for _ in range(3)]
    for each in young:
        each.opened_s = 99.0
    register = registered(*young, max_unverified_per_origin=2, most=8)

    assert victim(register, "10.0.0.1") is None
    register.add(channel(stack, "10.0.0.1"))
    assert victim(register, "10.0.0.1") == (young[0], ShedReason.NO_TOKEN)


def test_in_all_the_origin_with_the_most_loses_its_oldest(stack: ExitStack) -> None:
    """Who has one connection keeps it while another origin has several."""
    lone = channel(stack, "10.0.0.1")
    many = [channel(stack, "10.0.0.2") for _ in range(3)]
    register = registered(lone, *many, max_unverified=4)

    assert victim(register, "10.0.0.3") == (many[0], ShedReason.NO_TOKEN)


def test_a_verified_connection_leaves_the_budget(stack: ExitStack) -> None:
    """It counts no more, and is not the one that goes."""
    first, second = (channel(stack, "10.0.0.1") for _ in range(2))
    register = registered(first, second, max_unverified_per_origin=2)
    first.is_verified = True
    register.verified(first)

    assert register.num_unverified == 1
    assert victim(register, "10.0.0.1") is None


def test_without_room_the_unverified_go_first(stack: ExitStack) -> None:
    """Three connections are all there may be: the unverified one makes room."""
    island = channel(stack, "10.0.0.1", is_verified=True, silent_s=2 * SILENT_S)
    other = channel(stack, "10.0.0.1", is_verified=True)
    stranger = channel(stack, "10.0.0.1")
    register = registered(island, other, stranger, most=3)

    assert victim(register, "10.0.0.2") == (stranger, ShedReason.NO_TOKEN)


def test_then_who_is_silent_longest_and_nobody_who_speaks(stack: ExitStack) -> None:
    """A connection that was silent beyond two leases goes; then no other does."""
    lives = channel(stack, "10.0.0.1", is_verified=True, silent_s=SILENT_S - 1)
    silent = channel(stack, "10.0.0.1", is_verified=True, silent_s=SILENT_S + 1)
    register = registered(lives, silent, most=2)

    assert victim(register, "10.0.0.2") == (silent, ShedReason.IDLE)
    register.remove(silent)
    register.add(channel(stack, "10.0.0.2", is_verified=True))
    assert victim(register, "10.0.0.2") == (None, ShedReason.FULL)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_origin_is_an_address_or_a_network(host: str, origin: str) -> None:
    """IPv4 by address, IPv6 by /64, mapped IPv4 as what it is."""
    assert origin_of(host) == origin


def test_a_listener_sheds_who_shows_no_token() -> None:
    """Of three silent connections the oldest is closed; who was verified stays."""
    shed: list[tuple[str, ShedReason]] = []

    def handle(request: Request) -> Response:
        request.connection.is_verified = "authorization" in request.headers
        return hello(request)

    with (
        listening(
            handle,
            verifies=True,
            on_shed=lambda *why: shed.append(why),
            max_unverified_per_origin=2,
            unverified_grace_s=1e-9,
        ) as listener,
        Dialogue(listener.address) as island,
        ExitStack() as stack,
    ):
        assert island.ask("GET /", Authorization="token").body == b"hello"
        strangers = [stack.enter_context(Dialogue(listener.address)) for _ in range(3)]

        assert strangers[0].hear_end() == b""
        assert strangers[2].ask("GET /").body == b"hello"
        assert island.ask("GET /").body == b"hello"
        assert listener.counts.unverified == 2
        assert listener.counts.shed["too_many"] == 1
    assert shed == [("127.0.0.1", ShedReason.NO_TOKEN)]
