"""Attacks on the protocol of a bucket: what was found once stays mended.

Time is virtual, and requests of two islands are interleaved where they hurt.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from atoll.errors import CorruptError, Refused, StoreDenied, Unreachable
from atoll.exchange import Frame
from atoll.exchange.bucket import BucketReader, StoreExchange, documents, keys
from atoll.exchange.bucket.create import make_run
from atoll.exchange.bucket.documents import ControlDocument, packed
from atoll.exchange.bucket.outcomes import Outcomes
from atoll.exchange.bucket.states import States
from atoll.protocol import Heartbeat, HeldRound, JoinReply, JoinRequest, Reception
from atoll.settings import RunSettings
from atoll.store import CountedStore, Data, Item, MemoryStore, Store, StoreTraits
from atoll.testing import vector_model
from atoll.testing.fixtures import (
    MODEL,
    OUTER,
    StoreRun,
    WaitingTime,
    enter,
    plain_settings,
    update_of,
)
from atoll.weights import FragmentState
from atoll.wire import FrameKind, Header, TrainingProgress, Verdict, with_body

URL = "a test's store"
T = TypeVar("T")
Hook = Callable[[str, str], None]


class Hooked:
    """A store that tells of each request before and after it. Implements `Store`."""

    traits = StoreTraits()

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.before: Hook = lambda what, key: None
        self.after: Hook = lambda what, key: None

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        self.before("put_new", key)
        is_new = self.inner.put_new(key, parts)
        self.after("put_new", key)
        return is_new

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self.before("put", key)
        self.inner.put(key, parts)
        self.after("put", key)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        self.before("get", key)
        data = self.inner.get(key, first, size)
        self.after("get", key)
        return data

    def items(self, prefix: str) -> list[Item]:
        self.before("items", prefix)
        items = self.inner.items(prefix)
        self.after("items", prefix)
        return items

    def remove(self, keys: Iterable[str]) -> None:
        every = list(keys)
        for key in every:
            self.before("remove", key)
        self.inner.remove(every)


class Beach:
    """A run in a store, and islands of it that each have a store of their own."""

    def __init__(
        self,
        settings: RunSettings | None = None,
        *,
        store: Store | None = None,
        **run: object,
    ) -> None:
        self.store, self.time = store or MemoryStore(), WaitingTime()
        self.run = make_run(self.store, settings or plain_settings(**run), url=URL).run
        self.lives = 0

    def attach(self, key: str, **more: Any) -> tuple[StoreExchange, Hooked]:
        store = Hooked(self.store)
        reader = BucketReader.open(store, self.time, url=URL)
        self.lives += 1
        nonce = self.lives.to_bytes(16, "little")
        return StoreExchange(reader, key=key.encode(), nonce=nonce, **more), store

    def join(self, name: str, **more: Any) -> tuple[StoreExchange, Hooked, JoinReply]:
        exchange, store = self.attach(name, **more)
        return exchange, store, enter(exchange, name)

    def roster(self, round: int) -> dict[str, Verdict]:
        key = keys.roster(0, round)
        found = documents.fetch(self.store, documents.ROSTER, key)
        return {entry.island: entry.verdict for entry in found.roster.entries}

    def has_closed(self, round: int) -> bool:
        return bool(self.store.items(keys.round_prefix(0, round))) and any(
            item.key == keys.roster(0, round)
            for item in self.store.items(keys.round_prefix(0, round))
        )

    def say(self, action: str, **fields: object) -> None:
        number = len(self.store.items(keys.CONTROL)) + 1
        said = ControlDocument(
            run=self.run,
            action=action,
            values={},
            **fields,  # type: ignore[arg-type]
        )
        key = keys.control(number)
        self.store.put(key, packed(documents.CONTROL, said, key))


def once(what: str, prefix: str, act: Callable[[], None]) -> Hook:
    """Return a hook that acts at the first request of a kind, and then no more."""
    done: list[str] = []

    def hook(request: str, key: str) -> None:
        if not done and request == what and key.startswith(prefix):
            done.append(key)
            act()

    return hook


def deciding(decider: str) -> RunSettings:
    """Return settings of a run of two, in which one of them closes every round."""
    plain = plain_settings(start_islands=2)
    return plain.with_values({"store.decider": decider})


def departing(
    exchange: StoreExchange, joined: JoinReply, value: float, *, round: int = 1
) -> Frame:
    frame = update_of(exchange, joined, value, round=round)
    return Frame(replace(frame.header, kind=FrameKind.DEPARTING), frame.body)


def test_a_departing_update_counts_though_its_round_was_listed_before() -> None:
    """Who sees that an island has gone looks for what it left, and then closes."""
    beach = Beach(deciding("b"))
    b, b_store, b_joined = beach.join("b")
    a, _, a_joined = beach.join("a")
    beach.time.sleep(7.0)
    last = departing(a, a_joined, 1.0)
    b_frame = update_of(b, b_joined, 3.0)

    def leaves() -> None:
        assert a.publish(last) is Reception.STAGED
        a.leave("a", 1)

    b_store.after = once("items", keys.round_prefix(0, 1), leaves)
    b.publish(b_frame)
    for _ in range(10):
        b.outcome(0, 1, wait_s=1.0)

    assert beach.roster(1) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}


def test_a_heartbeat_under_way_does_not_undo_a_farewell() -> None:
    """The document says that the island has left, whoever wrote last."""
    beach = Beach(start_islands=1)
    a, store, _ = beach.join("a")
    store.before = once("put", keys.MEMBERS, lambda: a.leave("a", 1))
    a._lease.beat_in_background()

    key = keys.member("a", 1)
    assert documents.fetch(beach.store, documents.MEMBER, key).has_left


class Late(Hooked):
    """A store whose lists show nothing that was put since `stops` was called."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.shown: list[Item] | None = None

    def stops(self) -> None:
        self.shown = self.inner.items("")

    def items(self, prefix: str) -> list[Item]:
        self.before("items", prefix)
        if self.shown is None:
            return self.inner.items(prefix)
        return [item for item in self.shown if item.key.startswith(prefix)]


