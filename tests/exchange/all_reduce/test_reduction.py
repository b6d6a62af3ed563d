"""Ranks that share only a store have the same mean, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from atoll.algorithm.merge import mean
from atoll.errors import CorruptError, Unreachable, UsageError
from atoll.exchange.all_reduce import AllReduce, Rendezvous, Sections, open_rendezvous
from atoll.exchange.all_reduce.frames import ReduceTerms
from atoll.exchange.all_reduce.rendezvous import Deadline, RankProgress
from atoll.runtime import SystemClock
from atoll.store import CountedStore, MemoryStore, Store, StoreTraits
from tests.exchange.all_reduce.ranks import (
    LARGE,
    Values,
    join,
    reduce,
    together,
    values,
)

SMALL = 1000


def expected(number: int, world_size: int, *, size: int) -> bytes:
    every = [values(rank, number, size=size) for rank in range(world_size)]
    return mean(every).tobytes()


def run(
    ranks: list[AllReduce], number: int, *, size: int, op: str = "mean"
) -> list[Values]:
    """Have every rank make one round."""
    return together(
        [
            partial(reduce, each, values(rank, number, size=size), op=op)
            for rank, each in enumerate(ranks)
        ]
    )


def stores(tmp_path: Path) -> dict[str, Callable[[], Store | Path]]:
    return {"memory": MemoryStore, "file": lambda: tmp_path / "store"}


@pytest.mark.parametrize("size", [1, SMALL, LARGE])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_every_rank_has_the_same_mean(
    kind: str, world_size: int, size: int, tmp_path: Path
) -> None:
    """That of a round's merge, round after round, with parts and without."""
    store = stores(tmp_path)[kind]()
    ranks = [join(store, rank, world_size) for rank in range(world_size)]
    for number in range(3):
        wanted = expected(number, world_size, size=size)
        for found in run(ranks, number, size=size):
            assert found.tobytes() == wanted


def test_a_sum_is_not_divided() -> None:
    """Four ones are four."""
    store = MemoryStore()
    ranks = [join(store, rank, 4) for rank in range(4)]
    ones = np.ones(5, np.float32)
    found = together([partial(reduce, each, ones, op="sum") for each in ranks])
    assert [each.tolist() for each in found] == [[4.0] * 5] * 4


@pytest.mark.parametrize("world_size", [4, 8])
def test_bytes_of_a_rank_do_not_grow_with_their_number(world_size: int) -> None:
    """At most three times its own, and some headers."""
    store = MemoryStore()
    places = [open_rendezvous(store) for _ in range(world_size)]
    ranks = [
        AllReduce(place, rank=rank, world_size=world_size, name="test", timeout_s=60.0)
        for rank, place in enumerate(places)
    ]
    size = world_size * 2**18  # a piece for each
    before = [place.requests for place in places]
    run(ranks, 0, size=size)
    for place, earlier in zip(places, before, strict=True):
        asked = place.requests.since(earlier)
        assert asked.bytes_up + asked.bytes_down <= 3.02 * 4 * size


@pytest.mark.parametrize("world_size", [2, 5])
def test_old_rounds_are_collected(world_size: int) -> None:
    """After ten rounds there is one: its values, its parts, and each rank's count."""
    store = MemoryStore()
    ranks = [join(store, rank, world_size) for rank in range(world_size)]
    for number in range(10):
        run(ranks, number, size=LARGE)
    kinds = [item.key.split("/")[1] for item in store.items("test/")]
    parts = 0 if world_size == 2 else 5
    assert kinds.count("up") == kinds.count("done") == world_size
    assert kinds.count("mean") == parts
    assert len(kinds) == 2 * world_size + parts + 1


def test_a_rank_that_does_not_come_is_named() -> None:
    """With the object, the round, how far it has come, and since when."""
    store = MemoryStore()
    ranks = [join(store, rank, 3) for rank in range(3)]
    run(ranks, 0, size=SMALL)
    late = join(store, 0, 3, timeout_s=0.2)
    mine = values(0, 1, size=SMALL)
    with pytest.raises(Unreachable) as told:
        reduce(late, mine)
    said = str(told.value)
    assert "Round 1 of 'test' waits since 20" in said
    assert "2 of 3 ranks" in said
    assert "rank 1 (the store/test/up/000000000001.00001), which has done 1" in said
    assert "timeout_s=0.2" in said


