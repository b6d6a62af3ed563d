"""What lies between the exchange and an adapter: ranges, a probe, retries, a counter.

`RangedStore` reads large objects by several ranges at once.
Rule 1: no more than `at_once` reads are under way.
Rule 2: a reader of `stream` keeps no more than `at_once` ranges in memory, whatever the
        size of the object: the next is requested when the first was taken.
Rule 3: it belongs on top of `RetryingStore`, so that a range that fails is requested
        again by itself.

`ProbedStore` tries once, at the start, which abilities a store has.

`RetryingStore` repeats requests that fail for a moment.
Rule 4: waits grow, with jitter, so that islands that failed together do not come back
        together.
Rule 5: a put of a new object whose response was lost may have been done. If the object
        is there afterwards and has our bytes, it is ours, or equal to ours.
Rule 6: the number of retries and their time are bounded; then the last failure is
raised.

`CountedStore` counts requests, with their price: for metrics and for benches. It
belongs right before the adapter, because a retry costs again.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from atoll.errors import Unreachable, UsageError
from atoll.store.base import (
    Data,
    Item,
    Store,
    StoreTraits,
    size_of,
    window,
)

AT_ONCE = 4
"""Two connections fill most links; twice that hides a slow one."""

RANGE_BYTES = 8 * 2**20
"""Long enough that a request's own time does not count, short enough to repeat."""