def test_what_an_earlier_life_left_counts_though_lists_are_late() -> None:
    """Its successor asks for it by its key: a key that was put can be read at once."""
    beach = Beach(start_islands=2)
    a, _, a_joined = beach.join("a")
    b, _, b_joined = beach.join("b")
    late = Late(beach.store)
    late.stops()
    assert a.publish(departing(a, a_joined, 1.0)) is Reception.STAGED
    a.leave("a", 1)
    reader = BucketReader.open(late, beach.time, url=URL)
    again = StoreExchange(reader, key=b"a", nonce=bytes(16))
    joined = enter(again, "a")
    assert joined.incarnation == 2
    b.publish(update_of(b, b_joined, 3.0))
    for _ in range(40):
        b.outcome(0, 1, wait_s=1.0)

    assert beach.roster(1)["a"] is Verdict.COUNTED


def test_joining_by_late_lists_costs_a_few_requests() -> None:
    """Who finds its place taken reads who has it, instead of asking for a list."""
    beach = Beach(start_islands=1)
    late = Late(beach.store)
    late.stops()
    beach.join("a")
    counted = CountedStore(late)
    reader = BucketReader.open(counted, beach.time, url=URL)
    again = StoreExchange(reader, key=b"a", nonce=bytes(16))
    late.before = _no_more_than(60)

    assert enter(again, "a").incarnation == 2


def _no_more_than(most: int) -> Hook:
    asked = []

    def hook(what: str, key: str) -> None:
        asked.append(key)
        assert len(asked) <= most, asked[-5:]

    return hook


def rounds_of(
    beach: Beach, a: StoreExchange, joined: JoinReply, first: int, last: int
) -> None:
    """Let an island publish and take some rounds, and write states that are due."""
    for number in range(first, last + 1):
        a.publish(update_of(a, joined, 1.0, round=number))
        outcome = a.outcome(0, number, wait_s=0.0)
        assert outcome is not None
        if outcome.position.lost:
            a.publish(a.state(0))


