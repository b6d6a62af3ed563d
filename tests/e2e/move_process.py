"""`atoll move` as a process that may be told to die at one of its requests.

    python -m tests.e2e.move_process RUN TARGET --dies-at before:settings/0

What it asks of the coordinator are targets, and what it puts into the store are keys:
it dies by SIGKILL before or after the first that has these words in it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import atoll.cli.bucket.moving as moving
from atoll.cli import main
from atoll.cli.asking import Asking
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
        with request(key):
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


class DyingAsking(Asking):
    """A way to a coordinator on which the process dies."""

    def post(self, target: str, said: Mapping[str, Any] | None = None) -> Any:
        with request(target):
            return super().post(target, said)


if __name__ == "__main__":
    if "--dies-at" in sys.argv:
        at = sys.argv.index("--dies-at")
        WHEN, WORDS = sys.argv[at + 1].split(":", 1)
        del sys.argv[at : at + 2]
    opened = moving.reliable  # type: ignore[attr-defined]
    moving.reliable = lambda url, pause: DyingStore(opened(url, pause))  # type: ignore[attr-defined]
    moving.Asking = DyingAsking  # type: ignore[attr-defined]
    main(["move", *sys.argv[1:]])
