"""One island must not be able to keep rounds from closing, least of all in silence.

0.1.0 waited for a member that joins again and again without a word, and for a state
that an island only claimed to hold; status said that the run was training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import Refused
from atoll.exchange.calls import HeartbeatCall, JoinCall
from atoll.protocol import HeldRound, JoinRequest
from atoll.protocol.membership import LEASE_S
from atoll.testing.fixtures import MODEL, plain_settings
from tests.attacks.actors import Actor, acting, redirected, status_of
from tests.attacks.conftest import Serve
from tests.coordinator.apart import serving_apart

SETTINGS = (
    plain_settings(start_islands=2, quorum=1)
    .with_values({"limits.deadline_min_s": 1.0, "limits.deadline_max_s": 2.0})
    .to_dict()
)
"""Who does not publish is late after two seconds."""

AHEAD = HeldRound(9, bytes(16))


def rejoining(actor: Actor, **fields: object) -> JoinCall:
    """Return a joining of an island as the life that it is."""
    request = JoinRequest(model=MODEL, island=actor.island)
    key = actor.island.encode()
    return JoinCall(replace(request, **fields), key, b"1")  # type: ignore[arg-type]


def test_a_claim_to_hold_a_later_round_freezes_nothing(serve: Serve) -> None:
    """Neither in a beat nor in a joining, and the round closes as it should."""
    served = serve(start_islands=2, quorum=1)
    with acting(served, "a", "m") as (a, m):
        with pytest.raises(Refused, match=r"'m' .*receipt"):
            m.line.call(HeartbeatCall(m.beat(AHEAD)))
        with pytest.raises(Refused, match=r"'m' .*receipt"):
            m.line.call(rejoining(m, incarnation=7, holds=(AHEAD,)))
        a.publish(1.0, round=1)
        m.publish(1.0, round=1)

        assert a.outcome(1).agreed.header.round == 1


def test_who_joins_with_an_incarnation_and_says_no_more_is_not_waited_for(
    tmp_path: Path,
) -> None:
    """However often it joins: a life that goes on says what it holds by joining."""
    directory = tmp_path / "run"
    with serving_apart(directory, SETTINGS) as served, acting(served, "a", "m") as both:
        a, m = both
        a.publish(1.0, round=1)
        for life in range(int(4 * LEASE_S)):
            joining = rejoining(m, incarnation=2 + life)
            m.line.call(replace(joining, nonce=bytes([life])))
            if a.exchange.outcome(0, 1, wait_s=1.0) is not None:
                break
        else:
            raise AssertionError("round 1 is open, four leases after it was published")


def test_a_restart_waits_a_lease_for_who_only_joins_and_says_for_whom(
    tmp_path: Path,
) -> None:
    """It repeats its joining for as long as a test may take, and the round closes."""
    directory = tmp_path / "run"
    with serving_apart(directory, SETTINGS) as served, acting(served, "a", "m") as both:
        pass
    a, m = both
    with serving_apart(directory, SETTINGS) as served, redirected(served, *both):
        a.exchange.heartbeat(a.beat(), at_once=True)
        m.line.call(rejoining(m))
        why = status_of(served)["why"]
        a.publish(1.0, round=1)
        for _ in range(int(4 * LEASE_S)):
            m.line.call(rejoining(m))
            if a.exchange.outcome(0, 1, wait_s=1.0) is not None:
                break
        else:
            raise AssertionError("round 1 is open four leases after the restart")

    assert "has restarted, and waits up to" in why
    assert "for m to report" in why