def test_a_state_without_a_part_is_told_and_an_older_one_taken() -> None:
    """Nobody asks for ever for what is gone."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a", state_rounds=3)
    rounds_of(beach, a, joined, 1, 8)
    parts = [
        i.key for i in beach.store.items(keys.states(0)) if "complete" not in i.key
    ]
    latest = max(int(key.split("/")[2]) for key in parts)
    beach.store.remove([keys.state_part(0, latest, 0)])
    b, store, _ = beach.join("b")
    store.before = _no_more_than(100)
    state = b.state(0)

    assert state.header.round == 8
    assert state.body.tobytes() == a.state(0).body.tobytes()


def test_a_founding_that_is_gone_is_named() -> None:
    """A run whose first weights somebody has removed says so, and does not spin."""
    beach = Beach(start_islands=1)
    beach.join("a")
    beach.store.remove([item.key for item in beach.store.items("founding/")])
    b, store = beach.attach("b")
    store.before = _no_more_than(100)
    enter(b, "b")
    with pytest.raises(
        CorruptError, match=r"founding/.* is gone .* Restore this object"
    ):
        b.state(0)


def test_a_foreign_state_is_passed_over() -> None:
    """Its key says more rounds than there are: nobody begins there, or removes them."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a", state_rounds=3)
    rounds_of(beach, a, joined, 1, 2)
    for number in (9_999_999_998, 9_999_999_999):
        beach.store.put(keys.state_complete(0, number), [b"somebody's notes"])
    rounds_of(beach, a, joined, 3, 4)
    b, store = beach.attach("b")
    store.before = _no_more_than(200)
    enter(b, "b")

    assert b.state(0).header.round == 4


def test_a_state_that_says_another_round_is_passed_over() -> None:
    """A document belongs to its key."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a", state_rounds=3)
    rounds_of(beach, a, joined, 1, 5)
    key = next(i.key for i in beach.store.items(keys.states(0)) if "complete" in i.key)
    said = json.loads(bytes(beach.store.get(key)))
    said["document"]["round"] = 1_000_000
    beach.store.put(key, [json.dumps(said).encode()])
    b, _, _ = beach.join("b")

    assert b.state(0).header.round == 5


def test_a_roster_of_another_fragment_is_refused() -> None:
    """Whatever number it says, nothing is taken from it."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    rounds_of(beach, a, joined, 1, 1)
    said = json.loads(bytes(beach.store.get(keys.roster(0, 1))))
    said["document"] |= {"fragment": 7, "round": 2}
    beach.store.put(keys.roster(0, 2), [json.dumps(said).encode()])
    with pytest.raises(CorruptError, match=r"rounds/0/2/roster"):
        a.outcome(0, 2, wait_s=0.0)


def test_after_a_time_without_answers_nobody_is_taken_for_gone() -> None:
    """A lease counts from what was seen, and nobody has looked meanwhile."""
    beach = Beach(start_islands=2)
    a, a_store, a_joined = beach.join("a")
    b, b_store, _ = beach.join("b")
    beach.time.sleep(20.0)

    def fails(what: str, key: str) -> None:
        raise Unreachable("the bucket does not answer")

    frame = update_of(a, a_joined, 1.0)
    a_store.before = b_store.before = fails
    beach.time.sleep(100.0)
    a_store.before = b_store.before = lambda what, key: None
    a.publish(frame)  # before any heartbeat of the other comes through

    assert not beach.has_closed(1)
    beach.time.sleep(8.0)
    b.publish(update_of(b, enter(b, "b"), 3.0))
    assert beach.roster(1) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}


def test_what_an_operator_has_said_holds_for_the_next_closing() -> None:
    """Not only from the next heartbeat on: others may have ended by it already."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    rounds_of(beach, a, joined, 1, 2)
    frame = update_of(a, joined, 1.0, round=3)
    beach.say("stop", last_round=2)
    a.publish(frame)

    assert not beach.has_closed(3)


def test_a_pause_holds_for_the_next_closing() -> None:
    """And a resume lets it close."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    frame = update_of(a, joined, 1.0)
    beach.say("pause")
    a.publish(frame)
    assert not beach.has_closed(1)
    beach.say("resume")
    for _ in range(40):
        a.outcome(0, 1, wait_s=1.0)
    assert beach.has_closed(1)


