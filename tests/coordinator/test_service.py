"""The coordinator with its journal: what it promises, and what a restart keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from atoll import RunEnded
from atoll.coordinator import Service
from atoll.errors import CorruptError, DiskFull, LeaseLost, Refused
from atoll.exchange import Frame, Outcome
from atoll.exchange.calls import (
    HeartbeatCall,
    JoinCall,
    LeaveCall,
    OutcomeCall,
    PublishCall,
    StateCall,
)
from atoll.protocol import (
    Heartbeat,
    HeldRound,
    JoinReply,
    JoinRequest,
    Phase,
    Reception,
)
from atoll.protocol.events import Leave, PauseRequested, SettingsChanged, StopRequested
from atoll.simulate import ProcessDead, SimDisk
from atoll.testing.fixtures import MODEL, plain_settings
from atoll.wire import FrameKind, Verdict, with_body
from tests.coordinator.desk import anchor, founding, join, update


def make(**run: object) -> tuple[Service, SimDisk]:
    """Return a run of plain averaging, and its disk."""
    disk = SimDisk()
    return Service.create(disk, plain_settings(**run), run="run", now_s=0.0), disk


def hear(service: Service, *joined: JoinReply, now_s: float = 2.0) -> None:
    """Let islands say that they live: after a restart a run waits for that."""
    for each in joined:
        holds = (HeldRound(service.weights[0].round, service.weights[0].digest),)
        beat = Heartbeat(
            island=each.island, incarnation=each.incarnation, step=0, holds=holds
        )
        service.handle(HeartbeatCall(beat), now_s)


def outcome(service: Service, round: int) -> Outcome:
    reply = service.handle(OutcomeCall(0, round), 0.0)
    assert isinstance(reply, Outcome)
    return reply


def test_a_round_of_two_islands() -> None:
    """Pseudo-gradients 1 and 3, mean 2, lr 1: the anchor goes from 0 to -2."""
    service, _ = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    assert service.handle(update(service, a, 1.0), 1.0) is Reception.STAGED
    assert service.handle(OutcomeCall(0, 1), 1.0) is None
    service.handle(update(service, b, 3.0), 2.0)

    assert anchor(service) == -2.0
    roster = outcome(service, 1).agreed.header.roster
    assert roster is not None
    assert {entry.verdict for entry in roster.entries} == {Verdict.COUNTED}


def test_a_restart_keeps_everything_committed() -> None:
    """State, digest, round, membership and outcome are what they were, to the bit."""
    service, disk = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    service.handle(update(service, a, 1.0), 1.0)
    service.handle(update(service, b, 3.0), 1.0)
    before = outcome(service, 1).agreed
    disk.crash()
    again = Service.open(disk, now_s=50.0)

    assert again.weights[0].digest == service.weights[0].digest
    assert anchor(again) == -2.0
    assert outcome(again, 1).agreed.header == before.header
    assert outcome(again, 1).agreed.body.tobytes() == before.body.tobytes()
    assert again.state.members.live(50.0) == {"a", "b"}


def test_what_was_staged_and_not_committed_is_sent_again() -> None:
    """After a restart the island's repeat is wanted, and counts once."""
    service, disk = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    call = update(service, a, 1.0)
    service.handle(call, 1.0)
    disk.crash()
    again = Service.open(disk, now_s=2.0)
    hear(again, a, b)
    again.handle(call, 2.0)
    again.handle(call, 2.0)
    again.handle(update(again, b, 3.0), 2.0)

    assert anchor(again) == -2.0
    assert again.handle(call, 2.0) is Reception.COMMITTED


def test_a_departing_update_survives_a_restart_and_counts() -> None:
    """It was flushed before it was acknowledged; its owner has gone."""
    service, disk = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    service.handle(update(service, b, 3.0, kind=FrameKind.DEPARTING), 1.0)
    service.handle(LeaveCall("b", b.incarnation), 1.0)
    disk.crash()
    again = Service.open(disk, now_s=2.0)
    hear(again, a)
    again.handle(update(again, a, 1.0), 2.0)

    assert anchor(again) == -2.0


def test_a_crash_at_any_disk_call_of_a_round_loses_nothing() -> None:
    """Before or after each call: the repeat ends where an undisturbed run ends."""
    calls = _calls_of_a_round()
    assert calls >= 3
    for number in range(1, calls + 1):
        for after in (False, True):
            assert _round_with_crash(number, after=after) == -2.0, (number, after)


def _calls_of_a_round() -> int:
    service, disk = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    before = disk.calls
    service.handle(update(service, a, 1.0), 1.0)
    service.handle(update(service, b, 3.0), 1.0)
    return disk.calls - before


