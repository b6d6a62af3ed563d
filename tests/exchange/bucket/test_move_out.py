"""A run leaves its bucket complete, and is in one place only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.coordinator.status import status_of
from atoll.errors import CorruptError, RunMoved, UsageError
from atoll.exchange import Frame
from atoll.exchange.api.bodies import MAX_LARGE_BYTES, dump, load
from atoll.exchange.bucket import BucketReader, StoreExchange, keys
from atoll.exchange.bucket.move import MOVED_RUN, MovedRun, MoveIn, MoveOut
from atoll.island.join import FollowingExchange, RunLocation
from atoll.protocol import Heartbeat, JoinRequest, Reception
from atoll.store import Data, FileStore, MemoryStore, ProbedStore, Store, StoreTraits
from atoll.testing.fixtures import (
    MODEL,
    WaitingTime,
    anchor_of,
    enter,
    update_of,
    verdicts_of,
)
from atoll.wire import FrameKind
from tests.exchange.bucket.test_attacks import (
    URL,
    Beach,
    Hooked,
    Late,
    deciding,
    departing,
    once,
    rounds_of,
)
from tests.exchange.test_relocation import beat
from tests.store.buckets import Settings, s3_store

TARGET, NONCE = "https://harbour:7700", "0f" * 16


def way_out(beach: Beach, store: Store | None = None) -> MoveOut:
    return MoveOut.open(store or beach.store, beach.time, url=URL)


def begins(beach: Beach) -> None:
    way_out(beach).begin(TARGET, NONCE)


def moves(beach: Beach) -> None:
    """Take a run away, as far as its bucket is concerned."""
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    assert out.settle()


def stays(beach: Beach) -> None:
    assert way_out(beach).stay()


def travelled(belongings: MovedRun) -> MovedRun:
    """Return belongings as they are read from a text."""
    said = dump(
        MOVED_RUN.write(belongings), name="belongings", max_bytes=MAX_LARGE_BYTES
    )
    return MOVED_RUN.read(load(said, name="belongings"), "belongings")


def later(time: WaitingTime, seconds: float, act: Callable[[], object]) -> None:
    """Do something once, when others have waited for so long."""
    done: list[int] = []

    def due() -> None:
        if not done:
            done.append(1)
            act()

    time.every(seconds, due)


def test_all_that_a_run_has_comes_along() -> None:
    """Settings as they were set, who is who, and what has counted."""
    beach = Beach(start_islands=2)
    a, _, a_joined = beach.join("a")
    b, _, b_joined = beach.join("b")
    beach.join("gone")
    for number in (1, 2, 3):
        for exchange, joined in ((a, a_joined), (b, b_joined)):
            exchange.publish(update_of(exchange, joined, 1.0, round=number))
        beach.time.sleep(3000.0)  # nobody waits for the third
        assert a.outcome(0, number, wait_s=1.0) is not None
    beach.say("pause")
    beach.say("evict", island="gone", incarnation=1)
    a.publish(update_of(a, a_joined, 1.0, round=4))
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    found = travelled(out.belongings())

    assert found.run.founding == NONCE
    assert found.settings.fingerprint == found.settings.settings.fingerprint
    assert [each.action for each in found.controls] == ["pause", "evict"]
    assert [(m.beat.island, m.slot, m.has_left) for m in found.members] == [
        ("a", 0, False),
        ("b", 1, False),
        ("gone", 2, True),
    ]
    assert found.members[1].nonce == (2).to_bytes(16, "little")
    (progress,) = found.fragments
    assert progress.round == 3
    assert [(each.island, each.round) for each in progress.counted] == [
        ("a", 3),
        ("b", 3),
    ]
    assert len(progress.bases) == 3
    assert [each.round for each in found.rosters] == [2, 3]
    assert out.state(0).header.round == 3
    assert out.agreed(0, 3).header.roster == found.rosters[1].roster


def test_what_departed_ahead_counts_before_the_run_goes() -> None:
    """For the round after the open one, of who has left, and of whom no list tells."""
    beach = Beach(start_islands=2)
    a, _, a_joined = beach.join("a")
    beach.join("b")
    assert a.publish(departing(a, a_joined, 1.0, round=2)) is Reception.STAGED
    a.leave("a", 1)
    late = Late(beach.store)
    late.stops()
    late.shown = []
    out = way_out(beach, late)
    out.begin(TARGET, NONCE)

    found = out.belongings()
    assert found.fragments[0].round == 2
    counted = [[e.island for e in each.roster.counted] for each in found.rosters]
    assert counted == [[], ["a"]]


def test_who_is_on_no_list_comes_along() -> None:
    """Lists may be late: slots and lives are asked for by their keys."""
    beach = Beach(start_islands=2)
    beach.join("a")
    late = Late(beach.store)
    late.stops()
    beach.join("b")
    beach.join("a")
    out = way_out(beach, late)
    out.begin(TARGET, NONCE)

    assert [(m.beat.island, m.beat.incarnation) for m in out.belongings().members] == [
        ("a", 2),
        ("b", 1),
    ]


class Slow(Hooked):
    """A store whose puts at one key are on their way until they are let go."""

    def __init__(self, inner: Store, key: str) -> None:
        super().__init__(inner)
        self.key, self.under_way = key, list[Sequence[Data]]()

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        if key != self.key:
            return super().put_new(key, parts)
        self.under_way.append([bytes(part) for part in parts])
        return True

    def arrives(self) -> None:
        for parts in self.under_way:
            self.inner.put_new(self.key, parts)


def test_a_round_that_closes_after_the_word_and_before_the_look_comes_along() -> None:
    """Its roster was on its way when the move began."""
    beach = Beach(start_islands=1)
    slow = Slow(beach.store, keys.roster(0, 1))
    reader = BucketReader.open(slow, beach.time, url=URL)
    a = StoreExchange(reader, key=b"a", nonce=bytes(16))
    a.publish(update_of(a, enter(a, "a"), 1.0))
    assert slow.under_way
    store = Hooked(beach.store)
    store.after = once("put_new", keys.control(1), slow.arrives)
    out = way_out(beach, store)
    out.begin(TARGET, NONCE)

    assert out.belongings().fragments[0].round == 1
    assert a.outcome(0, 1, wait_s=0.0) is None  # until the move is decided


@pytest.mark.parametrize("has_stayed", [False, True])
def test_a_roster_that_comes_too_late_for_a_move_is_not_applied(
    has_stayed: bool,
) -> None:
    """Nobody has adopted its outcome, so the round may be closed where the run goes.

    It counts if the run stays.
    """
    beach = Beach(start_islands=1)
    a, store, joined = beach.join("a")
    outs: list[MoveOut] = []

    def copies() -> None:
        outs.append(way_out(beach))
        outs[0].begin(TARGET, NONCE)
        assert outs[0].belongings().fragments[0].round == 0

    store.before = once("put_new", keys.roster(0, 1), copies)
    a.publish(update_of(a, joined, 1.0))
    assert beach.store.get(keys.roster(0, 1))
    assert a.outcome(0, 1, wait_s=0.0) is None
    assert a._reader.view.number(0) == 1
    assert way_out(beach).settle() is False  # it has not begun that move
    if has_stayed:
        assert outs[0].stay()
        assert a.outcome(0, 1, wait_s=0.0) is not None
        assert anchor_of(a) == -1.0
        return
    assert outs[0].settle()
    with pytest.raises(RunMoved):
        a.outcome(0, 1, wait_s=0.0)


def test_a_roster_that_comes_during_the_copy_does_not_come_along() -> None:
    """The weights are those of the round that was described."""
    beach = Beach(start_islands=1)
    a, store, joined = beach.join("a")
    outs: list[MoveOut] = []

    def describes() -> None:
        outs.append(way_out(beach))
        outs[0].begin(TARGET, NONCE)
        assert outs[0].belongings().fragments[0].round == 0

    store.before = once("put_new", keys.roster(0, 1), describes)
    a.publish(update_of(a, joined, 1.0))

    assert beach.has_closed(1)
    assert outs[0].state(0).header.round == 0
    assert outs[0].settle()


def test_a_damaged_word_keeps_a_roster_from_being_applied() -> None:
    """It may be that the run moves; once it is restored, everything goes on."""
    beach = Beach(start_islands=1)
    a, store, joined = beach.join("a")
    key, words = keys.control(1), list[bytes]()

    def damages() -> None:
        begins(beach)
        words.append(bytes(beach.store.get(key)))
        beach.store.put(key, [b"{"])

    store.before = once("put_new", keys.roster(0, 1), damages)
    with pytest.raises(CorruptError, match=key):
        a.publish(update_of(a, joined, 1.0))
    assert beach.has_closed(1)
    assert a._reader.view.number(0) == 1
    beach.store.put(key, words)
    stays(beach)

    assert a.outcome(0, 1, wait_s=0.0) is not None


def test_a_move_makes_the_means_of_the_rounds_that_it_closes() -> None:
    """It does not wait for islands to make them: none does while the run moves."""
    beach = Beach(start_islands=4)
    islands = [beach.join(name) for name in "abcd"]
    frames = [departing(a, joined, 1.0) for a, _, joined in islands[:3]]
    frames += [departing(islands[3][0], islands[3][2], 5.0, round=1)]
    beach.say("pause")
    beach.time.sleep(7.0)
    for (exchange, _, joined), frame in zip(islands, frames, strict=True):
        assert exchange.publish(frame) is Reception.STAGED
        exchange.leave(joined.island, 1)
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    begun_s = beach.time.now_s()
    state = out.state(0)

    assert out.belongings().rosters[0].shards == ()
    assert len(out.belongings().rosters[0].roster.counted) == 4
    assert state.header.round == 1
    assert beach.time.now_s() == begun_s


def test_a_run_that_stays_goes_on_from_the_rounds_that_were_closed() -> None:
    """The next move takes a round along whose roster came too late for the last."""
    beach = Beach(start_islands=1)
    a, store, joined = beach.join("a")
    store.before = once("put_new", keys.roster(0, 1), lambda: begins(beach))
    a.publish(update_of(a, joined, 1.0))
    stays(beach)
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    assert out.belongings().fragments[0].round == 1


def test_everybody_is_sent_on_once_the_run_has_moved() -> None:
    """Whatever an island asks for, but for outcomes that it can still have."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    rounds_of(beach, a, joined, 1, 1)
    frame = update_of(a, joined, 1.0, round=2)
    moves(beach)
    beach.time.sleep(7.0)
    told: list[RunMoved] = []
    a.moved = told.append
    beach.time.sleep(7.0)

    assert told[0].target == TARGET
    assert a.outcome(0, 1, wait_s=0.0) is not None
    for act in (
        lambda: a.publish(frame),
        lambda: a.outcome(0, 2, wait_s=0.0),
        lambda: a.state(0),
        lambda: a.heartbeat(Heartbeat(island="a", incarnation=1, step=0)),
        lambda: a.leave("a", 1),
        lambda: beach.join("b"),
    ):
        with pytest.raises(RunMoved) as caught:
            act()
        assert caught.value.target == TARGET


