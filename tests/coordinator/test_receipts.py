"""A coordinator recognises what it has committed by its own receipts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.coordinator import Service
from atoll.coordinator.status import RECENT, Watcher
from atoll.errors import Refused
from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import (
    HeartbeatCall,
    JoinCall,
    OutcomeCall,
    RecoverCall,
    StateCall,
)
from atoll.protocol import Heartbeat, HeldRound, JoinReply, JoinRequest, Position
from atoll.simulate import SimDisk
from atoll.telemetry import (
    EventBus,
)
from atoll.testing.fixtures import MODEL
from tests.coordinator.desk import anchor, coordinator, update

ROUNDS = RECENT + 3


def beat(joined: JoinReply, *holds: HeldRound) -> HeartbeatCall:
    """Return a beat of an island that stands still for a later round."""
    said = Heartbeat(
        island=joined.island,
        incarnation=joined.incarnation,
        step=0,
        waits_for=(0, ROUNDS + 1),
        holds=holds,
    )
    return HeartbeatCall(said)


def rolled_back() -> tuple[Service, JoinReply, list[Outcome], Frame]:
    """Return a coordinator that has lost every round, and what its island has."""
    disk = SimDisk()
    service, (joined,) = coordinator(disk, "a")
    put_back = disk.copy()
    outcomes = []
    for round in range(1, ROUNDS + 1):
        service.handle(update(service, joined, 1.0, round=round), 0.0)
        outcome = service.handle(OutcomeCall(0, round), 0.0)
        assert isinstance(outcome, Outcome)
        outcomes.append(outcome)
    state = service.handle(StateCall(0), 0.0)
    assert isinstance(state, Frame)
    put_back()
    return Service.open(disk, now_s=0.0), joined, outcomes, state


def test_outcome_and_state_carry_the_same_receipt() -> None:
    """Whichever way an island learns of a state, it can prove it."""
    _, _, outcomes, state = rolled_back()

    assert outcomes[-1].receipt == state.receipt
    assert len({outcome.receipt for outcome in outcomes}) == ROUNDS
    assert len({outcome.agreed.receipt for outcome in outcomes}) == ROUNDS


def test_many_lost_rounds_come_back_in_one_event() -> None:
    """Who brought them is named, and only outcomes that are known are told."""
    service, joined, outcomes, state = rolled_back()
    events = EventBus()
    watcher = Watcher(events, service.state, 0.0)
    held = HeldRound(state.header.round, state.header.base, state.receipt)
    position = service.handle(beat(joined, held), 0.0)
    assert isinstance(position, Position)
    assert position.lost == (0,)
    last = outcomes[-2:]
    service.handle(
        RecoverCall(
            "a",
            joined.incarnation,
            state,
            tuple(outcome.agreed.header for outcome in last),
            tuple(outcome.agreed.receipt for outcome in last),
        ),
        0.0,
    )
    watcher.look(service, 0.0)
    told = [each for each in events.after(0) if each.name != "round_opened"]

    assert [each.name for each in told] == [
        "state_recovered",
        "round_committed",
        "round_committed",
    ]
    assert told[0].fields == {"island": "a", "fragment": 0, "round": ROUNDS}
    assert anchor(service) == -float(ROUNDS)


def test_what_cannot_be_proven_is_refused_and_told_sparingly() -> None:
    """By name and round; a thousand refusals are a few events."""
    service, joined, _, state = rolled_back()
    events = EventBus()
    watcher = Watcher(events, service.state, 0.0)
    for receipt in [b"", bytes(16), *[state.receipt] * 100]:
        held = HeldRound(2**40, state.header.base, receipt)
        with pytest.raises(
            Refused, match=f"'a' reports .* round {2**40} of fragment 0"
        ):
            service.handle(beat(joined, held), 0.0)
        watcher.look(service, 0.0)
    told = [each for each in events.after(0) if each.name == "holding_refused"]

    assert told[0].fields == {"island": "a", "fragment": 0, "round": 2**40}
    assert len(told) == 10
    assert service.state.rounds[0].number == 1


def test_a_life_that_goes_on_proves_what_it_holds_by_joining() -> None:
    """The journal does not know it any more; a forged receipt lets nobody in."""
    service, _, _, state = rolled_back()
    held = HeldRound(state.header.round, state.header.base, state.receipt)
    request = JoinRequest(model=MODEL, island="b", incarnation=3, holds=(held,))
    forged = replace(request, holds=(replace(held, receipt=bytes(16)),))
    with pytest.raises(Refused, match=r"'b' reports .*receipt"):
        service.handle(JoinCall(forged, b"b", b"1"), 0.0)
    assert "b" not in service.state.members.known
    service.handle(JoinCall(request, b"b", b"1"), 0.0)

    assert service.state.members.known["b"].holds == (replace(held, receipt=b""),)


def test_another_coordinators_receipt_proves_nothing() -> None:
    """Not even of a run of the same name with the same weights."""
    first, joined, _, state = rolled_back()
    second, (other,) = coordinator(SimDisk(), "a")
    held = HeldRound(state.header.round, state.header.base, state.receipt)
    assert (first.state.run, joined) == (second.state.run, other)

    with pytest.raises(Refused, match="receipt"):
        second.handle(beat(other, held), 0.0)
