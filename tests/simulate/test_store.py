"""A store in virtual time: whole objects, late lists, lost answers, dead writers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from atoll.errors import NoSuchObject, Unreachable, UsageError
from atoll.retry import STORE_OUTAGE
from atoll.simulate import FaultPlan, Latency, SimWorld, apply
from atoll.simulate.hosts import SimRuntime
from atoll.simulate.store import REQUEST_S, SENT_BYTES_PER_S, Bucket, SimStore
from atoll.store import Item, RetryingStore
from atoll.testing.store_contract import STORE_CLAIMS

BY_THREADS = {
    "one_of_many_puts_a_new_object",
    "who_reads_sees_a_whole_object",
    "two_stores_do_not_meet",
    "a_probe_finds_what_is_declared",
}
"""Claims that need threads or a second store."""


class Shore:
    """One store, and processes that use it."""

    def __init__(self, *names: str, faults: FaultPlan | None = None) -> None:
        self.world = SimWorld(3, latency=Latency(base_s=0.25, jitter_s=0.0))
        self.bucket = Bucket(self.world)
        self.bucket.begin()
        for name in names:
            self.world.add(name)
        self.told: list[object] = []
        apply(faults or FaultPlan(), self.world)

    def start(self, name: str, act: Callable[[SimStore], object]) -> None:
        """Let a process do something with the store, and tell what it returned."""
        process = self.world.processes[name]

        def program() -> None:
            try:
                self.told.append(act(SimStore(self.world, process)))
            except (NoSuchObject, Unreachable) as exc:
                self.told.append(type(exc))

        process.start(program)

    def run_one(self, name: str, act: Callable[[SimStore], object]) -> list[object]:
        """Let one process do something, and return what came of it."""
        self.start(name, act)
        return self.run()

    def run(self) -> list[object]:
        with self.world:
            self.world.scheduler.run(10_000.0)
        return self.told


@pytest.mark.parametrize("claim", STORE_CLAIMS, ids=lambda claim: claim.__name__)
def test_it_is_a_store(claim: Callable[..., None]) -> None:
    """In good weather it does what every store must do."""
    if claim.__name__ in BY_THREADS:
        pytest.skip("threads do not live in virtual time")
    shore = Shore("a")
    shore.start("a", lambda store: claim(lambda: store))

    assert shore.run() == [None]


def test_what_is_put_is_there_when_it_has_arrived() -> None:
    """Not before all of it was sent, and the answer comes a way back later."""
    shore = Shore("a")
    half_s = [b"x" * int(SENT_BYTES_PER_S / 2)]
    seen = []
    shore.start("a", lambda store: store.put_new("k", half_s))
    for at_s in (0.7, 0.8):
        shore.world.scheduler.at(at_s, lambda: seen.append("k" in shore.bucket.objects))

    assert shore.run() == [True]
    assert seen == [False, True]


def test_who_dies_while_it_sends_has_put_nothing() -> None:
    """As with an upload that is never completed."""
    shore = Shore("a", faults=FaultPlan().kill("a", at_s=0.3))
    half_s = [b"x" * int(SENT_BYTES_PER_S / 2)]
    shore.start("a", lambda store: store.put_new("k", half_s))

    assert shore.run() == []
    assert shore.bucket.objects == {}


def test_what_a_dead_process_had_sent_may_be_done_or_not() -> None:
    """Over many of them, some are and some are not."""
    done = []
    for seed in range(40):
        shore = Shore("a", faults=FaultPlan().kill("a", at_s=0.1))
        shore.bucket._rng.seed(seed)
        shore.start("a", lambda store: store.put_new("k", []))
        shore.run()
        done.append("k" in shore.bucket.objects)

    assert {*done} == {True, False}


def test_a_writer_that_stood_still_goes_on_an_hour_later() -> None:
    """Its put takes effect then, unless somebody was there before."""
    shore = Shore("a", "b", faults=FaultPlan().freeze("a", at_s=0.3, for_s=3600))
    half_s = [b"x" * int(SENT_BYTES_PER_S / 2)]
    shore.start("a", lambda store: store.put_new("k", half_s))
    shore.start("b", lambda store: store.put_new("k", [b"b"]))

    assert shore.run() == [True, False]
    assert shore.bucket.objects == {"k": b"b"}


def test_a_late_list_misses_what_is_new_and_has_what_is_gone() -> None:
    """For as long as it lags, while everything can be read."""
    shore = Shore("a", faults=FaultPlan().list_lag("store", by_s=600.0))
    shore.bucket.objects["old"], shore.bucket.changed_s["old"] = b"1", -1000.0

    def act(store: SimStore) -> list[object]:
        store.put("new", [b"22"])
        store.remove(["old"])
        first, read = store.items(""), bytes(store.get("new"))
        shore.world.scheduler.sleep(600.0)
        return [first, read, store.items("")]

    assert shore.run_one("a", act) == [
        [[Item("old", 1)], b"22", [Item("new", 2)]],
    ]


def test_a_store_fails_before_or_after_it_has_done_what_was_asked() -> None:
    """So that who is told nothing must find out."""
    shore = Shore("a", faults=FaultPlan().outage("store"))

    def act(store: SimStore) -> int:
        for number in range(30):
            with pytest.raises(Unreachable, match="503"):
                store.put_new(f"k{number}", [])
        return len(shore.bucket.objects)

    (done,) = shore.run_one("a", act)
    assert isinstance(done, int)
    assert 5 < done < 25


def test_a_patient_caller_gets_there_and_is_the_first_once() -> None:
    """Whatever was lost on the way, of many that put one object one has put it."""
    plan = FaultPlan().outage("store", rate=0.5, for_s=60.0)
    shore = Shore("a", "b", "c", faults=plan)

    def act(name: str) -> Callable[[SimStore], object]:
        pause, rng = shore.world.scheduler.sleep, random.Random(name)
        return lambda store: RetryingStore(
            store, sleep=pause, policy=STORE_OUTAGE, rng=rng
        ).put_new("k", [name.encode()])

    for name in ("a", "b", "c"):
        shore.start(name, act(name))

    assert sorted(map(str, shore.run())) == ["False", "False", "True"]


def test_who_is_cut_off_from_the_store_waits_for_a_while_and_is_told() -> None:
    """A request has a time limit of its own."""
    shore = Shore("a", faults=FaultPlan().partition(["a"], at_s=0.0))
    shore.start("a", lambda store: store.items(""))

    assert shore.run() == [Unreachable]
    assert shore.world.scheduler.now_s >= REQUEST_S


def test_a_lock_that_is_held_over_a_request_is_found() -> None:
    """Others would wait for it as long as for the network."""
    shore = Shore("a")

    def act(store: SimStore) -> object:
        store.is_locked = lambda: True
        with pytest.raises(AssertionError, match="a lock is held over List"):
            store.items("")
        return "found"

    assert shore.run_one("a", act) == ["found"]


def test_only_a_store_fails_as_a_store_does() -> None:
    """A plan that says so of an island is refused by name."""
    with pytest.raises(UsageError, match="a fault of a store for 'a', which is not"):
        Shore("a", faults=FaultPlan().outage("a"))


def test_things_done_together_are_done_at_once_and_the_first_failure_is_told() -> None:
    """When all have ended, as with threads."""
    shore = Shore("a")
    runtime = SimRuntime(shore.world, shore.world.processes["a"])
    scheduler = shore.world.scheduler
    ended: list[int] = []

    def wait(number: int) -> int:
        scheduler.sleep(float(number))
        ended.append(number)
        if number == 2:
            raise Unreachable("two")
        return number

    def act(store: SimStore) -> list[object]:
        told: list[object] = [runtime.gather([lambda: wait(3), lambda: wait(1)])]
        told.append(scheduler.now_s)
        with pytest.raises(Unreachable, match="two"):
            runtime.gather([lambda: wait(2), lambda: wait(4)])
        return [*told, ended]

    assert shore.run_one("a", act) == [[[3, 1], 3.0, [1, 3, 2, 4]]]


def test_what_repeats_ends_when_the_island_has_left() -> None:
    """Nothing is done in the background of who is gone."""
    shore = Shore("a")
    runtime = SimRuntime(shore.world, shore.world.processes["a"])
    done: list[float] = []

    def act(store: SimStore) -> None:
        runtime.every(6.0, lambda: done.append(shore.world.scheduler.now_s))
        runtime.sleep(20.0)
        runtime.close()

    shore.run_one("a", act)
    assert done == [6.0, 12.0, 18.0]
