"""A store that is read whole where it cannot read parts, found out by reading only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.errors import Unreachable
from atoll.store import (
    Data,
    Item,
    Store,
    StoreTraits,
)


class WholeReads:
    """Reads an object whole if its store fails to read a part. Implements `Store`.

    `Probed` finds that out by putting an object; an observer may not be allowed to.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._has_ranges = store.traits.has_ranges

    @property
    def traits(self) -> StoreTraits:
        return StoreTraits(
            has_put_new=self._store.traits.has_put_new, has_ranges=self._has_ranges
        )

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        if self._has_ranges and not (first == 0 and size is None):
            try:
                return self._store.get(key, first, size)
            except Unreachable:
                whole = self._store.get(key)  # if that fails, too, it is not the range
                self._has_ranges = False
        else:
            whole = self._store.get(key)
        return whole[first : None if size is None else first + size]

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._store.put(key, parts)

    def items(self, prefix: str) -> list[Item]:
        return self._store.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._store.remove(keys)
