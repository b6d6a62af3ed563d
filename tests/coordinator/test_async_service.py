"""A coordinator of an asynchronous run: what stands, and what a restart keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from atoll import RunEnded
from atoll.coordinator import Service
from atoll.coordinator.commit import COMPACT_ROUNDS
from atoll.disk import Disk
from atoll.exchange.calls import (
    HeartbeatCall,
    LeaveCall,
    OutcomeCall,
    PublishCall,
    RecoverCall,
)
from atoll.protocol import Heartbeat, HeldRound, JoinReply, Phase, Reception
from atoll.protocol.events import SettingsChanged, StopRequested, Tick
from atoll.protocol.membership import LEASE_S
from atoll.protocol.rounds import ListedUpdate
from atoll.simulate import ProcessDead, SimDisk
from atoll.testing.fixtures import plain_settings
from atoll.wire import FrameKind, Roster, TrainingProgress
from tests.coordinator.desk import anchor, join, update
from tests.journal.stories import NoRoom

GRACE_S = 2.0
ASYNC: dict[str, Any] = {"sync.mode": "async", "async.grace_s": GRACE_S}


def make(
    *names: str, buffer: int = 1, **run: object
) -> tuple[Service, SimDisk, list[JoinReply]]:
    """Return an asynchronous run of plain averaging, and its disk and islands."""
    disk = SimDisk()
    settings = plain_settings(start_islands=len(names), **run).with_values(
        ASYNC | {"async.buffer": buffer}
    )
    service = Service.create(disk, settings, run="run", now_s=0.0)
    return service, disk, [join(service, name) for name in names]


def reopened(disk: SimDisk, now_s: float, *heard: JoinReply) -> Service:
    """Crash, and return the run as its journal says; the islands have reported."""
    disk.crash()
    service = Service.open(disk, now_s=now_s)
    hear(service, *heard, now_s=now_s)
    return service


def hear(service: Service, *islands: JoinReply, now_s: float) -> None:
    state = service.weights[0]
    for joined in islands:
        beat = Heartbeat(
            island=joined.island,
            incarnation=joined.incarnation,
            step=0,
            holds=(HeldRound(state.round, state.digest),),
        )
        service.handle(HeartbeatCall(beat), now_s)


def over(service: Service, now_s: float) -> dict[str, int]:
    """Let the grace pass; return the ages in the roster of the round that closed."""
    round = service.state.rounds[0].number
    service.tick(now_s + GRACE_S)
    header, _ = service.journal.outcome(0, round, has_body=False)
    assert header.roster is not None
    return {entry.island: entry.age for entry in header.roster.entries}


def phase_of(service: Service) -> Phase:
    return service.state.rounds[0].phase


def departing(call: PublishCall) -> PublishCall:
    header = replace(call.frame.header, kind=FrameKind.DEPARTING)
    return PublishCall(replace(call.frame, header=header))


def test_an_update_counts_once_in_a_later_round() -> None:
    """Updates 1 and 2 of a and 5 of b, each alone in its round: 0 - 1 - 2 - 5."""
    service, _, (a, b, _) = make("a", "b", "c")
    slow = update(service, b, 5.0)
    for round, value in ((1, 1.0), (2, 2.0)):
        service.handle(update(service, a, value, round=round), 3.0 * round)
        assert over(service, 3.0 * round) == {"a": 0}
    assert service.handle(slow, 9.0) is Reception.STAGED

    assert over(service, 9.0) == {"b": 2}
    assert anchor(service) == -8.0
    assert service.handle(slow, 12.0) is Reception.COMMITTED
    assert not service.staged


def test_an_update_that_closes_the_last_round_is_not_kept() -> None:
    """It arrives when the round waits no longer, and no other round opens."""
    service, _, (a, b) = make("a", "b", end_rounds=1)
    service.handle(update(service, a, 1.0), 0.0)

    answer = service.handle(update(service, b, 5.0), 2 * LEASE_S)
    assert answer is Reception.COMMITTED
    assert service.state.rounds[0].number == 2
    assert not service.staged


def test_a_restart_knows_what_rosters_listed() -> None:
    """A repeat of a counted and of a refused update changes nothing after it, too."""
    service, disk, (a, b, c) = make("a", "b", "c")
    counted = update(service, a, 1.0)
    refused = update(service, b, 1.0, base=bytes(16))
    service.handle(counted, 1.0)
    service.handle(refused, 1.0)
    over(service, 1.0)
    again = reopened(disk, 10.0, a, b, c)

    assert again.state.rounds[0].is_async
    assert again.state.counted.listed == service.state.counted.listed
    assert again.state.counted.listed[0, "b"] == ListedUpdate(
        round=1, label=1, incarnation=1
    )
    for call in (counted, refused):
        assert again.handle(call, 11.0) is Reception.COMMITTED
    assert anchor(again) == -1.0


def test_what_departs_late_stands_through_a_restart_and_counts_once() -> None:
    """Sealed for round 1, staged in round 3; its island does not come back."""
    service, disk, (a, b, _) = make("a", "b", "c")
    slow = departing(update(service, b, 5.0))
    for round in (1, 2):
        service.handle(update(service, a, 1.0, round=round), 3.0 * round)
        over(service, 3.0 * round)
    service.handle(slow, 9.0)
    service.handle(LeaveCall("b", 1), 9.0)
    again = reopened(disk, 10.0, a)

    assert set(again.state.rounds[0].staged) == {"b"}
    again.handle(update(again, a, 1.0, round=3), 11.0)
    again.tick(10.0 + 2 * LEASE_S)  # c has not come back
    assert anchor(again) == -5.0
    assert not again.staged
    once_more = reopened(disk, 100.0, a)
    assert not once_more.state.rounds[0].staged
    assert anchor(once_more) == -5.0


def test_of_two_updates_of_a_farewell_the_first_is_staged() -> None:
    """A restart keeps their order: the rest follows the flight."""
    service, disk, (a, b, _) = make("a", "b", "c")
    flight = departing(update(service, b, 1.0))
    rest = departing(update(service, b, 2.0, round=2))
    service.handle(rest, 1.0)
    assert set(service.state.rounds[0].ahead) == {"b"}
    service.handle(flight, 1.0)
    service.handle(LeaveCall("b", 1), 1.0)
    again = reopened(disk, 2.0, a)
    (round,) = again.state.rounds

    assert round.staged["b"].round == 1
    assert round.ahead["b"].round == 2


def test_the_file_of_an_update_goes_when_a_roster_has_listed_it() -> None:
    """Not before: its label alone does not say that its round is over."""
    service, disk, (a, b, _) = make("a", "b", "c")
    slow = departing(update(service, b, 5.0))
    for round in (1, 2):
        service.handle(update(service, a, 1.0, round=round), 3.0 * round)
        over(service, 3.0 * round)
    service.handle(slow, 9.0)
    service.journal.compact(0)
    assert len(disk.names("departing/")) == 1
    over(service, 9.0)
    service.journal.compact(0)

    assert disk.names("departing/") == []


def test_lost_rosters_stay_lost_after_a_restart() -> None:
    """An update that a lost round may have counted is over, and so is its file."""
    service, disk, (a, b, _) = make("a", "b", "c")
    put_back = disk.copy()
    slow = departing(update(service, b, 5.0))
    for round in (1, 2, 3):
        service.handle(update(service, a, 1.0, round=round), 3.0 * round)
        over(service, 3.0 * round)
    lost_state = service.state_frame(0)
    held = HeldRound(3, service.weights[0].digest, lost_state.receipt)
    put_back()
    again = Service.open(disk, now_s=0.0)
    again.handle(slow, 0.0)
    beat = Heartbeat(island="a", incarnation=1, step=0, holds=(held,))
    again.handle(HeartbeatCall(beat), 0.5)
    again.tick(2 * LEASE_S)
    again.handle(HeartbeatCall(replace(beat, waits_for=(0, 4))), 2 * LEASE_S)
    again.handle(RecoverCall("a", 1, lost_state, ()), 2 * LEASE_S)

    assert again.state.rounds[0].number == 4
    assert not again.state.rounds[0].staged
    assert not again.staged
    once_more = reopened(disk, 100.0)
    assert once_more.state.rounds[0].lost_through == 3
    assert not once_more.state.rounds[0].staged


@pytest.mark.parametrize(("buffer", "rounds"), [(1, 1), (2, 2), (64, 3)])
def test_states_are_written_every_ten_windows(buffer: int, rounds: int) -> None:
    """A window has as many rounds as the buffer has updates, or as are islands."""
    service, disk, (a, *_) = make("a", "b", "c", buffer=buffer)
    for round in range(1, COMPACT_ROUNDS * rounds + 1):
        assert disk.names("states/0/") == ["states/0/0"]  # all leases are over
        service.handle(update(service, a, 1.0, round=round), LEASE_S + 1.0)
        service.tick(LEASE_S + 1.0)

    assert f"states/0/{COMPACT_ROUNDS * rounds}" in disk.names("states/0/")


def test_a_crash_at_any_disk_call_of_a_round_loses_nothing() -> None:
    """Before or after each call: islands repeat, and end where none was disturbed."""
    calls = _calls_of_the_rounds()
    assert calls >= 5
    for number in range(1, calls + 1):
        for after in (False, True):
            assert _rounds_with_crash(number, after=after) == -6.5, (number, after)


def _calls_of_the_rounds() -> int:
    service, disk, islands = make("a", "b", "c")
    before = disk.calls
    _two_rounds(service, islands, 1.0)
    return disk.calls - before


def _two_rounds(service: Service, islands: list[JoinReply], now_s: float) -> None:
    """Publish what is not listed, in the order of the story, until both have counted.

    Round 1 has 1 of a and 2 of b, round 2 has 5 of c, which departs.
    """
    a, b, c = islands
    slow = departing(_on_founding(service, c, 5.0))
    for joined, value in ((a, 1.0), (b, 2.0)):
        service.handle(_on_founding(service, joined, value), now_s)
    service.tick(now_s + GRACE_S)
    service.handle(slow, now_s + GRACE_S + 1.0)
    service.tick(now_s + 2 * GRACE_S + 1.0)


def _on_founding(service: Service, joined: JoinReply, value: float) -> PublishCall:
    """Return an update that was sealed for round 1, whichever is open."""
    base = service.journal.recorded.fragments[0].digests[0]
    return update(service, joined, value, base=base)


def _rounds_with_crash(number: int, *, after: bool) -> float:
    service, disk, islands = make("a", "b", "c")
    disk.crash_at(disk.calls + number, after=after)
    try:
        _two_rounds(service, islands, 1.0)
    except ProcessDead:
        disk.crash_at(0)
        service = reopened(disk, 50.0, *islands)
        _two_rounds(service, islands, 50.0)
    digest = service.weights[0].digest
    replayed = reopened(disk, 100.0)
    assert replayed.weights[0].digest == digest
    assert not replayed.staged
    assert _times_listed(replayed) == {"a": 1, "b": 1, "c": 1}
    return anchor(replayed)


def _times_listed(service: Service) -> dict[str, int]:
    times: dict[str, int] = {}
    for roster in service.journal.recorded.rosters.values():
        for entry in _listed(roster):
            times[entry] = times.get(entry, 0) + 1
    return times


def _listed(roster: Roster) -> list[str]:
    return [entry.island for entry in roster.entries]


def test_an_idle_tick_changes_nothing() -> None:
    """Nothing is staged: the state is the very same object."""
    service, _, _ = make("a", "b")
    before = service.state
    service.change(Tick(), 5.0)

    assert service.state is before


def test_the_end_of_each_fragment_survives_a_restart() -> None:
    """Stopped in round 2: it is the last, before and after, and RunEnded beyond."""
    service, disk, (a, b) = make("a", "b")
    service.handle(update(service, a, 1.0), 1.0)
    over(service, 1.0)
    service.change(StopRequested(), 4.0)
    assert service.state.last_rounds == (2,)
    again = reopened(disk, 5.0, a, b)

    assert again.state.last_rounds == (2,)
    assert again.state.rounds[0].is_last
    assert again.state.position(5.0).last_rounds == (2,)
    again.handle(update(again, a, 1.0, round=2), 6.0)
    again.tick(6.0 + GRACE_S)  # the last round waits for b
    assert phase_of(again) is Phase.OPEN
    again.handle(update(again, b, 3.0, round=2), 9.0)
    assert phase_of(again) is Phase.ENDED
    with pytest.raises(RunEnded, match="Round 3 will not open"):
        again.handle(OutcomeCall(0, 3), 9.0)
    ended = reopened(disk, 50.0)
    assert phase_of(ended) is Phase.ENDED


def test_an_end_that_is_withdrawn_stays_so_after_a_restart() -> None:
    """`run.end_rounds=none` is an epoch and a record without rounds."""
    service, disk, (a, b) = make("a", "b")
    service.handle(update(service, a, 1.0), 1.0)
    over(service, 1.0)
    service.change(StopRequested(), 4.0)
    service.change(SettingsChanged({"run.end_rounds": None}), 5.0)
    again = reopened(disk, 6.0, a, b)

    assert again.state.last_rounds is None
    assert not again.state.rounds[0].is_last


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_end_by_tokens_is_decided_at_any_crash(mode: str) -> None:
    """Before or after each call of the disk, in the round that crosses the budget."""
    calls = _calls_of_the_end(mode)
    assert calls >= 4
    for number in range(1, calls + 1):
        for after in (False, True):
            assert _ends_after_crash(mode, number, after=after) in (1, 2)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_at_the_end_by_tokens_is_no_obstacle(mode: str) -> None:
    """Whichever write fails, the next tick completes the round and its end."""
    failures = 0
    for number in range(1, _calls_of_the_end(mode) + 1):
        disk = NoRoom(SimDisk())
        service, (a,) = _with_budget(mode, disk)
        disk.fail_in(number)
        heard: list[str] = []
        service.failing = heard.append
        service.handle(_crossing(service, a), 1.0)
        failures += any(heard)
        service.tick(5.0)
        round = service.state.rounds[0]

        # The epoch of a synchronous run ends it with round 1; fragments of the other
        # go on to their next round, which nobody but a publishes for.
        assert (round.number, service.state.last_of(0)) == (2, 1 + (mode == "async"))
        assert anchor(service) == -1.0
    assert failures >= 2


def _with_budget(mode: str, disk: Disk) -> tuple[Service, list[JoinReply]]:
    """Return a run of one island that ends with 100 tokens."""
    settings = plain_settings(end_tokens=100)
    if mode == "async":
        settings = settings.with_values(ASYNC | {"async.buffer": 1})
    service = Service.create(disk, settings, run="run", now_s=0.0)
    return service, [join(service, "a")]


def _crossing(service: Service, joined: JoinReply) -> PublishCall:
    """Return an update of round 1 whose tokens end the run."""
    call = _on_founding(service, joined, 1.0)
    progress = TrainingProgress(inner_steps=200, tokens=200)
    header = replace(call.frame.header, progress=progress)
    return PublishCall(replace(call.frame, header=header))


def _calls_of_the_end(mode: str) -> int:
    disk = SimDisk()
    service, (a,) = _with_budget(mode, disk)
    before = disk.calls
    service.handle(_crossing(service, a), 1.0)
    return disk.calls - before


def _ends_after_crash(mode: str, number: int, *, after: bool) -> int | None:
    disk = SimDisk()
    service, (a,) = _with_budget(mode, disk)
    disk.crash_at(disk.calls + number, after=after)
    try:
        service.handle(_crossing(service, a), 1.0)
    except ProcessDead:
        disk.crash_at(0)
        service = reopened(disk, 50.0, a)
        service.handle(_crossing(service, a), 50.0)
        service.tick(50.0)
    last = service.state.last_of(0)
    again = reopened(disk, 100.0, a)
    again.tick(100.0)
    assert again.state.last_of(0) == last
    return last