def num_ranges(size: int, *, range_bytes: int = RANGE_BYTES) -> int:
    """Return by how many requests a range is read, if the object is so long.

    What is left of less than an eighth goes along with the range before it: a request
    of its own would take longer. So a bound may be a byte above a whole range.
    """
    return max(1, -(-(size - range_bytes // 8) // range_bytes))


class RangedStore:
    """Reads another store's large objects by ranges. Implements `Store`.

    Small objects take one request, as before. An owner that overwrites a large one
    meanwhile may give a mixture, which its digest tells; what was put new never does.
    """

    def __init__(
        self, store: Store, *, at_once: int = AT_ONCE, range_bytes: int = RANGE_BYTES
    ) -> None:
        if at_once < 1 or range_bytes < 1:
            raise UsageError(
                f"at_once={at_once} and range_bytes={range_bytes} must be 1 at least."
            )
        self._store, self._range_bytes, self._at_once = store, range_bytes, at_once
        self._threads = ThreadPoolExecutor(at_once, "atoll-store")

    @property
    def traits(self) -> StoreTraits:
        return self._store.traits

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._store.put(key, parts)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        window(0, first, size)
        if not self.traits.has_ranges:
            return self._threads.submit(self._store.get, key, first, size).result()
        parts = self.stream(key, first, size)
        part = next(parts)
        if len(part) < self._range_bytes or len(part) == size:
            return part
        whole = bytearray(part)
        for part in parts:
            whole += part
        return memoryview(whole)

    def stream(
        self, key: str, first: int = 0, size: int | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes of a range in order; fewer where the object ends.

        Raises:
            NoSuchObject: there is no object.
            Unreachable: the object grew while it was read. Ask again.
        """
        window(0, first, size)
        coming = self._ranges(first, size)
        asked: deque[tuple[int, Future[memoryview]]] = deque()
        # Whether an object of unknown size is large is known when a range is full.
        at_once, is_over = (1 if size is None else self._at_once), False
        try:
            while True:
                while not is_over and len(asked) < at_once and (at := next(coming, ())):
                    asked.append(
                        (at[1], self._threads.submit(self._store.get, key, *at))
                    )
                if not asked:
                    return
                wanted, future = asked.popleft()
                part, at_once = future.result(), self._at_once
                if is_over and part:
                    raise Unreachable(f"{key!r} grew while it was read. Ask again.")
                is_over = is_over or len(part) < wanted
                yield part
        finally:
            for _, future in asked:
                future.cancel()

    def items(self, prefix: str) -> list[Item]:
        return self._store.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._store.remove(keys)

    def close(self) -> None:
        """End its threads, after what is under way."""
        self._threads.shutdown(cancel_futures=True)

    def _ranges(self, first: int, size: int | None) -> Iterator[tuple[int, int]]:
        """Yield where each range begins and its size; one at least, if it is empty."""
        step = self._range_bytes
        if size is None:
            yield from ((at, step) for at in count(first, step))
            return
        last = step * (num_ranges(size, range_bytes=step) - 1)
        yield from ((first + at, step) for at in range(0, last, step))
        yield first + last, size - last


PROBES = "probes/"
TEXT = b"0123456789"


def probe(store: Store) -> StoreTraits:
    """Return what a store has shown to be able to do; it declares less at most.

    Puts a small object, tries to put another in its place, reads a part of it, lists
    it and removes it.

    Raises:
        StoreDenied: one of these is not allowed: reading, writing, listing, deleting.
        Unreachable: the store does not answer.
    """
    key = f"{PROBES}{secrets.token_hex(16)}"
    store.put_new(key, [TEXT])
    try:
        store.items(PROBES)  # what it finds may be late; that it may look must be known
        return StoreTraits(
            has_put_new=store.traits.has_put_new and _keeps(store, key),
            has_ranges=store.traits.has_ranges and _reads_parts(store, key),
        )
    finally:
        store.remove([key])


def require_put_new(traits: StoreTraits, *, store: str) -> None:
    """Raise UsageError if a store that was probed cannot keep what was put first."""
    if not traits.has_put_new:
        raise UsageError(
            f"{store} puts an object over one that is there, although it was asked not "
            "to (put-if-absent, If-None-Match: *). Two could decide the same thing "
            "differently. Use a store that can: S3, Google, Azure or a directory."
        )


def _keeps(store: Store, key: str) -> bool:
    return not store.put_new(key, [TEXT[::-1]]) and store.get(key) == TEXT


def _reads_parts(store: Store, key: str) -> bool:
    try:
        return len(store.get(key, 2, 3)) == 3
    except Unreachable:
        store.get(key)  # if that fails, too, it is not for the range
        return False


class ProbedStore:
    """A store with the traits that it has shown. Implements `Store`."""

    def __init__(self, store: Store) -> None:
        self._store, self.traits = store, probe(store)

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._store.put(key, parts)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        if self.traits.has_ranges:
            return self._store.get(key, first, size)
        window(0, first, size)
        whole = self._store.get(key)
        begin, end = window(len(whole), first, size)
        return whole[begin:end]

    def items(self, prefix: str) -> list[Item]:
        return self._store.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._store.remove(keys)


T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How often a store is asked again, and how long to wait before."""

    max_tries: int = 6
    first_s: float = 0.25
    longest_s: float = 8.0

    def waits_s(self, rng: random.Random) -> Iterator[float]:
        """Yield the pauses between the tries: doubled each, and half of it chance."""
        longest_s = self.first_s
        for _ in range(self.max_tries - 1):
            yield rng.uniform(0.5, 1.0) * min(longest_s, self.longest_s)
            longest_s *= 2


class RetryingStore:
    """Asks another store again when it fails. Implements `Store`.

    Args:
        pause: Waits so many seconds; one that is to end soon may raise instead.
    """

    def __init__(
        self,
        store: Store,
        *,
        pause: Callable[[float], None] | None = None,
        tries: RetryPolicy | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._pause = pause or _pause
        self.tries = tries or RetryPolicy()
        self._rng = rng or random.Random()

    @property
    def traits(self) -> StoreTraits:
        return self._store.traits

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        is_unsure = False

        def put() -> bool:
            nonlocal is_unsure
            try:
                is_ours = self._store.put_new(key, parts)
            except Unreachable:
                is_unsure = True
                raise
            return is_ours or (is_unsure and self._holds(key, parts))

        return self._again(put)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._again(lambda: self._store.put(key, parts))

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return self._again(lambda: self._store.get(key, first, size))

    def items(self, prefix: str) -> list[Item]:
        return self._again(lambda: self._store.items(prefix))

    def remove(self, keys: Iterable[str]) -> None:
        every = list(keys)
        self._again(lambda: self._store.remove(every))

    def _holds(self, key: str, parts: Sequence[Data]) -> bool:
        """Return whether the object at a key has these bytes, and no others."""
        size = size_of(parts)
        found, at = self._store.get(key, 0, size + 1), 0
        if len(found) != size:
            return False
        for part in parts:
            view = memoryview(part).cast("B")
            if found[at : at + len(view)] != view:
                return False
            at += len(view)
        return True

    def _again(self, act: Callable[[], T]) -> T:
        waits_s = self.tries.waits_s(self._rng)
        while True:
            try:
                return act()
            except Unreachable:
                if (wait_s := next(waits_s, None)) is None:
                    raise
            self._pause(wait_s)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


USD_PER_1000_WRITES = 0.005
"""Class A of S3 Standard in us-east-1, November 2026: put, list, copy."""

USD_PER_1000_READS = 0.0004
"""Class B of S3 Standard in us-east-1, November 2026: get, head. Deletes are free."""

PAGE = 1000
"""How many objects one request lists, or removes."""


@dataclass(frozen=True)
class RequestCounts:
    """How often a store was asked, and how many bytes went each way."""

    puts: int = 0
    lists: int = 0
    gets: int = 0
    removes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def writes(self) -> int:
        """Requests of class A."""
        return self.puts + self.lists

    @property
    def reads(self) -> int:
        """Requests of class B."""
        return self.gets

    @property
    def total(self) -> int:
        return self.puts + self.lists + self.gets + self.removes

    @property
    def usd(self) -> float:
        """What S3 asks for these requests; bytes within its region are free."""
        writes, reads = self.writes / 1000, self.reads / 1000
        return writes * USD_PER_1000_WRITES + reads * USD_PER_1000_READS

    def since(self, earlier: RequestCounts) -> RequestCounts:
        """Return what was asked after `earlier`."""
        return RequestCounts(
            puts=self.puts - earlier.puts,
            lists=self.lists - earlier.lists,
            gets=self.gets - earlier.gets,
            removes=self.removes - earlier.removes,
            bytes_up=self.bytes_up - earlier.bytes_up,
            bytes_down=self.bytes_down - earlier.bytes_down,
        )


class CountedStore:
    """Counts what is asked of another store. Implements `Store`.

    A request counts when it is made, also one that fails: a cloud asks its price for
    what it refuses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._requests = RequestCounts()

    @property
    def traits(self) -> StoreTraits:
        return self._store.traits

    @property
    def requests(self) -> RequestCounts:
        """What was asked until now."""
        with self._lock:
            return self._requests

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        self._add(puts=1, bytes_up=size_of(parts))
        return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._add(puts=1, bytes_up=size_of(parts))
        self._store.put(key, parts)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        self._add(gets=1)
        found = self._store.get(key, first, size)
        self._add(bytes_down=len(found))
        return found

    def items(self, prefix: str) -> list[Item]:
        self._add(lists=1)
        found = self._store.items(prefix)
        self._add(lists=max(0, -(-len(found) // PAGE) - 1))
        return found

    def remove(self, keys: Iterable[str]) -> None:
        every = list(keys)
        self._add(removes=-(-len(every) // PAGE))
        self._store.remove(every)

    def _add(self, **more: int) -> None:
        with self._lock:
            now = self._requests
            sums = {name: getattr(now, name) + each for name, each in more.items()}
            self._requests = replace(now, **sums)
