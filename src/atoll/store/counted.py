"""A store whose requests are counted, with their price: for metrics and for benches.

It belongs right before the adapter, below `Patient`: what is asked again costs again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from atoll.store.port import Data, Item, Store, Traits, size_of

USD_PER_1000_WRITES = 0.005
"""Class A of S3 Standard in us-east-1, November 2026: put, list, copy."""

USD_PER_1000_READS = 0.0004
"""Class B of S3 Standard in us-east-1, November 2026: get, head. Deletes are free."""

PAGE = 1000
"""How many objects one request lists, or removes."""


@dataclass(frozen=True)
class Requests:
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

    def since(self, earlier: Requests) -> Requests:
        """Return what was asked after `earlier`."""
        return Requests(
            puts=self.puts - earlier.puts,
            lists=self.lists - earlier.lists,
            gets=self.gets - earlier.gets,
            removes=self.removes - earlier.removes,
            bytes_up=self.bytes_up - earlier.bytes_up,
            bytes_down=self.bytes_down - earlier.bytes_down,
        )


class Counted:
    """Counts what is asked of another store. Implements `Store`.

    A request counts when it is made, also one that fails: a cloud asks its price for
    what it refuses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._requests = Requests()

    @property
    def traits(self) -> Traits:
        return self._store.traits

    @property
    def requests(self) -> Requests:
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
