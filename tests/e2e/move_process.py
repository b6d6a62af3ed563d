"""`atoll move` as a process that may be told to die at one of its steps.

    python -m tests.e2e.move_process RUN TARGET --dies-at before:settings/0

What it asks of a coordinator are targets, what it puts into a store are keys, and what
it writes to a coordinator's directory are names behind `disk:`: it dies by SIGKILL
before or after the first that has these words in it. `say:ACTION` is what a word in a
store says, and `rename` is the moment that a directory has its journal.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import atoll.coordinator.move as arrival
import atoll.run_client.move as migration
from atoll import kernels
from atoll.cli import main
from atoll.disk import SystemDisk
from atoll.exchange.bucket import documents, keys
from atoll.exchange.bucket.documents import parse
from atoll.run_client.coordinator import CoordinatorClient
from atoll.store import Data, Item, Store

WHEN, WORDS = "", ""


@contextmanager
def request(words: str) -> Iterator[None]:
    """Make a request, and die at it if it is the one."""
    is_it = bool(WORDS) and WORDS in words
    if is_it and WHEN == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    yield
    if is_it:
        os.kill(os.getpid(), signal.SIGKILL)


class DyingStore:
    """A store in whose puts the process dies. Implements `Store`."""

    def __init__(self, store: Store) -> None:
        self._store, self.traits = store, store.traits

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        with request(words_of(key, parts)):
            return self._store.put_new(key, parts)

    def put(self, key: str, parts: Sequence[Data]) -> None:
        with request(key):
            self._store.put(key, parts)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        return self._store.get(key, first, size)

    def items(self, prefix: str) -> list[Item]:
        return self._store.items(prefix)

    def remove(self, keys: Iterable[str]) -> None:
        self._store.remove(keys)


def words_of(key: str, parts: Sequence[Data]) -> str:
    """Return what a put is called: its key, or what an operator says by it."""
    if not key.startswith(keys.CONTROL):
        return key
    said = parse(documents.CONTROL, b"".join(parts), key=key)
    return f"say:{said.action}."


class DyingClient(CoordinatorClient):
    """A client of a coordinator in whose posts the process dies."""

    def post(self, target: str, payload: Mapping[str, Any] | None = None) -> Any:
        with request(target):
            return super().post(target, payload)


class DyingDisk(SystemDisk):
    """The directory of a coordinator, while whose files are made the process dies."""

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        with request(f"disk:{name}"):
            super().write_new(name, parts)

    def append(self, name: str, data: Data) -> None:
        with request(f"disk:append {name}"):
            super().append(name, data)


class DyingArrival(arrival.Arrival):
    """The directory that a run comes to; its last step is one to die at."""

    def settle(self) -> None:
        with request("rename"):
            super().settle()


if __name__ == "__main__":
    if "--dies-at" in sys.argv:
        at = sys.argv.index("--dies-at")
        WHEN, WORDS = sys.argv[at + 1].split(":", 1)
        del sys.argv[at : at + 2]
    opened = migration.reliable  # type: ignore[attr-defined]

    def dying_store(url: str, pause: Callable[[float], None]) -> DyingStore:
        return DyingStore(opened(url, pause))

    kernels.use("numpy")  # loads the fastest
    # `patch.object` fails if the name is gone: a patch by assignment would let the
    # process live on, and the tests would assert nothing.
    with (
        mock.patch.object(migration, "reliable", dying_store),
        mock.patch.object(migration, "CoordinatorClient", DyingClient),
        mock.patch.object(migration, "Arrival", DyingArrival),
        mock.patch.object(arrival, "SystemDisk", DyingDisk),
    ):
        main(["move", *sys.argv[1:]])
