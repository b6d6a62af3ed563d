"""Islands follow a run that moves, with all their updates in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

import pytest

from atoll.coordinator import Service
from atoll.coordinator.move import moved_run_of
from atoll.errors import (
    LeaseLost,
    OutcomeLost,
    Refused,
    RunMoved,
    Unreachable,
    UsageError,
)
from atoll.exchange import CoordinatorExchange, Exchange
from atoll.exchange.api.bodies import MAX_LARGE_BYTES, dump, load
from atoll.exchange.bucket import BucketReader, StoreExchange
from atoll.exchange.bucket.move import (
    MOVED_RUN,
    MovedRun,
    MoveIn,
    give_up,
    is_here,
    require_free,
)
from atoll.island.join import FollowingExchange, RunLocation
from atoll.protocol import Heartbeat, HeldRound, JoinReply, JoinRequest, Reception
from atoll.protocol.events import (
    Event,
    MoveCancelled,
    MoveCompleted,
    MoveRequested,
    PauseRequested,
    SettingsChanged,
    Tick,
)
from atoll.settings import RunSettings
from atoll.simulate import SimDisk
from atoll.store import MemoryStore, Store
from atoll.testing import EXCHANGE_CLAIMS
from atoll.testing.exchange_contract import Attach, Claim
from atoll.testing.fixtures import (
    MODEL,
    Unhurried,
    WaitingTime,
    anchor_of,
    enter,
    plain_settings,
    verdicts_of,
)
from atoll.testing.fixtures import update_of as an_update
from atoll.wire import FrameKind
from tests.exchange.test_contract import DirectLine, at_a_coordinator

URL = "memory://lagoon"
NONCE = "0f" * 16


@dataclass
class Journey:
    """A run at a coordinator, and the store that it goes to."""

    service: Service
    store: Store
    time: WaitingTime = field(default_factory=WaitingTime)
    opened: list[str] = field(default_factory=list)
    fails: list[Exception] = field(default_factory=list)

    def island(self, name: str, *, nonce: bytes = b"nonce") -> FollowingExchange:
        """Attach an island that follows."""
        key, own = name.encode(), name.encode() + nonce
        line = DirectLine(self.service)
        place = CoordinatorExchange(line, key=key, nonce=own)

        def open(target: str) -> RunLocation:
            self.opened.append(target)
            if self.fails:
                raise self.fails.pop()
            return self.meet(key, own)

        return FollowingExchange(place, open, pause=self.time.sleep)

    def meet(self, key: bytes, nonce: bytes) -> StoreExchange:
        reader = BucketReader.open(self.store, self.time, url=URL)
        return Unhurried(reader, key=key, nonce=nonce)

    def say(self, *events: object) -> None:
        for event in events:
            self.service.change(event, 1.0)  # type: ignore[arg-type]

    def belongings(self) -> MovedRun:
        """Return what comes along, as it travels."""
        said = MOVED_RUN.write(moved_run_of(self.service, 1.0))
        data = dump(said, name="belongings", max_bytes=MAX_LARGE_BYTES)
        return MOVED_RUN.read(load(data, name="belongings"), "belongings")

    def bring(self) -> MoveIn:
        arriving = MoveIn(self.store, self.time, self.belongings())
        arriving.bring(
            self.service.state_frame,
            self.service.journal.constants,
        )
        return arriving

    def move(self) -> None:
        """Take the run to the store."""
        self.say(MoveRequested(URL, NONCE))
        self.bring().settle()
        self.say(MoveCompleted(URL))


def begun(store: Store | None = None, **run: object) -> Journey:
    """Return a run that may go to a store; in memory if none is given."""
    settings = plain_settings(**run)
    service = Service.create(SimDisk(), settings, run="run", now_s=0.0)
    return Journey(service, store or MemoryStore())


def beat(exchange: FollowingExchange, joined: JoinReply, round: int) -> None:
    """Say what is held, as a host does."""
    held = HeldRound(round, exchange.state(0).header.base)
    exchange.heartbeat(
        Heartbeat(island=joined.island, incarnation=1, step=0, holds=(held,))
    )


@pytest.mark.parametrize("claim", EXCHANGE_CLAIMS, ids=lambda claim: claim.__name__)
def test_who_follows_is_an_exchange(claim: Claim) -> None:
    """All that islands may rely on holds, though nothing moves."""

    def open_run(settings: RunSettings) -> Attach:
        attach = at_a_coordinator(settings)

        def following(*, key: bytes) -> Exchange:
            place = attach(key=key)
            assert isinstance(place, CoordinatorExchange)
            return FollowingExchange(place, never, pause=never)

        return following

    claim(open_run)


def never(*_: object) -> NoReturn:
    raise AssertionError("the run has not moved")


def test_an_update_that_was_not_confirmed_counts_where_the_run_is() -> None:
    """Half of a round's updates are sent before the move, and half after it."""
    it = begun(start_islands=2)
    a, b = it.island("a"), it.island("b")
    first, second = enter(a, "a"), enter(b, "b")
    a.publish(an_update(a, first, 1.0))
    b.publish(an_update(b, second, 3.0))
    assert anchor_of(a) == -2.0  # the mean of 1 and 3
    assert verdicts_of(a, 1) == verdicts_of(b, 1)
    beat(a, first, 1)
    beat(b, second, 1)
    a.publish(an_update(a, first, 1.0, round=2))
    late = an_update(b, second, 3.0, round=2)
    it.move()

    assert b.publish(late) is Reception.STAGED
    assert a.outcome(0, 2, wait_s=1.0) is not None
    assert anchor_of(a) == anchor_of(b) == -4.0
    assert {name: each.name for name, each in verdicts_of(b, 2).items()} == {
        "a": "COUNTED",
        "b": "COUNTED",
    }
    assert it.opened == [URL, URL]  # each of them once