def test_nobody_is_named_who_has_come_at_the_last_moment() -> None:
    """Two ranks read each other: a part that nobody puts is nobody's fault."""
    store = MemoryStore()
    run([join(store, rank, 2) for rank in range(2)], 0, size=SMALL)
    sections = Sections({"float32": SMALL})
    agreed = ReduceTerms("test", 2, "mean", sections, layout=f"{SMALL}")
    standing = RankProgress(open_rendezvous(store), "test", 0, 2)
    told = standing.absent(agreed, 0, Deadline.begin(SystemClock(), 1.0))
    assert "the last of 2 ranks has come just now. Call again" in str(told)


def test_a_call_that_was_too_late_can_be_repeated() -> None:
    """What it sent counts, once; even if the second call brings something else."""
    store = MemoryStore()
    hasty, other = join(store, 0, 2, timeout_s=0.1), join(store, 1, 2)
    with pytest.raises(Unreachable):
        reduce(hasty, values(0, 0, size=SMALL))
    elsewhere = values(9, 9, size=SMALL)
    found = together(
        [
            partial(reduce, hasty, elsewhere),
            partial(reduce, other, values(1, 0, size=SMALL)),
        ]
    )
    assert {each.tobytes() for each in found} == {expected(0, 2, size=SMALL)}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_without_its_part_is_named(world_size: int) -> None:
    """All have sent, and the one that is to reduce a part has gone."""
    store = MemoryStore()
    for rank in range(world_size):
        hasty = join(store, rank, world_size, timeout_s=0.05)
        if rank < world_size - 1:
            with pytest.raises(Unreachable):
                reduce(hasty, values(rank, 0, size=LARGE))
    if world_size > 2:
        hasty = join(store, 3, 4, timeout_s=0.05)
        # Rank 3 reduces its own part, and the others have gone before it came.
        with pytest.raises(Unreachable, match=r"3 of 4 ranks: rank 0 .*test/mean/0"):
            reduce(hasty, values(3, 0, size=LARGE))


def test_a_rank_that_starts_again_goes_on_with_its_round() -> None:
    """The store knows how many it has done."""
    store = MemoryStore()
    ranks = [join(store, rank, 2) for rank in range(2)]
    for number in range(3):
        run(ranks, number, size=SMALL)
    again = join(store, 1, 2)
    assert again.round == 3
    found = run([ranks[0], again], 3, size=SMALL)
    assert found[0].tobytes() == expected(3, 2, size=SMALL)


def test_who_keeps_count_may_have_the_last_mean_again() -> None:
    """Its checkpoint was from before; nobody else notices."""
    store = MemoryStore()
    ranks = [join(store, rank, 4) for rank in range(4)]
    for number in range(3):
        run(ranks, number, size=LARGE)
    again = join(store, 1, 4, start_round=2)
    found = reduce(again, values(7, 7, size=LARGE))
    assert found.tobytes() == expected(2, 4, size=LARGE)
    ranks[1] = again
    for found in run(ranks, 3, size=LARGE):
        assert found.tobytes() == expected(3, 4, size=LARGE)


@pytest.mark.parametrize("start_round", [0, 1, 4, 99])
def test_a_round_that_is_not_to_be_had_is_refused(start_round: int) -> None:
    """It is collected, or has not come: with what can be."""
    store = MemoryStore()
    ranks = [join(store, rank, 2) for rank in range(2)]
    for number in range(3):
        run(ranks, number, size=SMALL)
    with pytest.raises(UsageError, match=rf"start_round={start_round} .* Begin with 3"):
        join(store, 0, 2, start_round=start_round)


def test_names_do_not_meet() -> None:
    """Each has its own rounds, in one store."""
    store = MemoryStore()
    a, b = join(store, 0, 1, name="a"), join(store, 0, 1, name="b")
    reduce(a, values(0, 0, size=SMALL))
    assert (a.round, b.round) == (1, 0)


def test_two_processes_of_one_rank_are_found() -> None:
    """In the second round one of them is told."""
    store = MemoryStore()
    first, second, other = join(store, 0, 2), join(store, 0, 2), join(store, 1, 2)
    run([first, other], 0, size=SMALL)
    reduce(second, values(0, 0, size=SMALL))  # as if it had been started again
    run([first, other], 1, size=SMALL)
    store.put("test/up/000000000001.00000", [b""])  # as it was before the collection
    with pytest.raises(
        UsageError, match=r"Another process has sent .* rank 0 in round"
    ):
        reduce(second, values(0, 1, size=SMALL))


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_reduce_different_things_are_told(world_size: int) -> None:
    """Another size, another shape, or a sum in place of a mean."""
    for other in ((SMALL + 1, "mean"), (LARGE, "mean"), (SMALL, "sum")):
        store = MemoryStore()
        for rank in range(1, world_size):
            hasty = join(store, rank, world_size, timeout_s=0.01)
            with pytest.raises((Unreachable, UsageError)):
                reduce(hasty, values(rank, 0, size=other[0]), op=other[1])
        with pytest.raises(UsageError, match=r"Rank \d reduces something else in rou"):
            reduce(join(store, 0, world_size), values(0, 0, size=SMALL))