def test_islands_wait_while_their_run_is_on_its_way() -> None:
    """Who joins meanwhile is a member when it stays."""
    beach = Beach(start_islands=1)
    beach.join("a")
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    later(beach.time, 50.0, out.stay)
    b, _, joined = beach.join("b")

    assert beach.time.now_s() >= 50.0
    assert joined.slot == 1
    assert b.state(0).header.round == 0


def test_who_joined_while_a_move_began_is_sent_on() -> None:
    """The move has read who is here before that island's document was put."""
    beach = Beach(start_islands=1)
    beach.join("a")
    b, store = beach.attach("b")
    store.before = once("put_new", keys.MEMBERS, lambda: moves(beach))
    with pytest.raises(RunMoved):
        b.join(JoinRequest(model=MODEL, island="b"))


@pytest.mark.parametrize("has_stayed", [False, True])
def test_what_departs_during_a_move_waits_for_the_word(has_stayed: bool) -> None:
    """It is published where the run is: nobody else would."""
    beach = Beach(start_islands=2)
    a, _, a_joined = beach.join("a")
    b, _, b_joined = beach.join("b")
    last = departing(a, a_joined, 1.0)
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    later(beach.time, 9.0, out.stay if has_stayed else out.settle)
    if not has_stayed:
        with pytest.raises(RunMoved):
            a.publish(last)
        return
    assert a.publish(last) is Reception.STAGED
    a.leave("a", 1)
    beach.time.sleep(6.0)  # until b has read that the run stays
    b.publish(update_of(b, b_joined, 3.0))
    assert b.outcome(0, 1, wait_s=1.0) is not None
    assert anchor_of(b) == -2.0  # the mean of 1 and 3


