"""A round waits for an island that goes on from a checkpoint, and only so long."""

from __future__ import annotations

from atoll.protocol import JoinRequest
from atoll.protocol.events import ConnectionLost, JoinRequested, Tick, Welcome
from atoll.protocol.membership import CLOSED_S, LEASE_S
from tests.protocol.test_coordinator import MODEL, Desk, closings, started


def returning(table: Desk, name: str, *, nonce: bytes = b"2") -> Welcome:
    """Let an island join that comes back when it dies."""
    known = table.state.members.known.get(name)
    request = JoinRequest(
        island=name,
        model=MODEL,
        after=known.incarnation if known else 0,
        returns=True,
    )
    actions = table.do(JoinRequested(request, name.encode(), nonce))
    return next(each for each in actions if isinstance(each, Welcome))


def two() -> Desk:
    """Return a run of a and b, of whom b returns."""
    table = started("a", "b")
    returning(table, "b")
    return table


def test_a_closed_connection_does_not_end_the_wait() -> None:
    """Its next life is expected, though nobody is at the other end."""
    table = two()
    table.publish("a")
    table.do(ConnectionLost("b", 2))
    table.now_s += 2 * CLOSED_S
    assert not closings(table.do(Tick()))
    table.now_s += LEASE_S
    table.beat("a")

    assert not closings(table.do(Tick()))
    assert table.state.rounds[0].missing(table.state.members, table.now_s) == {"b"}


def test_its_next_life_is_waited_for_in_the_same_round() -> None:
    """An island that begins anew is a candidate of the next round, this one of this."""
    table = two()
    table.publish("a")
    table.do(ConnectionLost("b", 2))
    again = returning(table, "b", nonce=b"3")

    assert again.member.incarnation == 3
    assert "b" in table.state.rounds[0].candidates
    assert closings(table.publish("b"))


def test_the_deadline_ends_the_wait() -> None:
    """Nobody waits for the dead beyond what they would have for the living."""
    table = two()
    table.publish("a")
    table.do(ConnectionLost("b", 2))
    latest_s = table.state.rounds[0].late_at_s(
        "b", table.state.members, table.state.settings
    )
    table.now_s = latest_s + 1.0

    assert closings(table.do(Tick()))


def test_nobody_is_summoned_while_somebody_is_expected() -> None:
    """Who waits goes on waiting: the island that comes back will publish."""
    table = two()
    table.publish("a")
    table.now_s += 2 * LEASE_S
    table.beat("a")

    assert table.wait("a", 0) == ()
    assert not table.state.is_stuck(table.now_s)


def test_one_that_has_left_is_not_expected() -> None:
    """A farewell is a farewell."""
    table = two()
    table.publish("a")
    leave = table.state.members.known["b"]
    members = table.state.members.leave(leave, because="left")

    assert members.known["b"].is_expected is False