def test_a_name_is_for_one_number_of_ranks() -> None:
    """A rank with another is refused at once."""
    store = MemoryStore()
    join(store, 0, 2)
    with pytest.raises(UsageError, match=r'world_size": 2.*"world_size": 3.* new name'):
        join(store, 0, 3)


FOREIGN: dict[str, Callable[[bytes], bytes]] = {
    "not a frame": lambda whole: b"<html>" * 100,
    "truncated": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "a bit in the body": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "a bit in the header": lambda whole: whole[:60] + b"\xff" + whole[61:],
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_or_half_written_object_is_named(what: str, world_size: int) -> None:
    """Nothing of it is used, and the remedy is told."""
    store, last = MemoryStore(), world_size - 1  # who reduces the end of the body
    for rank in range(last):
        hasty = join(store, rank, world_size, timeout_s=0.01)
        with pytest.raises(Unreachable):
            reduce(hasty, values(rank, 0, size=LARGE))
    key = "test/up/000000000000.00000"
    store.put(key, [FOREIGN[what](bytes(store.get(key)))])
    with pytest.raises(CorruptError, match=rf"the store/{key}.* Remove that object"):
        reduce(join(store, last, world_size), values(last, 0, size=LARGE))


def test_an_object_of_another_round_is_refused() -> None:
    """Somebody has copied it there."""
    store = MemoryStore()
    ranks = [join(store, rank, 2) for rank in range(2)]
    run(ranks, 0, size=SMALL)
    old = store.get("test/up/000000000000.00001")
    store.put_new("test/up/000000000001.00001", [old])
    with pytest.raises(CorruptError, match=r"is of another round: 0 in place of 1"):
        reduce(ranks[0], values(0, 1, size=SMALL))


def test_a_count_that_is_none_is_refused() -> None:
    """Nothing is guessed from it."""
    store = MemoryStore()
    store.put("test/done/00000", [b"-1\n"])
    with pytest.raises(CorruptError, match=r"test/done/00000 holds b'-1"):
        join(store, 0, 2)


class Weak(MemoryStore):
    """Puts over what is there."""

    traits = StoreTraits(has_put_new=False)


def test_a_store_without_put_if_absent_is_refused() -> None:
    """A rank that is started again would change what others have read."""
    with pytest.raises(UsageError, match=r"the store overwrites an existing object"):
        open_rendezvous(Weak())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"rank": 2}, r"rank=2 must be from 0 to 1"),
        ({"rank": -1}, r"rank=-1 must be"),
        ({"world_size": 0}, r"world_size=0 must be from 1"),
        ({"name": "A/b"}, r"name='A/b' must be of a-z"),
        ({"timeout_s": 0.0}, r"timeout_s=0.0 must be above 0"),
        ({"timeout_s": float("nan")}, r"timeout_s=nan must be above 0"),
    ],
)
def test_wrong_words_are_refused(words: dict[str, object], said: str) -> None:
    """Before anything is put."""
    store = CountedStore(MemoryStore())
    place = open_rendezvous(store)
    before = store.requests
    more = {"rank": 0, "world_size": 2, "name": "test", "timeout_s": 1.0} | words
    with pytest.raises(UsageError, match=said):
        AllReduce(place, **more)  # type: ignore[arg-type]  # words by name
    assert store.requests == before


def test_waiting_is_bounded_in_requests() -> None:
    """Looks become seldom: a second of waiting takes about ten."""
    counted = CountedStore(MemoryStore())
    hasty = join(counted, 0, 2, timeout_s=1.0)
    before = counted.requests
    with pytest.raises(Unreachable):
        reduce(hasty, values(0, 0, size=SMALL))
    # Pauses of at least half of 0.02 * 1.5**n: 12 of them are above a second.
    assert counted.requests.since(before).gets <= 12 + 4


def test_a_password_in_a_url_is_not_told() -> None:
    """Errors go to logs."""
    place = Rendezvous(MemoryStore(), url="sftp://user:secret@host/runs")
    assert place.path("key") == "sftp://host/runs/key"