def test_a_farewell_that_a_move_may_have_missed_is_said_again_elsewhere() -> None:
    """The move began after the island had looked, and before its farewell."""
    beach = Beach(start_islands=2)
    a, store, a_joined = beach.join("a")
    beach.join("b")
    assert a.publish(departing(a, a_joined, 1.0)) is Reception.STAGED
    store.before = once("put", keys.MEMBERS, lambda: moves(beach))
    with pytest.raises(RunMoved):
        a.leave("a", 1)


def goes_and_stays(beach: Beach, times: int = 1) -> None:
    for _ in range(times):
        out = way_out(beach)
        out.begin(TARGET, NONCE)
        assert out.stay()


@pytest.mark.parametrize("times", [1, 3])
def test_nothing_of_a_round_is_lost_by_a_move_that_was_given_up(times: int) -> None:
    """Who had left before the move counts in the round that the move has closed."""
    beach = Beach(start_islands=2)
    a, _, a_joined = beach.join("a")
    b, _, b_joined = beach.join("b")
    assert a.publish(departing(a, a_joined, 1.0)) is Reception.STAGED
    a.leave("a", 1)
    missed = update_of(b, b_joined, 3.0)
    goes_and_stays(beach, times)
    assert b.publish(missed) is Reception.COMMITTED
    assert b.outcome(0, 1, wait_s=1.0) is not None
    assert {name: each.name for name, each in verdicts_of(b, 1).items()} == {
        "a": "COUNTED",
        "b": "LATE",
    }
    assert anchor_of(b) == -1.0
    c, _, _ = beach.join("c")
    assert anchor_of(c) == -1.0
    rounds_of(beach, b, b_joined, 2, 4)
    assert b.state(0).header.round == 4