def test_a_control_that_cannot_be_read_does_not_hide_the_members() -> None:
    """Others are seen to live all the same."""
    beach = Beach(start_islands=2)
    a, _, _ = beach.join("a")
    beach.join("b")
    beach.store.put(keys.control(1), [b"somebody's notes"])
    beach.time.sleep(200.0)

    assert a._reader.view.live(beach.time.now_s()) == {"a", "b"}


def test_the_dead_do_not_make_a_run_begin() -> None:
    """Islands that died before the first round are none of `start_islands`."""
    beach = Beach(start_islands=3)
    for name in ("x", "y"):
        exchange, _ = beach.attach(name)
        enter(exchange, name)
        exchange.leave(name, 1)
    a, _, joined = beach.join("a")
    a.publish(update_of(a, joined, 1.0))
    for _ in range(20):
        a.outcome(0, 1, wait_s=1.0)

    assert not beach.has_closed(1)


def test_what_an_earlier_life_could_not_have_left_does_not_stand() -> None:
    """A foreign object at its key speaks for nobody: the new life publishes itself."""
    beach = Beach(start_islands=1)
    beach.join("a")
    beach.store.put(keys.update(0, 1, "a", 1), [b"somebody's notes"])
    a, _, joined = beach.join("a")
    assert joined.incarnation == 2
    assert joined.spoken_for == ()
    rounds_of(beach, a, joined, 1, 1)
    assert beach.roster(1) == {"a": Verdict.COUNTED}


def test_the_silent_are_read_ever_more_seldom() -> None:
    """Ten islands that died without a word cost nothing after a day."""
    beach = Beach(start_islands=1)
    for number in range(10):
        _, store, _ = beach.join(f"dead{number}")

        def dead(what: str, key: str) -> None:
            raise Unreachable("dead")

        store.before = dead
    counted = CountedStore(beach.store)
    reader = BucketReader.open(counted, beach.time, url=URL)
    a = StoreExchange(reader, key=b"a", nonce=bytes(16))
    enter(a, "a")
    beach.time.sleep(3600.0)
    before = counted.requests
    beach.time.sleep(600.0)

    beats = 100
    assert counted.requests.since(before).total <= 5 * beats + 20


def test_a_zombies_update_is_no_reason_to_read_all_members_again() -> None:
    """A look costs a list, whoever else has left something in the round."""
    beach = Beach(start_islands=3)
    z, _, z_joined = beach.join("z")
    frame = update_of(z, z_joined, 1.0)
    b, b_store, b_joined = beach.join("b")
    beach.join("c")
    beach.join("z")
    z._publisher.put(frame)
    beach.store.put(f"{keys.updates(0, 1)}zz-0123456789ab.1", [b"somebody's notes"])
    b._reader.members.read()
    b.publish(update_of(b, b_joined, 3.0))
    b._closer.close_if_due(0)
    asked: list[str] = []
    b_store.before = lambda what, key: asked.append(f"{what} {key}")
    b._reader.read_round(0)

    assert asked == [f"items {keys.round_prefix(0, 1)}"]


def test_the_successor_of_a_zombie_speaks_for_itself() -> None:
    """What was staged before the new life was seen, and is not named, is dropped."""
    beach = Beach(start_islands=2)
    z, _, z_joined = beach.join("z")
    b, _, b_joined = beach.join("b")
    z_frame = update_of(z, z_joined, 1.0)
    z2, store = beach.attach("z")
    store.before = once("put_new", keys.MEMBERS, lambda: z._publisher.put(z_frame))
    joined = enter(z2, "z")
    b_reader = b._reader
    b_reader.read_round(0)
    b_reader.members.read()
    z2._publisher.put(update_of(z2, joined, 5.0))
    b.publish(update_of(b, b_joined, 3.0))
    for _ in range(30):
        b.outcome(0, 1, wait_s=1.0)
    found = documents.fetch(beach.store, documents.ROSTER, keys.roster(0, 1)).roster

    entry = found.entry("z")
    assert entry is not None
    assert entry.incarnation == 2