def test_outcomes_of_the_last_rounds_come_along() -> None:
    """Who has not taken an outcome learns who counted, and takes the state."""
    it = begun()
    a = it.island("a")
    joined = enter(a, "a")
    for round in range(1, 5):
        a.publish(an_update(a, joined, 1.0, round=round))
    it.move()

    outcome = a.outcome(0, 4, wait_s=0.0)
    assert outcome is not None
    assert not outcome.has_body
    assert outcome.agreed.header.roster is not None
    assert anchor_of(a) == -4.0
    with pytest.raises(OutcomeLost, match=r"did not come along\. Take the"):
        a.outcome(0, 1, wait_s=0.0)


def test_work_of_who_has_gone_comes_along() -> None:
    """A departing update that waits for its round counts before the run goes.

    Below the quorum as well: nobody would publish it again.
    """
    it = begun(start_islands=2, quorum=2)
    a, b = it.island("a"), it.island("b")
    first, second = enter(a, "a"), enter(b, "b")
    a.publish(an_update(a, first, 1.0, kind=FrameKind.DEPARTING))
    a.leave("a", first.incarnation)
    missed = an_update(b, second, 3.0)
    beat(b, second, 0)
    it.move()

    assert b.publish(missed) is Reception.COMMITTED
    assert {name: each.name for name, each in verdicts_of(b, 1).items()} == {
        "a": "COUNTED",
        "b": "LATE",
    }
    assert anchor_of(b) == -1.0


def test_a_move_closes_only_rounds_with_work_of_who_has_gone() -> None:
    """Also while the run is paused, and also after a restart in between."""
    it = begun(start_islands=2, quorum=2)
    a, b, c = it.island("a"), it.island("b"), it.island("c")
    joined = [enter(each, name) for each, name in ((a, "a"), (b, "b"), (c, "c"))]
    b.publish(an_update(b, joined[1], 3.0))
    it.say(PauseRequested(is_paused=True), MoveRequested(URL, NONCE))
    assert it.service.state.rounds[0].number == 1
    it.say(MoveCancelled(URL))
    a.publish(an_update(a, joined[0], 1.0, kind=FrameKind.DEPARTING))
    a.publish(an_update(a, joined[0], 5.0, round=2, kind=FrameKind.DEPARTING))
    a.leave("a", joined[0].incarnation)
    assert it.service.state.rounds[0].number == 1  # paused
    it.say(MoveRequested(URL, NONCE))

    assert it.service.state.rounds[0].number == 3
    assert it.belongings().fragments[0].round == 2
    it.bring().settle()
    it.say(MoveCompleted(URL))
    assert {name: each.name for name, each in verdicts_of(c, 1).items()} == {
        "a": "COUNTED",
        "b": "COUNTED",
    }