def test_words_that_are_said_while_a_run_is_on_its_way_are_void() -> None:
    """They were not taken along, and so nobody heeds them after it stays either."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    beach.say("pause")
    assert out.belongings().controls == ()
    assert out.stay()
    rounds_of(beach, a, joined, 1, 2)

    assert not a._reader.view.state.is_paused


class Dies(Exception):
    """The machine of the operator is gone."""


class Mortal(Hooked):
    """A store whose caller dies before or after its n-th put."""

    def __init__(self, inner: Store, at: int, when: str) -> None:
        super().__init__(inner)
        self.at, self.puts = at, 0
        if when == "before":
            self.before = self.counts
        else:
            self.after = self.counts

    def counts(self, what: str, key: str) -> None:
        if what.startswith("put"):
            self.puts += 1
            if self.puts == self.at:
                raise Dies


def goes(out: MoveOut) -> bool:
    out.begin(TARGET, NONCE)
    out.belongings()
    return out.settle()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("then", ["goes", "stays"])
def test_whoever_dies_when_the_run_is_in_one_place(
    at: int, when: str, then: str
) -> None:
    """Before or after each put; then somebody says the same again, or gives it up."""
    beach = Beach(start_islands=2)
    a, _, a_joined = beach.join("a")
    b, _, b_joined = beach.join("b")
    frames = [update_of(a, a_joined, 1.0), update_of(b, b_joined, 3.0)]
    a.publish(frames[0])
    with suppress(Dies):
        goes(way_out(beach, Mortal(beach.store, at, when)))
    was_over = (after := way_out(beach).look()) is not None and after.is_over
    is_gone = goes(way_out(beach)) if then == "goes" else not way_out(beach).stay()

    assert is_gone or (then == "stays" and not was_over)
    assert was_over <= is_gone
    if is_gone:
        with pytest.raises(RunMoved):
            a._lease.beat()
        return
    b.publish(frames[1])
    for _ in range(20):
        if (outcome := a.outcome(0, 1, wait_s=1.0)) is not None:
            break
    assert outcome is not None
    assert anchor_of(a) == anchor_of(b) == -2.0  # the mean of 1 and 3


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("first", ["settle", "stay"])
def test_two_operators_who_disagree_are_told_the_same(nth: int, first: str) -> None:
    """One says that the run is there, the other that it stays, between any requests."""
    beach = Beach(start_islands=1)
    a, _, _ = beach.join("a")
    store = Hooked(beach.store)
    one, other = way_out(beach, store), way_out(beach)
    one.begin(TARGET, NONCE)
    other.begin(TARGET, NONCE)
    requests: list[str] = []
    heard: list[bool] = []

    def between(what: str, key: str) -> None:
        requests.append(key)
        if len(requests) == nth and not heard:
            heard.append(other.stay() if first == "settle" else other.settle())

    store.before = between
    said = one.settle() if first == "settle" else one.stay()
    if not heard:
        return  # it was done with fewer requests
    assert said is not heard[0]
    a._reader.read_controls()
    is_gone = a._reader.view.moved_to is not None
    assert is_gone is (said if first == "settle" else heard[0])


def test_a_slow_operator_does_not_decide_about_the_next_move() -> None:
    """Its own was given up, and another is under way: that one is another's."""
    beach = Beach(start_islands=1)
    beach.join("a")
    slow, other = way_out(beach), way_out(beach)
    slow.begin(TARGET, NONCE)
    assert other.stay()
    again = way_out(beach)
    again.begin(TARGET, "1f" * 16)

    assert not slow.settle()
    with pytest.raises(UsageError, match="was given up, and the run continues"):
        slow.belongings()
    move = again.look()
    assert move is not None
    assert (move.nonce, move.is_over) == ("1f" * 16, False)


