"""Large objects are read by several concurrent ranges, within bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import NoSuchObject, Unreachable, UsageError
from atoll.store import (
    CountedStore,
    MemoryStore,
    ProbedStore,
    RangedStore,
    RetryingStore,
    StoreTraits,
)
from atoll.store.client import num_ranges
from atoll.testing.store_contract import STORE_CLAIMS, Claim
from tests.store.buckets import Settings, s3_store

WHOLE = bytes(range(100))


class Watched(MemoryStore):
    """Knows how many reads are under way at once, and lets none end before a number."""

    def __init__(self, *, together: int) -> None:
        super().__init__()
        self._arrived = threading.Barrier(together)
        self._lock = threading.Lock()
        self.now = self.most = 0

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self._arrived.wait(timeout=30)
        with self._lock:
            self.now -= 1
        return super().get(key, first, size)


@pytest.mark.parametrize("claim", STORE_CLAIMS, ids=lambda each: each.__name__)
def test_it_is_a_store(claim: Claim) -> None:
    """With ranges so short that every object is large."""
    claim(lambda: RangedStore(MemoryStore(), concurrency=3, range_bytes=1000))


def test_a_large_object_of_s3_comes_by_ranges(s3: Settings) -> None:
    """The same bytes, by as many requests as it has ranges."""
    counted = CountedStore(s3_store(s3))
    store = RangedStore(RetryingStore(counted), concurrency=4, range_bytes=2**20)
    whole = bytes(number % 251 for number in range(5_000_001))
    store.put_new("large", [whole])

    assert bytes(store.get("large", 0, len(whole))) == whole
    # 5,000,001 bytes are 4 ranges of 1,048,576 and one of 805,697.
    assert counted.requests.gets == 5
    assert counted.requests.bytes_down == len(whole)
    assert bytes(store.get("large")) == whole  # its size need not be known


def test_reads_are_made_together_and_no_more_than_allowed() -> None:
    """Four at once, of nine ranges and the three of another reader."""
    inner = Watched(together=4)
    MemoryStore.put(inner, "key", [WHOLE[:90]])
    store = RangedStore(inner, concurrency=4, range_bytes=10)
    others = threading.Thread(target=store.get, args=("key", 0, 30))
    others.start()

    assert bytes(store.get("key", 0, 90)) == WHOLE[:90]
    others.join(timeout=30)
    assert inner.most == 4


def test_a_stream_keeps_a_window_in_memory() -> None:
    """While nobody takes the first range, only `concurrency` have been asked for."""
    counted = CountedStore(MemoryStore())
    counted.put("key", [WHOLE])
    store = RangedStore(counted, concurrency=3, range_bytes=10)
    parts = store.stream("key", 0, 100)

    assert bytes(next(parts)) == WHOLE[:10]
    store.close()  # waits for what was asked for
    assert counted.requests.gets == 3


@given(
    first=st.integers(0, 120),
    size=st.none() | st.integers(0, 120),
    concurrency=st.integers(1, 4),
    range_bytes=st.integers(1, 150),
)
def test_any_range_is_what_the_store_has(
    first: int, size: int | None, concurrency: int, range_bytes: int
) -> None:
    """However it is cut."""
    inner = MemoryStore()
    inner.put("key", [WHOLE])
    store = RangedStore(inner, concurrency=concurrency, range_bytes=range_bytes)
    try:
        found = bytes(store.get("key", first, size))
        assert found == bytes(inner.get("key", first, size))
    finally:
        store.close()


def test_a_small_object_takes_one_request() -> None:
    """Also if its size is not known."""
    counted = CountedStore(MemoryStore())
    counted.put("key", [WHOLE])
    store = RangedStore(counted, range_bytes=101)
    assert bytes(store.get("key")) == bytes(store.get("key", 0, 100)) == WHOLE
    assert counted.requests.gets == 2


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(80, [80]), (81, [81]), (90, [90]), (91, [80, 11]), (100, [80, 20])],
)
def test_what_is_left_goes_along_with_the_range_before(
    size: int, sizes: list[int]
) -> None:
    """Less than an eighth of a range is not worth a request."""
    store = RangedStore(MemoryStore(), range_bytes=80)
    store.put("key", [WHOLE])
    assert _sizes(store.stream("key", 0, size)) == sizes
    assert num_ranges(size, range_bytes=80) == len(sizes)


def test_a_bound_that_is_a_byte_above_a_range_costs_nothing() -> None:
    """Who asks for one byte more, to see what is too long, asks once."""
    counted = CountedStore(MemoryStore())
    counted.put("key", [WHOLE])
    store = RangedStore(counted, range_bytes=120)
    assert bytes(store.get("key", 0, 121)) == WHOLE
    assert counted.requests.gets == 1


def test_what_is_not_there_is_told() -> None:
    """By the first range."""
    store = RangedStore(MemoryStore(), range_bytes=10)
    with pytest.raises(NoSuchObject):
        store.get("key", 0, 100)


class Growing(MemoryStore):
    """Has an object that is longer for those who ask for its end."""

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return memoryview(WHOLE[first : first + 5 if first == 10 else first + 10])


def test_an_object_that_grows_is_not_put_together_wrongly() -> None:
    """A range that is short must be the last."""
    store = RangedStore(Growing(), concurrency=2, range_bytes=10)
    with pytest.raises(Unreachable, match=r"'key' grew"):
        store.get("key", 0, 40)


class Rangeless(MemoryStore):
    """Cannot read a part of an object."""

    traits = StoreTraits(has_ranges=False)


def test_a_store_without_ranges_is_read_whole_and_once() -> None:
    """Each range would cost the whole object."""
    counted = CountedStore(Rangeless())
    store = RangedStore(ProbedStore(counted), range_bytes=10)
    store.put("key", [WHOLE])
    before = counted.requests
    assert bytes(store.get("key", 5, 90)) == WHOLE[5:95]
    assert counted.requests.since(before).gets == 1


@pytest.mark.parametrize("bounds", [{"concurrency": 0}, {"range_bytes": 0}])
def test_bounds_are_checked(bounds: dict[str, int]) -> None:
    """Nothing at once is nothing ever."""
    with pytest.raises(UsageError, match="must be 1 or more"):
        RangedStore(MemoryStore(), **bounds)


def _sizes(parts: Iterator[memoryview]) -> list[int]:
    return [len(part) for part in parts]


def test_a_stream_comes_in_ranges() -> None:
    """So that whoever reads it needs memory for one."""
    store = RangedStore(MemoryStore(), range_bytes=40)
    store.put("key", [WHOLE])
    assert _sizes(store.stream("key", 0, 100)) == [40, 40, 20]
