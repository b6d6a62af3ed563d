"""Where the promises end: what is refused, and what nobody can tell from the truth."""

from __future__ import annotations

from copy import deepcopy

from atoll.coordinator import Service
from atoll.exchange import Outcome
from atoll.exchange.calls import HeartbeatCall, OutcomeCall
from atoll.protocol import Heartbeat
from atoll.simulate import SimDisk
from atoll.wire import Roster, Verdict
from tests.coordinator.desk import anchor, coordinator, update


def roster(service: Service) -> Roster:
    """Return the roster of round 1."""
    reply = service.handle(OutcomeCall(0, 1), 1.0)
    assert isinstance(reply, Outcome)
    assert reply.agreed.header.roster is not None
    return reply.agreed.header.roster


def test_an_update_on_another_base_is_refused_and_spoils_nothing() -> None:
    """The mean is that of the others: 1 and 3 make 2."""
    service, (a, b, c) = coordinator(SimDisk(), "a", "b", "c")
    service.handle(update(service, a, 1.0), 1.0)
    service.handle(update(service, b, 9.0, base=b"\1" * 16), 1.0)
    service.handle(update(service, c, 3.0), 1.0)

    entry = roster(service).entry("b")
    assert entry is not None
    assert (entry.verdict, entry.reason[:5]) == (Verdict.REFUSED, "base:")
    assert anchor(service) == -2.0


def test_a_lie_of_plausible_size_counts() -> None:
    """Three updates of 1 and one of -9, below ten times the median, make -1.5."""
    service, joined = coordinator(SimDisk(), "a", "b", "c", "d")
    for island, value in zip(joined, (1.0, 1.0, 1.0, -9.0), strict=True):
        service.handle(update(service, island, value), 1.0)

    assert len(roster(service).counted) == 4
    assert anchor(service) == 1.5


def test_a_lie_of_any_other_size_does_not() -> None:
    """Beyond ten times the median it is refused, from three islands on."""
    service, joined = coordinator(SimDisk(), "a", "b", "c", "d")
    for island, value in zip(joined, (1.0, 1.0, 1.0, -11.0), strict=True):
        service.handle(update(service, island, value), 1.0)

    assert anchor(service) == -1.0


def test_two_coordinators_on_copies_of_a_journal_part() -> None:
    """Each commits round 1 with the islands that it hears, and both are sure."""
    disk = SimDisk()
    service, (a, b) = coordinator(disk, "a", "b")
    copy = Service.open(deepcopy(disk), now_s=1.0)
    for name in ("a", "b"):
        beat = Heartbeat(island=name, incarnation=1, step=0)
        copy.handle(HeartbeatCall(beat), 1.0)
    for each, value in ((service, 1.0), (copy, 3.0)):
        each.handle(update(each, a, value), 1.0)
        each.handle(update(each, b, value), 1.0)

    assert service.weights[0].round == copy.weights[0].round == 1
    assert service.weights[0].digest != copy.weights[0].digest


def test_a_disk_that_lies_about_what_is_durable_loses_a_committed_round() -> None:
    """After a power cut it is what it was before the round that islands have seen."""
    disk = SimDisk()
    service, (a, b) = coordinator(disk, "a", "b")
    really_durable = deepcopy(disk)
    service.handle(update(service, a, 1.0), 1.0)
    service.handle(update(service, b, 3.0), 1.0)
    assert anchor(service) == -2.0

    assert Service.open(really_durable, now_s=2.0).state.rounds[0].number == 1