def test_a_run_goes_to_one_target() -> None:
    """Another is refused while the first is under way, and after it, too."""
    beach = Beach(start_islands=1)
    beach.join("a")
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    with pytest.raises(UsageError, match="is moving to https://harbour:7700"):
        way_out(beach).begin("https://elsewhere", NONCE)
    assert out.settle()
    assert not way_out(beach).stay()
    with pytest.raises(UsageError, match="has moved to https://harbour:7700"):
        way_out(beach).begin("https://elsewhere", NONCE)
    again = way_out(beach)
    assert again.begin(TARGET, "1f" * 16).nonce == NONCE
    assert again.settle()
    assert again.belongings().run.founding == NONCE


def test_what_cannot_move_is_refused_with_words() -> None:
    """A run with a decider, one without weights, and one in a store that forgets."""
    beach = Beach(deciding("a"))
    beach.join("a")
    with pytest.raises(UsageError, match=r"'a' alone decides in the run"):
        way_out(beach)
    empty = Beach(start_islands=1)
    with pytest.raises(UsageError, match="has no weights yet"):
        way_out(empty)
    weak = Hooked(Beach(start_islands=1).store)
    weak.traits = replace(StoreTraits(), has_put_new=False)
    other = Beach(start_islands=1)
    other.join("a")
    weak.inner = other.store
    with pytest.raises(UsageError, match="both done and given up"):
        way_out(other, weak)


def test_status_says_where_a_run_goes() -> None:
    """As it does at a coordinator."""
    beach = Beach(start_islands=1)
    a, _, _ = beach.join("a")
    out = way_out(beach)
    out.begin(TARGET, NONCE)
    a._reader.read_controls()
    view = a._reader.view
    assert status_of(view.state, 0.0, stats={}, verdicts={})["state"] == "moving"
    assert view.moved_to is None
    out.settle()
    a._reader.read_controls()
    assert status_of(view.state, 0.0, stats={}, verdicts={})["state"] == "moved"
    assert view.moved_to == TARGET


class Journey:
    """A run in a bucket, another bucket that it goes to, and islands that follow.

    Whatever takes it there takes it to a coordinator as well.
    """

    def __init__(self, *, start_islands: int, store: Store | None = None) -> None:
        self.beach = Beach(store=store, start_islands=start_islands)
        self.there = MemoryStore()

    def island(self, name: str) -> FollowingExchange:
        nonce = name.encode() + b"nonce"

        def open(_: str) -> RunLocation:
            return self.meet(self.there, name, nonce)

        place = self.meet(self.beach.store, name, nonce)
        return FollowingExchange(place, open, pause=self.beach.time.sleep)

    def meet(self, store: Store, name: str, nonce: bytes) -> StoreExchange:
        reader = BucketReader.open(store, self.beach.time, url=URL)
        return StoreExchange(reader, key=name.encode(), nonce=nonce)

    def move(self) -> None:
        out = way_out(self.beach)
        out.begin(TARGET, NONCE)
        here = MoveIn(self.there, self.beach.time, travelled(out.belongings()))
        here.bring(out.state, out)
        here.settle()
        assert out.settle()

    def closes(self, *islands: FollowingExchange, round: int) -> None:
        for _ in range(60):
            outcomes = [each.outcome(0, round, wait_s=1.0) for each in islands]
            if all(outcomes):
                return
        raise AssertionError(f"round {round} does not close")


