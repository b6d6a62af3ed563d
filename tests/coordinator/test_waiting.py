"""Status says what a run waits for, whatever keeps its rounds from closing."""

from __future__ import annotations

from atoll.coordinator import Service
from atoll.coordinator.status import status_of
from atoll.exchange import Outcome
from atoll.exchange.calls import HeartbeatCall, JoinCall, LeaveCall, OutcomeCall
from atoll.protocol import Heartbeat, HeldRound, JoinReply, JoinRequest
from atoll.protocol.events import CloseRound, Leave
from atoll.protocol.membership import LEASE_S
from atoll.simulate import SimDisk
from atoll.testing.fixtures import MODEL, plain_settings
from tests.coordinator.desk import join, update


def why(service: Service, now_s: float) -> str:
    """Return what status says of a run."""
    said = status_of(service.state, now_s, stats={}, verdicts={})
    return str(said["why"])


def beat(joined: JoinReply, *holds: HeldRound, waits: bool = False) -> HeartbeatCall:
    """Return a beat of an island, which may stand still for round 3."""
    return HeartbeatCall(
        Heartbeat(
            island=joined.island,
            incarnation=joined.incarnation,
            step=0,
            waits_for=(0, 3) if waits else None,
            holds=holds,
        )
    )


def begun(
    disk: SimDisk, *names: str, quorum: int = 1
) -> tuple[Service, list[JoinReply]]:
    """Return a run that these islands have joined, with its first weights."""
    settings = plain_settings(name="run", start_islands=len(names), quorum=quorum)
    service = Service.create(disk, settings, run="run", now_s=0.0)
    return service, [join(service, name) for name in names]


def test_a_founder_is_named() -> None:
    """Until it brings the weights nobody else can, so it is said who it is."""
    settings = plain_settings(start_islands=1)
    service = Service.create(SimDisk(), settings, run="run", now_s=0.0)
    assert why(service, 0.0) == "Waits for the first island, which brings the weights."
    request = JoinRequest(model=MODEL, island="a")
    service.handle(JoinCall(request, b"a", b"1"), 0.0)

    assert why(service, 1.0) == "Waits for a to bring the first weights."
    assert why(service, LEASE_S + 1.0).startswith("Waits for the first island")


def test_a_restarted_coordinator_names_who_has_not_reported() -> None:
    """For one lease from its start, though everybody joins again and again."""
    disk = SimDisk()
    _, (a, _) = begun(disk, "a", "b")
    service = Service.open(disk, now_s=100.0)
    service.handle(beat(a), 101.0)
    service.handle(update(service, a, 1.0), 101.0)

    assert why(service, 105.0) == (
        "The coordinator has restarted, and waits up to 10 s for b to report their "
        "rounds."
    )
    request = JoinRequest(model=MODEL, island="b")
    for now_s in range(102, 120, 2):
        service.handle(JoinCall(request, b"b", b"1"), float(now_s))
        service.handle(beat(a), float(now_s))
    assert why(service, 120.0) == "Waits for b."


def lost(disk: SimDisk) -> tuple[Service, list[JoinReply], HeldRound]:
    """Return a run put back to before round 1, and what its islands hold of it."""
    service, joined = begun(disk, "a", "b")
    put_back = disk.copy()
    for each in joined:
        service.handle(update(service, each, 1.0), 0.0)
    outcome = service.handle(OutcomeCall(0, 1), 0.0)
    assert isinstance(outcome, Outcome)
    held = HeldRound(1, service.weights[0].digest, outcome.receipt)
    put_back()
    return Service.open(disk, now_s=100.0), joined, held


def test_status_names_who_is_to_bring_a_lost_state() -> None:
    """With the command that goes on without it; the first round stays open."""
    service, (a, b), held = lost(SimDisk())
    service.handle(beat(a, held), 101.0)
    service.handle(beat(b), 101.0)

    assert why(service, 102.0) == (
        "The run has lost rounds 1 to 1 of fragment 0, and waits for a to bring its "
        "state. `atoll control run evict ISLAND` continues without it."
    )
    service.change(Leave("a", a.incarnation, reason="evicted"), 103.0)
    assert why(service, 103.0) == ""


def test_updates_below_the_quorum_are_counted() -> None:
    """Nobody is late, and the round needs one more than it has."""
    service, (a, b) = begun(SimDisk(), "a", "b", quorum=2)
    service.handle(update(service, a, 1.0), 0.0)
    service.handle(LeaveCall("b", b.incarnation), 1.0)
    join(service, "c")

    assert why(service, 2.0) == "Round 1 of fragment 0 has 1 of quorum=2 updates."


def test_a_round_that_is_being_written_is_named() -> None:
    """From the moment that it closes until its record is durable."""
    service, (a,) = begun(SimDisk(), "a")
    closing: list[CloseRound] = []
    service.defer = closing.append
    service.handle(update(service, a, 1.0), 0.0)

    assert why(service, 1.0) == "Round 1 of fragment 0 is being reduced and written."
    service.commit(service.agree(closing[0]), 2.0)
    assert why(service, 2.0) == ""