def test_a_coordinator_that_crashes_during_a_move_closes_what_it_has_to() -> None:
    """The departed are on its disk; a live island publishes again where the run is."""
    disk = SimDisk()
    settings = plain_settings(start_islands=2, quorum=2)
    it = Journey(Service.create(disk, settings, run="run", now_s=0.0), MemoryStore())
    a, b = it.island("a"), it.island("b")
    first, second = enter(a, "a"), enter(b, "b")
    a.publish(an_update(a, first, 1.0, kind=FrameKind.DEPARTING))
    a.leave("a", first.incarnation)
    it.service.defer_to(lambda close: None, run_concurrently=never)  # too slow
    missed = an_update(b, second, 3.0)
    it.say(MoveRequested(URL, NONCE))
    with pytest.raises(Unreachable, match="is being closed"):
        it.belongings()
    disk.crash()
    it.service = Service.open(disk, now_s=3600.0)
    it.service.change(Tick(), 7200.0)
    moved_run = moved_run_of(it.service, 7200.0)

    assert moved_run.fragments[0].round == 1
    assert moved_run.fragments[0].counted[0].island == "a"
    assert missed.header.round == 1


def test_what_operators_have_said_comes_along() -> None:
    """Epochs, the pause and the end are as they were."""
    it = begun(start_islands=2)
    a = it.island("a")
    enter(a, "a")
    it.say(
        SettingsChanged({"run.patience": 5.0}), SettingsChanged({"run.end_rounds": 9})
    )
    it.say(PauseRequested(is_paused=True))
    it.move()

    view = BucketReader.open(it.store, it.time, url=URL).view
    assert (view.settings.run.patience, view.state.epoch) == (5.0, 2)
    assert (view.state.last_round, view.state.is_paused) == (9, True)
    assert view.settings.fingerprint == it.service.state.settings.fingerprint


def test_a_name_stays_with_its_key() -> None:
    """The next life of an island takes its name at once; a stranger does not."""
    it = begun()
    a = it.island("a")
    enter(a, "a")
    it.move()
    again, stranger = it.island("a", nonce=b"2"), it.island("a", nonce=b"3")
    assert enter(again, "a").incarnation == 2
    assert enter(again, "a").slot == 0

    with pytest.raises(LeaseLost, match="a later incarnation has its name"):
        a.state(0)
    with pytest.raises(LeaseLost, match=r"is no longer a member of the run"):
        stranger.join(JoinRequest(model=MODEL, island="a", incarnation=1))


def test_who_cannot_get_there_keeps_its_work_and_tries_again() -> None:
    """Missing credentials or a store that does not answer only cost time."""
    it = begun()
    a = it.island("a")
    joined = enter(a, "a")
    beat(a, joined, 0)
    update = an_update(a, joined, 1.0)
    it.fails = [UsageError("No token is known. Type this."), Unreachable("nobody")]
    it.move()

    assert a.publish(update) is Reception.COMMITTED  # with what was sent again
    assert a.outcome(0, 1, wait_s=1.0) is not None
    assert anchor_of(a) == -1.0
    assert it.opened == [URL] * 3
    assert it.time.now_s() >= 1.5  # pauses of 0.5 s and 1 s


def test_a_heartbeat_is_enough_to_follow() -> None:
    """An island that has nothing to send for an hour is at the new place all the same.

    Nobody there takes it for dead.
    """
    it = begun(start_islands=2)
    a = it.island("a")
    joined = enter(a, "a")
    it.move()
    a.heartbeat(
        Heartbeat(island="a", incarnation=joined.incarnation, step=1), at_once=True
    )

    assert it.opened == [URL]


def moving(journey: Journey) -> Journey:
    journey.say(MoveRequested(URL, NONCE))
    return journey