def follows(store: Store | None = None) -> None:
    """Take a run elsewhere, in the middle of its second round."""
    it = Journey(start_islands=2, store=store)
    a, b = it.island("a"), it.island("b")
    first, second = enter(a, "a"), enter(b, "b")
    a.publish(update_of(a, first, 1.0))
    b.publish(update_of(b, second, 3.0))
    it.closes(a, b, round=1)
    beat(a, first, 1)
    beat(b, second, 1)
    a.publish(update_of(a, first, 1.0, round=2))
    late = update_of(b, second, 3.0, round=2)
    it.move()
    it.beach.time.sleep(7.0)
    b.publish(late)
    it.closes(a, b, round=2)

    assert anchor_of(a) == anchor_of(b) == -4.0  # twice the mean of 1 and 3
    assert it.there.get(keys.roster(0, 2))


def test_islands_follow_with_what_they_have_under_way() -> None:
    """Half of a round is published before the move, and half after it."""
    follows()


def test_a_run_leaves_a_directory(tmp_path: Path) -> None:
    """As on a file system that machines share."""
    follows(FileStore(tmp_path))


def test_a_run_leaves_s3(s3: Settings) -> None:
    """With a real server's conditional puts."""
    follows(ProbedStore(s3_store(s3)))


def test_what_the_gone_have_left_counts_before_the_run_goes() -> None:
    """One has departed for the open round, and one for the round after it."""
    it = Journey(start_islands=2)
    a, b, c = it.island("a"), it.island("b"), it.island("c")
    joined = [enter(each, name) for each, name in ((a, "a"), (b, "b"), (c, "c"))]
    frames = [
        replace_kind(update_of(a, joined[0], 1.0)),
        replace_kind(update_of(b, joined[1], 5.0, round=2)),
    ]
    c_frame = update_of(c, joined[2], 3.0)
    beat(c, joined[2], 0)
    for exchange, frame, name in ((a, frames[0], "a"), (b, frames[1], "b")):
        assert exchange.publish(frame) is Reception.STAGED
        exchange.leave(name, 1)
    it.move()
    it.beach.time.sleep(7.0)
    assert c.publish(c_frame) is Reception.COMMITTED
    it.closes(c, round=2)
    assert anchor_of(c) == -6.0  # 1 and 5: c carries what it has
    assert "c" not in verdicts_of(c, 1)
    c.publish(update_of(c, joined[2], 3.0, round=3))
    it.closes(c, round=3)
    assert anchor_of(c) == -9.0


def test_who_departs_into_a_moving_run_counts_once() -> None:
    """Its update is put in the bucket, closes its round, and is published again."""
    it = Journey(start_islands=2)
    a, b = it.island("a"), it.island("b")
    first, second = enter(a, "a"), enter(b, "b")
    last = replace_kind(update_of(a, first, 1.0))
    b_frame = update_of(b, second, 3.0)
    beat(b, second, 0)
    way_out(it.beach).begin(TARGET, NONCE)
    later(it.beach.time, 5.0, it.move)
    assert a.publish(last) is Reception.COMMITTED
    a.leave("a", 1)
    assert b.publish(b_frame) is Reception.COMMITTED
    it.closes(b, round=1)

    assert {name: each.name for name, each in verdicts_of(b, 1).items()} == {
        "a": "COUNTED",
        "b": "LATE",
    }
    assert anchor_of(b) == -1.0


def replace_kind(frame: Frame) -> Frame:
    """Return the update as one that departs."""
    return Frame(replace(frame.header, kind=FrameKind.DEPARTING), frame.body)