def test_few_rosters_are_kept_in_memory() -> None:
    """Older ones are read again by who asks for them."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    rounds_of(beach, a, joined, 1, 40)

    assert len(a._reader.view.rosters) <= 16
    old = a.outcome(0, 1, wait_s=0.0)
    assert old is not None
    assert old.agreed.header.round == 1


def test_a_shard_that_was_collected_is_not_waited_for() -> None:
    """A round that others have gone beyond has all its means, or none any more."""
    beach = Beach(start_islands=5)
    islands = [beach.join(f"i{number}") for number in range(5)]
    for number in (1, 2):
        for exchange, _, joined in islands:
            exchange.publish(update_of(exchange, joined, 1.0, round=number))
        for exchange, _, _ in islands:
            assert exchange.outcome(0, number, wait_s=0.0) is not None
    islands[0][0].publish(islands[0][0].state(0))
    prefix = keys.round_prefix(0, 1)
    gone = [i.key for i in beach.store.items(prefix) if i.key != keys.roster(0, 1)]
    beach.store.remove(gone)
    late, _, _ = beach.join("late")
    before_s = beach.time.now_s()
    outcome = late.outcome(0, 1, wait_s=0.0)

    assert outcome is not None
    assert not outcome.has_body
    assert beach.time.now_s() - before_s < 4.0


def test_who_waited_for_the_founder_is_told_where_the_run_is_now() -> None:
    """Not where it was before its first weights were there."""
    beach = Beach(start_islands=1)
    a, _ = beach.attach("a")
    b, b_store = beach.attach("b")
    founder = a.join(JoinRequest(model=MODEL, island="a"))
    assert founder.is_founder

    def founds() -> None:
        joined = enter(a, "a")
        rounds_of(beach, a, joined, 1, 3)

    b_store.before = once("put_new", keys.MEMBERS, founds)
    reply = b.join(JoinRequest(model=MODEL, island="b"))

    assert reply.position.rounds == (4,)


def test_a_heartbeat_outlives_any_failure(caplog: pytest.LogCaptureFixture) -> None:
    """What nobody thought of is told, and the next one comes."""
    beach = Beach(start_islands=1)
    a, _, _ = beach.join("a")

    def fails() -> None:
        raise RuntimeError("nobody thought of this")

    a.stats = fails  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR, logger="atoll"):
        beach.time.sleep(20.0)
    assert "nobody thought of this" in caplog.text


def test_a_missing_permission_to_delete_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run goes on, and its bucket grows: somebody must know."""
    beach = Beach(start_islands=1)
    a, store, joined = beach.join("a", state_rounds=2)

    def denied(what: str, key: str) -> None:
        if what == "remove":
            raise StoreDenied("s3:DeleteObject is not allowed. Ask for it.")

    store.before = denied
    with caplog.at_level(logging.WARNING, logger="atoll"):
        rounds_of(beach, a, joined, 1, 9)
    assert caplog.text.count("s3:DeleteObject") == 1


