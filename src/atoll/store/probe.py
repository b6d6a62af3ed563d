"""What a store can do, found out by trying, once and at the start."""

from __future__ import annotations

import secrets
from contextlib import suppress

from atoll.errors import AtollError
from atoll.store.port import Store, Traits

PROBES = "probes/"
TEXT = b"0123456789"


def probe(store: Store) -> Traits:
    """Return what a store has shown to be able to do; it declares less at most.

    Puts a small object, tries to put another in its place, reads a part of it and
    removes it.

    Raises:
        StoreDenied: one of these is not allowed: reading, writing or deleting.
        Unreachable: the store does not answer.
    """
    key = f"{PROBES}{secrets.token_hex(16)}"
    store.put_new(key, [TEXT])
    try:
        return Traits(
            has_put_new=store.traits.has_put_new and _keeps(store, key),
            has_ranges=store.traits.has_ranges and _reads_parts(store, key),
        )
    finally:
        store.remove([key])


def _keeps(store: Store, key: str) -> bool:
    return not store.put_new(key, [TEXT[::-1]]) and store.get(key) == TEXT


def _reads_parts(store: Store, key: str) -> bool:
    with suppress(AtollError):
        return len(store.get(key, 2, 3)) == 3
    return False
