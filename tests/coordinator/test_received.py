"""What a coordinator knows of a run that came from a store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.coordinator import Service
from atoll.coordinator.move import Arrival, moved_run_of, receive, require_arrived
from atoll.errors import CorruptError, LeaseLost, OutcomeLost, Refused, UsageError
from atoll.exchange import CoordinatorExchange, Frame
from atoll.exchange.bucket import BucketReader, StoreExchange, documents, keys
from atoll.exchange.bucket.create import make_run
from atoll.exchange.bucket.documents import ControlDocument, packed
from atoll.exchange.bucket.move import MovedRun, MoveOut
from atoll.island.join import FollowingExchange, RunLocation
from atoll.journal import Journal
from atoll.protocol import JoinRequest, Reception
from atoll.protocol.events import MoveRequested
from atoll.protocol.rounds import Phase
from atoll.simulate import SimDisk
from atoll.simulate.scheduler import ProcessDead
from atoll.store import MemoryStore
from atoll.testing.fixtures import (
    MODEL,
    Unhurried,
    WaitingTime,
    anchor_of,
    enter,
    outcome_of,
    plain_settings,
    update_of,
    verdicts_of,
)
from atoll.wire import FrameKind
from tests.exchange.test_contract import DirectLine
from tests.journal.runs import view

URL, TARGET = "memory://lagoon", "https://reef.example:4711"
NONCE = "0f" * 16


@dataclass
class Journey:
    """A run in a store, and the coordinator that it goes to."""

    store: MemoryStore = field(default_factory=MemoryStore)
    time: WaitingTime = field(default_factory=WaitingTime)
    disk: SimDisk = field(default_factory=SimDisk)
    said: int = 0

    def make(self, **run: object) -> Journey:
        make_run(self.store, plain_settings(**run), url=URL)
        return self

    def island(self, name: str) -> FollowingExchange:
        """Attach an island that follows."""
        key, nonce = name.encode(), f"once {name}".encode()

        def open(target: str) -> RunLocation:
            service = Service.open(self.disk, now_s=1.0)
            return CoordinatorExchange(DirectLine(service), key=key, nonce=nonce)

        reader = BucketReader.open(self.store, self.time, url=URL)
        place: StoreExchange = Unhurried(reader, key=key, nonce=nonce)
        return FollowingExchange(place, open, pause=self.time.sleep)

    def say(self, action: str, **more: Any) -> None:
        """Say something as an operator."""
        run = BucketReader.open(self.store, self.time, url=URL).run
        words = ControlDocument(**({"run": run, "action": action, "values": {}} | more))
        self.said += 1
        key = keys.control(self.said)
        assert self.store.put_new(key, packed(documents.CONTROL, words, key))

    def begin(self) -> MoveOut:
        out = MoveOut.open(self.store, self.time, url=URL)
        out.begin(TARGET, NONCE)
        return out

    def come(self) -> Service:
        """Take the run to the coordinator, and return that."""
        out = self.begin()
        receive(self.disk, out)
        self.disk.crash(is_power_cut=True)  # nothing is lost any more
        assert out.settle()
        return Service.open(self.disk, now_s=0.0)


def two_islands(it: Journey) -> list[tuple[FollowingExchange, Any]]:
    found = []
    for name in "ab":
        exchange = it.island(name)
        found.append((exchange, enter(exchange, name)))
    return found


def test_a_run_goes_on_where_it_was() -> None:
    """Rounds, weights, outcomes, progress and settings are those of the store."""
    it = Journey().make(start_islands=2)
    (a, first), (b, second) = two_islands(it)
    for round in (1, 2, 3):
        a.publish(update_of(a, first, 1.0, round=round))
        b.publish(update_of(b, second, 3.0, round=round))
        assert outcome_of(a, round).has_body
        assert outcome_of(b, round).has_body
    it.say("set", values={"run.patience": 5.0})
    late = update_of(a, first, 1.0, round=4)
    service = it.come()

    state = service.state
    assert (state.run, state.epoch) == (first.run, 1)
    assert state.settings.run.patience == 5.0
    assert [round.number for round in state.rounds] == [4]
    assert state.rounds[0].phase is Phase.OPEN
    assert len(state.rounds[0].bases) == 4
    assert [(m.island, m.slot) for m in state.members.known.values()] == [
        *(("a", 0), ("b", 1)),
    ]
    assert set(state.counted.by_island) == {"a", "b"}
    assert a.publish(late).name == "STAGED"
    assert anchor_of(a) == -6.0
    assert outcome_of(b, 3).has_body
    assert outcome_of(b, 2).has_body
    with pytest.raises(OutcomeLost, match="Take the fragment's state"):
        b.outcome(0, 1, wait_s=0.0)


def test_what_has_come_can_go_on() -> None:
    """A run that leaves again takes along what it came with."""
    it = Journey().make(start_islands=2)
    (a, first), (b, second) = two_islands(it)
    for round in (1, 2, 3):
        a.publish(update_of(a, first, 1.0, round=round))
        b.publish(update_of(b, second, 3.0, round=round))
        assert outcome_of(a, round).has_body
        assert outcome_of(b, round).has_body
    service = it.come()
    came = MoveOut.open(it.store, it.time, url=URL)
    came.begin(TARGET, NONCE)
    brought = came.belongings()

    hour_s = 3600.0  # so late that nobody is waited for
    service.change(MoveRequested("memory://reef", NONCE), hour_s)
    has = moved_run_of(service, hour_s)
    assert (has.settings, has.run) == (brought.settings, brought.run)
    assert (has.fragments, has.rosters) == (brought.fragments, brought.rosters)
    for mine, its in zip(has.members, brought.members, strict=True):
        assert (mine.slot, mine.key, mine.nonce) == (its.slot, its.key, its.nonce)


def test_what_the_gone_have_left_counts_before_the_run_comes() -> None:
    """Who stays publishes again what it has under way, or carries it."""
    it = Journey().make(start_islands=2)
    (a, first), (b, second) = two_islands(it)
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 3.0))
    b.publish(update_of(b, second, 5.0, round=2, kind=FrameKind.DEPARTING))
    b.leave("b", 1)
    service = it.come()

    assert service.state.rounds[0].number == 3
    assert service.state.members.known["b"].has_left
    assert a.publish(update_of(a, first, 1.0, round=2)) is Reception.COMMITTED
    assert {name: each.name for name, each in verdicts_of(a, 2).items()} == {
        "a": "LATE",
        "b": "COUNTED",
    }
    assert anchor_of(a) == -7.0  # the mean of 1 and 3, and 5


def test_what_operators_have_said_is_in_force() -> None:
    """A pause, a last round and an eviction; a resumed run is not paused."""
    it = Journey().make(start_islands=2)
    _, (b, second) = two_islands(it)
    learnt = update_of(b, second, 3.0)
    it.say("pause")
    it.say("resume")
    it.say("pause")
    it.say("evict", island="b", incarnation=1)
    it.say("stop", last_round=2)
    service = it.come()

    assert service.state.is_paused
    assert service.state.last_round == 2
    assert service.state.members.known["b"].left_because == "evicted"
    b.publish(learnt)
    with pytest.raises(LeaseLost, match="evicted by an operator"):
        b.outcome(0, 1, wait_s=1.0)


def test_a_slot_that_nobody_has_is_free() -> None:
    """A store may have gaps: an island may die between its slot and its document."""
    it = Journey().make(start_islands=1)
    enter(it.island("a"), "a")
    assert it.store.put_new(keys.slot(1), [b"nobody"])
    enter(it.island("c"), "c")
    service = it.come()
    assert {m.island: m.slot for m in service.state.members.known.values()} == {
        "a": 0,
        "c": 2,
    }
    slots = []
    for name in ("d", "e"):
        line = DirectLine(service)
        exchange = CoordinatorExchange(line, key=name.encode(), nonce=b"once")
        slots.append(exchange.join(JoinRequest(model=MODEL, island=name)).slot)
    assert slots == [1, 3]


def test_a_run_that_waits_for_islands_waits_on() -> None:
    """One that has no round yet begins at its new place."""
    it = Journey().make(start_islands=2)
    a = it.island("a")
    first = enter(a, "a")
    service = it.come()
    assert [round.phase for round in service.state.rounds] == [Phase.WAITING]
    assert anchor_of(a) == 0.0
    assert first.slot == 0


def test_a_crash_on_the_way_leaves_what_can_be_thrown_away() -> None:
    """Whatever is half there, the journal that is made after it is the same."""
    it = Journey().make(start_islands=2)
    (a, first), (b, second) = two_islands(it)
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 3.0))
    b.publish(update_of(b, second, 5.0, round=2, kind=FrameKind.DEPARTING))
    b.leave("b", 1)
    out, call, whole = it.begin(), 0, SimDisk()
    receive(whole, out)
    expected, has_crashed = view(Journal.open(whole)), True
    while has_crashed:
        call += 1
        disk = SimDisk(rng=random.Random(call))
        disk.crash_at(call, after=bool(call % 2))
        has_crashed = _crashes(disk, out)
        disk.crash(is_power_cut=True)
        for name in disk.names(""):
            disk.remove(name)
        receive(disk, out)
        assert view(Journal.open(disk)) == expected
    # States, bodies, updates, and each record that is durable by itself.
    assert call > 10


def _crashes(disk: SimDisk, out: MoveOut) -> bool:
    try:
        receive(disk, out)
    except ProcessDead:
        return True
    finally:
        disk.crash_at(0)
    return False


class Wrong:
    """A store whose belongings are not quite what they should be."""

    def __init__(self, out: MoveOut, **changes: Any) -> None:
        self._out, self._changes = out, changes
        self.agreed, self.parts = out.agreed, out.parts

    def belongings(self) -> MovedRun:
        return replace(self._out.belongings(), **self._changes)

    def state(self, fragment: int) -> Frame:
        frame = self._out.state(fragment)
        return Frame(frame.header, np.zeros_like(frame.body) + np.uint8(1))


def test_what_does_not_fit_does_not_come() -> None:
    """States of another size or with other bits are refused before anything counts."""
    it = Journey().make(start_islands=2)
    enter(it.island("a"), "a")
    out = it.begin()
    with pytest.raises(CorruptError):
        receive(SimDisk(), Wrong(out))
    fragments = out.belongings().fragments
    with pytest.raises(CorruptError, match=r"2 fragments come along.*--back"):
        receive(SimDisk(), Wrong(out, fragments=fragments * 2))
    ahead = (replace(fragments[0], round=7),)
    with pytest.raises(Refused):
        receive(SimDisk(), Wrong(out, fragments=ahead))
    receive(it.disk, out)
    with pytest.raises(UsageError, match="There is a journal"):
        receive(it.disk, out)


@contextmanager
def arriving(directory: Path, target: str = TARGET) -> Iterator[Arrival]:
    arrival = Arrival(directory, source=URL, target=target)
    try:
        yield arrival
    finally:
        arrival.close()


def test_a_directory_is_somebodys_from_the_beginning_to_the_end(
    tmp_path: Path,
) -> None:
    """Two commands do not write at once; what is half there is written anew."""
    it, directory = Journey().make(start_islands=2), tmp_path / "run"
    enter(it.island("a"), "a")
    out = it.begin()
    with arriving(directory) as first, arriving(directory) as second:
        first.prepare()
        with pytest.raises(UsageError, match="belongs to process"):
            second.prepare()
        first.receive(out)
        first.receive(out)
        with pytest.raises(UsageError, match=r"is being moved.*Run .*--back"):
            require_arrived(directory)
    with arriving(directory) as again:
        assert again.ticket == first.ticket
        assert again.is_begun
        again.settle()
        again.settle()
    require_arrived(directory)
    with arriving(directory) as over:
        assert over.has_come
    with pytest.raises(UsageError, match="holds a run already"):
        Arrival(directory, source=URL, target="https://reef.example:1")


def test_a_directory_forgets_a_run_that_stays(tmp_path: Path) -> None:
    """Another may come there then; without what was received nothing settles."""
    it, directory = Journey().make(start_islands=2), tmp_path / "run"
    enter(it.island("a"), "a")
    with arriving(directory) as arrival:
        arrival.prepare()
        arrival.receive(it.begin())
        arrival.forget()
    require_arrived(directory)
    with arriving(directory, "https://reef.example:1") as other:
        other.prepare()
        with pytest.raises(CorruptError, match="Put it back from a copy"):
            other.settle()