def test_an_update_where_a_foreign_object_stands_names_the_key() -> None:
    """Nobody can put it: the key is named, and what to do."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    frame = update_of(a, joined, 1.0)
    key = keys.update(0, 1, "a", 1)
    beach.store.put(key, [b"somebody's notes"])
    with pytest.raises((CorruptError, Refused), match=key):
        a.publish(frame)


def test_a_mean_of_any_size_is_not_read_whole() -> None:
    """Who reads a mean knows how large it can be."""
    beach = Beach(start_islands=5)
    islands = [beach.join(f"i{number}") for number in range(5)]
    beach.store.put(keys.mean(0, 1, 0), [bytes(50_000_000)])
    sizes: list[int] = []
    for exchange, store, joined in islands:
        exchange.publish(update_of(exchange, joined, 1.0))

        def measured(key: str, first: int = 0, size: int | None = None) -> memoryview:
            found = beach.store.get(key, first, size)
            sizes.append(len(found))
            return found

        store.get = measured  # type: ignore[method-assign]
    for exchange, _, _ in islands:
        assert exchange.outcome(0, 1, wait_s=0.0) is not None
    assert max(sizes) < 10_000_000


def test_an_island_with_another_state_does_not_close_with_it() -> None:
    """One wrong bit in one memory: its own update is refused, and the others go on."""
    beach = Beach(start_islands=2)
    a, _, a_joined = beach.join("a")
    b, _, b_joined = beach.join("b")
    for exchange, joined in ((a, a_joined), (b, b_joined)):
        exchange.publish(update_of(exchange, joined, 1.0))
    for exchange in (a, b):
        assert exchange.outcome(0, 1, wait_s=0.0) is not None
    wrong = bytes(range(16))
    spoilt = update_of(b, a_joined, 1.0, round=2, base=wrong)
    b.publish(update_of(b, b_joined, 3.0, round=2))
    held = Heartbeat(island="a", incarnation=1, step=0, holds=(HeldRound(1, wrong),))
    a.heartbeat(held)
    a.publish(spoilt)
    a.outcome(0, 2, wait_s=1.0)

    assert beach.roster(2) == {"a": Verdict.REFUSED, "b": Verdict.COUNTED}
    assert b.state(0).header.round == 2


def test_a_run_that_ends_by_tokens_waits_for_what_departed_ahead() -> None:
    """Its last round is the furthest that anybody has published for."""
    beach = Beach(start_islands=2, end_tokens=10)
    a, _, a_joined = beach.join("a")
    b, _, b_joined = beach.join("b")
    last = departing(a, a_joined, 1.0, round=2)
    assert a.publish(last) is Reception.STAGED
    a.leave("a", 1)
    some = TrainingProgress(inner_steps=1, tokens=20)
    b.publish(update_of(b, b_joined, 1.0, progress=some))
    assert b.outcome(0, 1, wait_s=0.0) is not None
    b.publish(update_of(b, b_joined, 1.0, round=2))
    for _ in range(30):
        b.outcome(0, 2, wait_s=1.0)

    assert beach.roster(2) == {"a": Verdict.COUNTED, "b": Verdict.COUNTED}


def test_of_many_islands_no_whole_updates_are_kept() -> None:
    """Memory does not grow by a model for each island that takes part."""
    model = vector_model({"w": (200_000,)})
    beach = Beach(start_islands=5)
    islands = []
    for number in range(5):
        exchange, _ = beach.attach(f"i{number}")
        joined = exchange.join(JoinRequest(model=model, island=f"i{number}"))
        if joined.is_founder:
            state = FragmentState.found(np.zeros(200_000, np.float32), "sgd")
            exchange.publish(
                Frame(*state.to_frame(run=joined.run, fragment=0, outer=OUTER))
            )
        islands.append((exchange, joined))
    beach.time.sleep(7.0)
    base = islands[0][0].state(0).header.base
    for exchange, joined in islands:
        exchange.publish(_large_update(joined, base))
    for exchange, _ in islands:
        assert exchange.outcome(0, 1, wait_s=0.0) is not None
        seen = exchange._reader.updates.by_round.values()
        assert sum(len(body) for each in seen for _, body in each.values()) < 400_000


def _large_update(joined: JoinReply, base: bytes) -> Frame:
    body = np.ones(200_000, np.float32).view(np.uint8)
    header = Header(
        kind=FrameKind.UPDATE,
        run=joined.run,
        fragment=0,
        round=1,
        island=joined.island,
        incarnation=joined.incarnation,
        base=base,
        elements=200_000,
        norm=1.0,
    )
    return Frame(with_body(header, body), body)


def test_what_departs_while_a_roster_is_on_its_way_is_not_lost() -> None:
    """Who closes has decided, and its roster comes after the update and the farewell.

    Only who closes rounds for all can meet it without closing the round itself.
    """
    beach = Beach(deciding("b"))
    b, b_store, b_joined = beach.join("b")
    a, _, a_joined = beach.join("a")
    last = departing(a, a_joined, 1.0)
    b.publish(update_of(b, b_joined, 3.0))
    beach.time.sleep(3000.0)  # nobody waits for the other any more

    def leaves() -> None:
        assert a.publish(last) is Reception.STAGED
        a.leave("a", 1)

    b_store.before = once("put_new", keys.roster(0, 1), leaves)
    b._closer.close_if_due(0)
    b.publish(update_of(b, b_joined, 3.0, round=2))
    for _ in range(30):
        b.outcome(0, 2, wait_s=1.0)

    counted = [beach.roster(each).get("a") for each in (1, 2) if beach.has_closed(each)]
    assert Verdict.COUNTED in counted


class Flat(WaitingTime):
    """What is done at once waits for nothing else that is: threads are few."""

    is_busy = False

    def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        assert not self.is_busy, "a thread of the crew waits for the crew"
        self.is_busy = True
        try:
            return super().gather(acts)
        finally:
            self.is_busy = False


def test_foreign_means_do_not_take_every_thread() -> None:
    """Eight of them at once held all threads, and each waited for one more."""
    beach = Beach(start_islands=5)
    beach.time = Flat()
    islands = [beach.join(f"i{number}") for number in range(5)]
    beach.store.put(keys.mean(0, 1, 0), [b"somebody's notes"])
    for exchange, _, joined in islands:
        exchange.publish(update_of(exchange, joined, 1.0))
    for exchange, _, _ in islands:
        outcome = exchange.outcome(0, 1, wait_s=0.0)
        assert outcome is not None
        assert outcome.has_body


def spoilt_state(a: StoreExchange) -> Frame:
    """Return a state of round 3 that one island alone holds."""
    state = FragmentState(np.full(3, 7.0, np.float32), (), round=3)
    return Frame(*state.to_frame(run=a._reader.run, fragment=0, outer=OUTER))


def test_a_wrong_state_is_not_written() -> None:
    """The next round tells what the right one is."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    rounds_of(beach, a, joined, 1, 5)
    a.publish(spoilt_state(a))

    assert beach.store.items(keys.states(0)) == []