def _round_with_crash(number: int, *, after: bool) -> float:
    service, disk = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    calls = [update(service, a, 1.0), update(service, b, 3.0)]
    disk.crash_at(disk.calls + number, after=after)
    for call in calls:
        try:
            service.handle(call, 1.0)
        except ProcessDead:
            disk.crash()
            service = Service.open(disk, now_s=2.0)
            hear(service, a, b)
            for repeat in calls:
                service.handle(repeat, 2.0)
            break
    assert service.state.rounds[0].number == 2
    return anchor(service)


def test_a_full_disk_commits_nothing_and_goes_on_when_there_is_room() -> None:
    """Nobody learns of an outcome that is not durable."""
    service, disk = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    service.handle(update(service, a, 1.0), 1.0)
    disk.is_full = True
    service.handle(update(service, b, 3.0), 1.0)
    assert service.handle(OutcomeCall(0, 1), 1.0) is None
    disk.is_full = False
    service.tick(3.0)

    assert outcome(service, 1).agreed.header.round == 1
    disk.crash()
    assert anchor(Service.open(disk, now_s=4.0)) == -2.0


def test_joining_needs_a_disk_that_takes_it() -> None:
    """A membership that is not durable is not given."""
    service, disk = make()
    disk.is_full = True
    with pytest.raises(DiskFull):
        join(service, "a")
    disk.is_full = False

    assert join(service, "a").incarnation == 1


def test_a_repeated_joining_is_one_record() -> None:
    """Asking twice, also across a restart, is the same life."""
    service, disk = make()
    first = join(service, "a")
    assert join(service, "a").incarnation == first.incarnation
    disk.crash()
    again = Service.open(disk, now_s=1.0)

    assert join(again, "a").incarnation == first.incarnation
    assert join(again, "a", nonce=b"2").incarnation == first.incarnation + 1


def test_a_repeated_founding_is_one_founding() -> None:
    """A founder whose reply was lost brings the same states again."""
    service, _ = make()
    call = JoinCall(JoinRequest(model=MODEL, island="a"), b"a", b"1")
    joined = service.handle(call, 0.0)
    assert isinstance(joined, JoinReply)
    service.handle(founding(joined), 0.0)

    assert service.handle(founding(joined), 0.0) == service.state.position(0.0)


def test_an_epoch_survives_a_restart() -> None:
    """A changed quorum is in force, and numbered."""
    service, disk = make()
    join(service, "a")
    service.change(SettingsChanged({"run.quorum": 2}), 1.0)
    disk.crash()
    again = Service.open(disk, now_s=2.0)

    assert (again.state.epoch, again.state.settings.run.quorum) == (1, 2)


def test_a_pause_survives_a_restart() -> None:
    """A coordinator that crashes does not undo what an operator has said."""
    service, disk = make()
    join(service, "a")
    for is_paused in (True, False, True):
        service.change(PauseRequested(is_paused=is_paused), 1.0)
        disk.crash()
        service = Service.open(disk, now_s=2.0)

        assert service.state.is_paused is is_paused


@pytest.mark.parametrize("is_founded", [False, True])
def test_a_stop_before_any_update_survives_a_restart(is_founded: bool) -> None:
    """No round opens, whoever comes; a new end undoes it, and that survives too."""
    service, disk = make()
    if is_founded:
        join(service, "a")
    service.change(StopRequested(), 1.0)
    assert service.state.last_round == 0
    disk.crash()
    again = Service.open(disk, now_s=2.0)
    assert again.state.last_round == 0
    joined = join(again, "b")
    assert again.state.rounds[0].phase is Phase.ENDED
    assert joined.position.last_round == 0
    with pytest.raises(RunEnded, match="Round 1 will not open"):
        again.handle(OutcomeCall(0, 1), 3.0)

    again.change(SettingsChanged({"run.end_rounds": 5}), 3.0)
    disk.crash()
    assert Service.open(disk, now_s=4.0).state.last_round == 5


def test_an_end_that_was_set_is_no_obstacle_to_a_stop() -> None:
    """Stopped after `end_rounds` was set to ten: the run does not go on to ten."""
    service, disk = make()
    join(service, "a")
    service.change(SettingsChanged({"run.end_rounds": 10}), 1.0)
    service.change(StopRequested(), 1.0)
    disk.crash()
    again = Service.open(disk, now_s=2.0)

    assert (again.state.last_round, again.state.epoch) == (0, 2)