def test_nothing_changes_while_a_run_is_on_its_way() -> None:
    """Who would publish, join or leave is told to ask again; heartbeats go on."""
    it = begun()
    a = it.island("a")
    joined = enter(a, "a")
    update = an_update(a, joined, 1.0)
    moving(it)
    line = DirectLine(it.service)
    exchange = CoordinatorExchange(line, key=b"b", nonce=b"b")
    a.heartbeat(Heartbeat(island="a", incarnation=1, step=1), at_once=True)

    asks: list[Callable[[], object]] = [
        lambda: it.service.offer(update.header, 1.0),
        lambda: exchange.join(JoinRequest(model=MODEL, island="b")),
        lambda: a.leave("a", 1),
    ]
    for ask in asks:
        # DirectLine lets nobody ask again.
        with pytest.raises((Unreachable, AssertionError), match=r"is moving|waits"):
            ask()
    with pytest.raises(Refused, match=r"is moving to memory.*Control it there"):
        it.say(SettingsChanged({"run.patience": 5.0}))
    with pytest.raises(UsageError, match="and not to memory://elsewhere"):
        it.say(MoveRequested("memory://elsewhere", "another nonce, another move"))


def test_a_move_survives_a_restart() -> None:
    """On its way, there, or given up: a coordinator that crashes knows it."""
    disk = SimDisk()
    service = Service.create(disk, plain_settings(), run="run", now_s=0.0)
    enter(CoordinatorExchange(DirectLine(service), key=b"a", nonce=b"a"), "a")
    said: list[Event] = [
        MoveRequested(URL, "first"),
        MoveCancelled(URL),
        MoveRequested(URL, "second"),
        MoveCompleted(URL),
    ]
    for hour, event in enumerate(said):  # so late that nobody is waited for
        service.change(event, 3600.0 * hour)
        move = service.state.move
        disk.crash()
        service = Service.open(disk, now_s=3600.0 * hour + 1.0)

        assert service.state.move == move
    assert move is not None
    assert (move.nonce, move.is_over) == ("second", True)
    with pytest.raises(RunMoved, match="It continues there"):
        service.change(MoveCancelled(URL), 20_000.0)


def test_who_begins_anew_at_the_old_place_is_sent_on() -> None:
    """An island that is started with the old URL joins where the run is."""
    it = begun()
    enter(it.island("a"), "a")
    it.move()

    assert enter(it.island("b"), "b").slot == 1


def test_a_run_is_where_settings_were_put_first() -> None:
    """Giving up and arriving exclude each other, whoever comes first."""
    it = begun()
    enter(it.island("a"), "a")
    moving(it)
    arriving, run = it.bring(), it.belongings().run
    assert not is_here(it.store, run)
    assert give_up(it.store, run)
    with pytest.raises(UsageError, match="this move was given up"):
        arriving.settle()
    it.say(MoveCancelled(URL))
    b = it.island("b")
    assert enter(b, "b").incarnation == 1  # everything goes on here

    other = begun()
    enter(other.island("a"), "a")
    moving(other).bring().settle()
    other.bring().settle()  # again, as after a crash
    assert is_here(other.store, other.belongings().run)
    assert not give_up(other.store, other.belongings().run)


def test_a_run_moves_only_to_where_nothing_is() -> None:
    """What is there is named."""
    it = begun()
    require_free(it.store, url=URL)
    it.store.put("notes.txt", [b"mine"])

    with pytest.raises(UsageError, match=r"already: notes\.txt.*another URL"):
        require_free(it.store, url=URL)


def test_a_run_without_weights_does_not_move() -> None:
    """There is nothing to take along, and the way out is named."""
    with pytest.raises(UsageError, match=r"atoll init URL RUN\.toml"):
        begun().say(MoveRequested(URL, NONCE))


def test_a_coordinator_that_has_not_heard_its_islands_does_not_move() -> None:
    """They may hold rounds that it has lost."""
    disk = SimDisk()
    service = Service.create(disk, plain_settings(), run="run", now_s=0.0)
    enter(CoordinatorExchange(DirectLine(service), key=b"a", nonce=b"a"), "a")
    disk.crash()
    again = Service.open(disk, now_s=1.0)

    with pytest.raises(Unreachable, match="Ask again in some seconds"):
        again.change(MoveRequested(URL, NONCE), 2.0)
    assert replace(again.state).move is None