def test_a_wrong_state_is_passed_over() -> None:
    """Who reads it compares it with the roster of the next round."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a")
    rounds_of(beach, a, joined, 1, 5)
    unaware = BucketReader.open(beach.store, beach.time, url=URL)
    States(unaware, Outcomes(unaware, None)).write(spoilt_state(a))
    assert beach.store.items(keys.states(0))
    b, _, _ = beach.join("b")

    assert b.state(0).body.tobytes() == a.state(0).body.tobytes()


def test_what_a_dead_writer_left_of_a_state_is_removed() -> None:
    """Parts without an end are removed with the states of their time."""
    beach = Beach(start_islands=1)
    a, _, joined = beach.join("a", state_rounds=2)
    beach.store.put(keys.state_part(0, 1, 0), [b"half of a state"])
    rounds_of(beach, a, joined, 1, 8)

    kept = {int(item.key.split("/")[2]) for item in beach.store.items(keys.states(0))}
    assert len(kept) == 2
    assert 1 not in kept


def test_whoever_learns_of_others_by_a_roster_waits_for_them() -> None:
    """The founder had not read who joined since, and others closed the first round."""
    run = StoreRun(MemoryStore(), plain_settings(start_islands=3))
    exchanges = []
    for number, name in enumerate("cab"):
        reader = BucketReader.open(run.store, run.time, url="a test's store")
        exchange = StoreExchange(reader, key=name.encode(), nonce=bytes([number] * 16))
        exchanges.append((exchange, enter(exchange, name)))
    for exchange, joined in exchanges:
        exchange.publish(update_of(exchange, joined, 1.0))
    founder, joined = exchanges[0]
    founder.publish(update_of(founder, joined, 1.0, round=2))

    assert founder.outcome(0, 2, wait_s=0.0) is None