def test_an_evicted_island_is_told_so_also_after_a_restart() -> None:
    """By whom, what becomes of its work, and what to do."""
    service, disk = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    service.handle(update(service, b, 3.0), 1.0)
    service.change(Leave("b", b.incarnation, reason="evicted"), 1.0)
    said = "'b' was evicted by an operator.*published counts.*start it again"
    beat = HeartbeatCall(Heartbeat(island="b", incarnation=b.incarnation, step=0))
    with pytest.raises(LeaseLost, match=said):
        service.handle(beat, 1.0)
    service.handle(update(service, a, 1.0), 2.0)
    assert anchor(service) == -2.0

    disk.crash()
    again = Service.open(disk, now_s=3.0)
    with pytest.raises(LeaseLost, match=said):
        again.handle(beat, 3.0)
    assert join(again, "b", nonce=b"2").incarnation == 2


def test_values_that_are_not_finite_are_refused_though_their_digest_is_right() -> None:
    """Sent again they would be the same; who looks on is told, and nothing changes."""
    service, _ = make(start_islands=2)
    a, _ = join(service, "a"), join(service, "b")
    good = update(service, a, 1.0).frame
    body = np.array([1.0, np.inf, 1.0], np.float32).view(np.uint8)
    bad = Frame(with_body(good.header, body), body)
    with pytest.raises(Refused, match="sealed with values that are not finite"):
        service.handle(PublishCall(bad), 1.0)

    assert service.state.rounds[0].staged == {}
    ((header, reason),) = service.refusals
    assert header.island == "a"
    assert "not finite" in reason
    assert service.handle(PublishCall(good), 1.0) is Reception.STAGED


def test_hostile_frames_change_nothing() -> None:
    """Wrong codec, wrong size, flipped bit, zombie: each is refused by name."""
    service, _ = make(start_islands=2)
    a, _ = join(service, "a"), join(service, "b")
    good = update(service, a, 1.0).frame
    half = with_body(
        replace(good.header, codec="bf16", pieces=(), body_bytes=0), bytes(6)
    )
    with pytest.raises(Refused, match="elements in bf16 is not what fragment 0 takes"):
        service.handle(PublishCall(Frame(half, np.zeros(6, np.uint8))), 1.0)
    flipped = Frame(good.header, good.body ^ np.uint8(1))
    with pytest.raises(CorruptError):
        service.handle(PublishCall(flipped), 1.0)
    zombie = Heartbeat(island="a", incarnation=9, step=0)
    with pytest.raises(LeaseLost):
        service.handle(HeartbeatCall(zombie), 1.0)
    with pytest.raises(Refused, match="Fragment 7 does not exist"):
        service.handle(StateCall(7), 1.0)

    assert service.state.rounds[0].staged == {}


def test_no_round_opens_beyond_the_last() -> None:
    """Asking for it says that the run has ended, also after a restart."""
    service, disk = make(end_rounds=1)
    a = join(service, "a")
    service.handle(update(service, a, 1.0), 1.0)
    with pytest.raises(RunEnded, match="ended with round 1"):
        service.handle(OutcomeCall(0, 2), 1.0)
    disk.crash()
    again = Service.open(disk, now_s=2.0)

    with pytest.raises(RunEnded):
        again.handle(OutcomeCall(0, 2), 2.0)


def test_a_repeated_joining_without_a_name_is_the_same_life() -> None:
    """The run has given it a name, which who asks again does not know yet."""
    service, _ = make(start_islands=2)
    call = JoinCall(JoinRequest(model=MODEL), b"key", b"nonce")
    first, again = service.handle(call, 0.0), service.handle(call, 1.0)

    assert isinstance(first, JoinReply)
    assert isinstance(again, JoinReply)
    assert (first.island, first.incarnation) == (again.island, again.incarnation)


def test_a_stop_waits_for_what_has_departed_ahead() -> None:
    """An update that was answered as staged counts, though it is for the next round."""
    service, _ = make(start_islands=2)
    a, b = join(service, "a"), join(service, "b")
    service.handle(update(service, a, 1.0, kind=FrameKind.DEPARTING), 1.0)
    service.handle(update(service, a, 5.0, round=2, kind=FrameKind.DEPARTING), 1.0)
    service.handle(LeaveCall("a", a.incarnation), 1.0)
    service.change(StopRequested(), 1.5)
    service.handle(update(service, b, 3.0), 2.0)

    assert service.state.last_round == 2
    assert anchor(service) == -2.0
    service.handle(update(service, b, 7.0, round=2), 3.0)
    assert anchor(service) == -8.0
    assert service.state.rounds[0].phase is Phase.ENDED


def test_a_run_that_was_stopped_too_early_waits_for_its_islands_again() -> None:
    """A new end opens no round before as many as it takes have joined."""
    service, _ = make(start_islands=2)
    join(service, "a")
    service.change(StopRequested(), 1.0)
    service.change(SettingsChanged({"run.end_rounds": 5}), 2.0)
    phases = [service.state.rounds[0].phase]
    join(service, "b")
    phases.append(service.state.rounds[0].phase)

    assert phases == [Phase.WAITING, Phase.OPEN]
