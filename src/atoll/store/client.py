"""Layers between the exchange and an adapter: ranges, a probe, retries, a counter.

`RangedStore` reads large objects by several concurrent ranges.
Rule 1: at most `concurrency` reads are in flight.
Rule 2: a reader of `stream` keeps at most `concurrency` ranges in memory, regardless of
        the size of the object: the next is requested when the first was taken.
Rule 3: it belongs on top of `RetryingStore`, so that only a range that fails is
        requested again.

`ProbedStore` tests the abilities of a store once, at the start.

`RetryingStore` repeats requests after transient failures.
Rule 4: waits grow, with jitter, so that islands that failed together do not come back
        together.
Rule 5: a put of a new object whose response was lost may have succeeded. If the object
        exists afterwards and has our bytes, it is ours, or equal to ours.
Rule 6: the number of retries and their time are bounded; then the last failure is
        raised.

`CountedStore` counts requests, with their price: for metrics and for benches. It
belongs directly around the adapter, because every retry has a price.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol, TypeVar

from atoll.errors import Unreachable, UsageError
from atoll.retry import STORE_REQUEST, RetryPolicy, retried
from atoll.store import base

CONCURRENCY = 4
"""Two connections fill most links; twice that hides a slow one."""

RANGE_BYTES = 8 * 2**20
"""Large enough to hide the latency of a request, small enough to repeat."""


def num_ranges(size: int, *, range_bytes: int = RANGE_BYTES) -> int:
    """Return the number of requests that read `size` bytes.

    A rest below an eighth of a range is read with the range before it: a separate
    request would take longer. So a bound may be a byte above a full range.
    """
    return max(1, -(-(size - range_bytes // 8) // range_bytes))


class RangedStore:
    """Reads another store's large objects by ranges. Implements `Store`.

    Small objects take one request. If an owner overwrites a large object meanwhile,
    the result may be a mixture, which its digest reveals; objects of `put_new` never
    change.
    """

    def __init__(
        self,
        store: base.Store,
        *,
        concurrency: int = CONCURRENCY,
        range_bytes: int = RANGE_BYTES,
    ) -> None:
        if concurrency < 1 or range_bytes < 1:
            raise UsageError(
                f"concurrency={concurrency} and range_bytes={range_bytes} must be 1 or "
                "more."
            )
        self._store, self._range_bytes, self._concurrency = (
            store,
            range_bytes,
            concurrency,
        )
        self._threads = ThreadPoolExecutor(concurrency, "atoll-store")
        self.traits = store.traits
        self.put_new, self.put = store.put_new, store.put
        self.items, self.remove = store.items, store.remove

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        base.window(0, first, size)
        if not self.traits.has_ranges:
            return self._threads.submit(self._store.get, key, first, size).result()
        parts = self.stream(key, first, size)
        part = next(parts)
        if len(part) < self._range_bytes or len(part) == size:
            return part
        content = bytearray(part)
        for part in parts:
            content += part
        return memoryview(content)

    def stream(
        self, key: str, first: int = 0, size: int | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes of a range in order; fewer if the object ends before.

        Raises:
            NoSuchObject: there is no object.
            Unreachable: the object grew while it was read. Ask again.
        """
        base.window(0, first, size)
        ranges = self._ranges(first, size)
        reads: deque[tuple[int, Future[memoryview]]] = deque()
        # An object of unknown size proves to be large when its first range is full.
        max_reads, is_over = (1 if size is None else self._concurrency), False
        try:
            while True:
                while not is_over and len(reads) < max_reads:
                    if (span := next(ranges, None)) is None:
                        break
                    future = self._threads.submit(self._store.get, key, *span)
                    reads.append((span[1], future))
                if not reads:
                    return
                wanted, future = reads.popleft()
                part, max_reads = future.result(), self._concurrency
                if is_over and part:
                    raise Unreachable(f"{key!r} grew while it was read. Ask again.")
                is_over = is_over or len(part) < wanted
                yield part
        finally:
            for _, future in reads:
                future.cancel()

    def close(self) -> None:
        """Stop its threads, after the reads in progress."""
        self._threads.shutdown(cancel_futures=True)

    def _ranges(self, first: int, size: int | None) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the size of each range; at least one range."""
        step = self._range_bytes
        if size is None:
            yield from ((begin, step) for begin in count(first, step))
            return
        last = step * (num_ranges(size, range_bytes=step) - 1)
        yield from ((first + offset, step) for offset in range(0, last, step))
        yield first + last, size - last


PROBES = "probes/"
TEXT = b"0123456789"


def probe(store: base.Store) -> base.StoreTraits:
    """Return the abilities that a store declares and that a test confirms.

    Puts a small object, tries to put another under its key, reads a part of it, lists
    it and removes it.

    Raises:
        StoreDenied: one of these is not allowed: reading, writing, listing, deleting.
        Unreachable: the store does not answer.
    """
    key = f"{PROBES}{secrets.token_hex(16)}"
    store.put_new(key, [TEXT])
    try:
        store.items(PROBES)  # the list may be late; only the permission is tested
        return base.StoreTraits(
            has_put_new=store.traits.has_put_new and _keeps(store, key),
            has_ranges=store.traits.has_ranges and _reads_parts(store, key),
        )
    finally:
        store.remove([key])


def require_put_new(traits: base.StoreTraits, *, store: str) -> None:
    """Raise UsageError if a probed store has no conditional put."""
    if not traits.has_put_new:
        raise UsageError(
            f"{store} overwrites an existing object in spite of put-if-absent "
            "(If-None-Match: *). Two islands could then take different decisions. "
            "Use a store that has it: S3, Google, Azure or a directory."
        )


def _keeps(store: base.Store, key: str) -> bool:
    return not store.put_new(key, [TEXT[::-1]]) and store.get(key) == TEXT


def _reads_parts(store: base.Store, key: str) -> bool:
    try:
        return len(store.get(key, 2, 3)) == 3
    except Unreachable:
        store.get(key)  # if that fails too, the range is not the cause
        return False


class ProbedStore:
    """A store with the traits that its probe confirmed. Implements `Store`."""

    def __init__(self, store: base.Store) -> None:
        self._store, self.traits = store, probe(store)
        self.put_new, self.put = store.put_new, store.put
        self.items, self.remove = store.items, store.remove

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        if self.traits.has_ranges:
            return self._store.get(key, first, size)
        base.window(0, first, size)
        content = self._store.get(key)
        begin, end = base.window(len(content), first, size)
        return content[begin:end]


T = TypeVar("T")


class RetryingStore:
    """Repeats requests to another store that fail. Implements `Store`.

    Args:
        sleep: Waits the given seconds; may raise to end the attempts.
    """

    def __init__(
        self,
        store: base.Store,
        *,
        sleep: Callable[[float], None] = time.sleep,
        policy: RetryPolicy = STORE_REQUEST,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._sleep = sleep
        self.policy, self._rng = policy, rng

    @property
    def traits(self) -> base.StoreTraits:
        return self._store.traits

    def put_new(self, key: str, parts: Sequence[base.Data]) -> bool:
        is_unsure = False

        def put() -> bool:
            nonlocal is_unsure
            try:
                is_ours = self._store.put_new(key, parts)
            except Unreachable:
                is_unsure = True
                raise
            return is_ours or (is_unsure and self._holds(key, parts))

        return self._retry(put)

    def put(self, key: str, parts: Sequence[base.Data]) -> None:
        self._retry(lambda: self._store.put(key, parts))

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return self._retry(lambda: self._store.get(key, first, size))

    def items(self, prefix: str) -> list[base.Item]:
        return self._retry(lambda: self._store.items(prefix))

    def remove(self, keys: Iterable[str]) -> None:
        all_keys = list(keys)
        self._retry(lambda: self._store.remove(all_keys))

    def _holds(self, key: str, parts: Sequence[base.Data]) -> bool:
        """Return whether the object at a key has exactly these bytes."""
        size = base.size_of(parts)
        content, offset = self._store.get(key, 0, size + 1), 0
        if len(content) != size:
            return False
        for part in parts:
            view = memoryview(part).cast("B")
            if content[offset : offset + len(view)] != view:
                return False
            offset += len(view)
        return True

    def _retry(self, act: Callable[[], T]) -> T:
        return retried(act, self.policy, sleep=self._sleep, rng=self._rng)


USD_PER_1000_WRITES = 0.005
"""Class A of S3 Standard in us-east-1, November 2026: put, list, copy."""

USD_PER_1000_READS = 0.0004
"""Class B of S3 Standard in us-east-1, November 2026: get, head. Deletes are free."""

PAGE = 1000
"""The number of objects that one request lists or removes."""


@dataclass(frozen=True)
class RequestCounts:
    """The number of requests to a store, and of bytes in each direction."""

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
        """The price of these requests at S3; bytes within its region are free."""
        writes, reads = self.writes / 1000, self.reads / 1000
        return writes * USD_PER_1000_WRITES + reads * USD_PER_1000_READS

    def since(self, earlier: RequestCounts) -> RequestCounts:
        """Return the requests after `earlier`."""
        return RequestCounts(
            puts=self.puts - earlier.puts,
            lists=self.lists - earlier.lists,
            gets=self.gets - earlier.gets,
            removes=self.removes - earlier.removes,
            bytes_up=self.bytes_up - earlier.bytes_up,
            bytes_down=self.bytes_down - earlier.bytes_down,
        )


SMALL_BYTES = 4096
"""A put of at most this size measures the round trip."""


class TransferMeter(Protocol):
    """Measures transfers that began at `since_s` and are complete at the call."""

    def now_s(self) -> float: ...

    def sent(self, size_bytes: int, since_s: float) -> None: ...

    def received(self, size_bytes: int, since_s: float) -> None: ...

    def answered(self, since_s: float) -> None: ...


class CountedStore:
    """Counts the requests to another store. Implements `Store`.

    A request counts when it is sent, even if it fails: a cloud charges for requests
    that it refuses. With `meter` their times are measured as well.
    """

    def __init__(
        self, store: base.Store, *, meter: TransferMeter | None = None
    ) -> None:
        self._store, self._meter = store, meter
        self._lock = threading.Lock()
        self._requests = RequestCounts()

    @property
    def traits(self) -> base.StoreTraits:
        return self._store.traits

    @property
    def requests(self) -> RequestCounts:
        """The requests so far."""
        with self._lock:
            return self._requests

    def put_new(self, key: str, parts: Sequence[base.Data]) -> bool:
        size_bytes, since_s = base.size_of(parts), self._now_s()
        self._add(puts=1, bytes_up=size_bytes)
        is_new = self._store.put_new(key, parts)
        self._measure_put(size_bytes, since_s)
        return is_new

    def put(self, key: str, parts: Sequence[base.Data]) -> None:
        size_bytes, since_s = base.size_of(parts), self._now_s()
        self._add(puts=1, bytes_up=size_bytes)
        self._store.put(key, parts)
        self._measure_put(size_bytes, since_s)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        since_s = self._now_s()
        self._add(gets=1)
        content = self._store.get(key, first, size)
        self._add(bytes_down=len(content))
        if self._meter is not None:
            self._meter.received(len(content), since_s)
        return content

    def items(self, prefix: str) -> list[base.Item]:
        self._add(lists=1)
        items = self._store.items(prefix)
        self._add(lists=max(0, -(-len(items) // PAGE) - 1))
        return items

    def remove(self, keys: Iterable[str]) -> None:
        all_keys = list(keys)
        self._add(removes=-(-len(all_keys) // PAGE))
        self._store.remove(all_keys)

    def _now_s(self) -> float:
        return 0.0 if self._meter is None else self._meter.now_s()

    def _measure_put(self, size_bytes: int, since_s: float) -> None:
        if self._meter is not None:
            self._meter.sent(size_bytes, since_s)
            if size_bytes <= SMALL_BYTES:
                self._meter.answered(since_s)

    def _add(self, **counts: int) -> None:
        with self._lock:
            old = self._requests
            sums = {name: getattr(old, name) + n for name, n in counts.items()}
            self._requests = replace(old, **sums)
