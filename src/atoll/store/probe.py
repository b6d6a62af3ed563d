"""What a store can do, found out by trying, once and at the start."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from atoll.errors import Unreachable, UsageError
from atoll.store.port import Data, Item, Store, Traits, window

PROBES = "probes/"
TEXT = b"0123456789"


def probe(store: Store) -> Traits:
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
        return Traits(
            has_put_new=store.traits.has_put_new and _keeps(store, key),
            has_ranges=store.traits.has_ranges and _reads_parts(store, key),
        )
    finally:
        store.remove([key])


def require_put_new(traits: Traits, *, store: str) -> None:
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


class Probed:
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
