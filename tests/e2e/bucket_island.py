"""An island of a run in a store, as a process of its own; it may die at a request.

    python -m tests.e2e.bucket_island URL NAME --folder FOLDER [--dies-at WHEN]

WHEN is `before` or `after`, a part of a key and how often: `before:roster:5` is SIGKILL
before the fifth put of a key with `roster` in it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence

from atoll import kernels
from atoll.exchange.bucket import BucketReader, StoreExchange
from atoll.exchange.bucket.view import LEASE_S
from atoll.island.environment import credentials_from_environment
from atoll.island.identity import island_key
from atoll.island.store_connection import RetriedStore, StoreConnection
from atoll.runtime import SystemClock, SystemRuntime
from atoll.store import Data, Item, Store
from tests.e2e.island_process import arguments, live


class Dying:
    """A store in whose requests a process dies. Implements `Store`."""

    def __init__(self, store: Store, when: str) -> None:
        self._store, self.traits = store, store.traits
        self._when, self._part, count = when.split(":")
        self._left = int(count)

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        is_last = self._counts(key)
        if is_last and self._when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        is_new = self._store.put_new(key, parts)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return is_new

    def _counts(self, key: str) -> bool:
        self._left -= self._part in key
        return self._part in key and self._left == 0

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._store.put(key, parts)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return self._store.get(key, first, size)

    def items(self, prefix: str) -> list[Item]:
        return self._store.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._store.remove(keys)


def reach(
    url: str, name: str, dies_at: str | None, *, lease_s: float = LEASE_S
) -> StoreConnection:
    """Return the way to a run in a store, as `meet` would."""
    runtime = SystemRuntime(SystemClock())
    reliable = RetriedStore(url, runtime)
    store = Dying(reliable.store, dies_at) if dies_at else reliable.store
    reader = BucketReader.open(store, runtime, url=url, lease_s=lease_s)
    keys = credentials_from_environment().keys
    key = island_key(keys, run=reader.run, island=name)
    reliable.use_long_retries()
    exchange = StoreExchange(reader, key=key, nonce=os.urandom(16))
    return StoreConnection(exchange, reliable, runtime)


def main() -> None:
    parser = arguments()
    parser.add_argument("--dies-at")
    parser.add_argument("--lease-s", type=float, default=LEASE_S)
    said = parser.parse_args()
    kernels.use("numpy")  # starts at once
    live(reach(said.url, said.name, said.dies_at, lease_s=said.lease_s), said)


if __name__ == "__main__":
    main()
