"""A store whose large objects are read by several ranges at once.

Rule 1: no more than `at_once` reads are under way, whoever asks.
Rule 2: a reader of `stream` keeps no more than `at_once` ranges in memory, whatever
        the size of the object: the next is asked for when the first was taken.
Rule 3: it belongs on top of `Patient`, so that a range that fails is asked for again
        by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from atoll.errors import Unreachable, UsageError
from atoll.store.port import Data, Item, Store, Traits, window

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


class Ranged:
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
    def traits(self) -> Traits:
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
