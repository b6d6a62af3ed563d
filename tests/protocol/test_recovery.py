"""What a machine waits for after a restart, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.errors import Refused
from atoll.protocol import Heartbeat, HeldRound, JoinRequest
from atoll.protocol.coordinator import advance, wakes_at
from atoll.protocol.coordinator_state import CoordinatorState, all_heard
from atoll.protocol.events import (
    CloseRound,
    HeartbeatReceived,
    JoinRequested,
    Result,
    Tick,
)
from atoll.protocol.membership import LEASE_S, Member
from tests.protocol.call_tables import MODEL
from tests.protocol.drivers import (
    NOW_S,
    OPEN_ROUND,
    member,
    open_round,
    state_of,
    update,
)

UNHEARD = {
    "is_heard": False,
    "lease_until_s": NOW_S + LEASE_S,
    "unheard_until_s": NOW_S + LEASE_S,
}
"""What the journal's members are when a coordinator starts."""


def restarted(*others: Member) -> CoordinatorState:
    """Return a run whose round has all it needs, and whose members may be unheard."""
    names = {"a", *(each.island for each in others)}
    staged = {name: update(name) for name in names}
    round = open_round(candidates=frozenset(names), staged=staged)
    return state_of(member("a"), *others, rounds=(round,), quorum=1, start_islands=1)


def joining(name: str, **fields: object) -> JoinRequested:
    """Return the joining of a life that is known by its nonce."""
    request = replace(JoinRequest(model=MODEL, island=name), **fields)  # type: ignore[arg-type]
    return JoinRequested(request, b"key of " + name.encode(), b"nonce")


def closes(result: Result) -> bool:
    """Return whether a step of the machine has closed the round."""
    return any(isinstance(action, CloseRound) for action in result[1])


def test_the_wait_for_a_member_ends_though_it_joins_again() -> None:
    """Its lease is renewed each time; the wait is one lease from the restart."""
    state = replace(restarted(member("b", **UNHEARD)), model=MODEL)
    end_s = NOW_S + LEASE_S
    assert wakes_at(state, NOW_S) == end_s
    for second in range(int(LEASE_S)):
        result = advance(state, joining("b"), NOW_S + second)
        assert not closes(result)
        state = result[0]

    assert state.members.known["b"].lease_until_s > end_s
    assert wakes_at(state, NOW_S + 2) == end_s
    assert not all_heard(state.members, end_s)
    assert all_heard(state.members, end_s + 0.1)
    assert closes(advance(state, Tick(), end_s + 0.1))


def test_a_member_that_is_heard_ends_the_wait() -> None:
    """Its first beat says what it holds, and nothing is waited for any more."""
    state = restarted(member("b", **UNHEARD))
    beat = Heartbeat(island="b", incarnation=1, step=0)

    assert not closes(advance(state, Tick(), NOW_S))
    assert closes(advance(state, HeartbeatReceived(beat), NOW_S + 1))


def test_a_life_that_goes_on_says_what_it_holds_by_joining() -> None:
    """Nobody waits for it to be heard: a round that it holds is lost at once."""
    state = replace(restarted(member("b")), model=MODEL)
    held = HeldRound(OPEN_ROUND, bytes(16))
    quiet = advance(state, joining("c", incarnation=4), NOW_S)
    ahead = advance(state, joining("c", incarnation=4, holds=(held,)), NOW_S)

    assert closes(quiet)
    assert not closes(ahead)
    assert ahead[0].lost_state(0, NOW_S) == held


def test_a_new_life_holds_nothing_yet() -> None:
    """What it says without an incarnation is not taken for what an old life held."""
    state = replace(restarted(member("b")), model=MODEL)
    held = HeldRound(OPEN_ROUND, bytes(16))
    after, _ = advance(state, joining("c", holds=(held,)), NOW_S)

    assert after.members.known["c"].holds == ()
    assert after.lost_state(0, NOW_S) is None


def test_of_two_proven_states_most_islands_decide() -> None:
    """A round may have been committed twice, before and after a disk lost it."""
    first, second = HeldRound(OPEN_ROUND, b"1" * 16), HeldRound(OPEN_ROUND, b"2" * 16)
    state = restarted(
        member("b", holds=(second,)),
        member("c", holds=(first,)),
        member("d", holds=(second,)),
    )

    assert state.lost_state(0, NOW_S) == second


def test_a_run_without_weights_takes_no_holdings() -> None:
    """In 0.1.0 they were kept, and lost rounds as soon as it was founded."""
    state = state_of(member("a"), rounds=())
    beat = Heartbeat(
        island="a", incarnation=1, step=0, holds=(HeldRound(1, bytes(16)),)
    )
    with pytest.raises(Refused, match="'a' holds rounds, and the run has no weights"):
        advance(state, HeartbeatReceived(beat), NOW_S)
    founded = replace(beat, holds=(HeldRound(0, bytes(16)),))
    after, _ = advance(state, HeartbeatReceived(founded), NOW_S)

    assert after.members.known["a"].holds == founded.holds
