"""Objects in the memory of this process: for tests and trials."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from atoll.errors import NoSuchObject
from atoll.store import base


class MemoryStore:
    """Keeps objects in a dictionary. Implements `Store`."""

    traits = base.StoreTraits()

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put_new(self, key: str, parts: Sequence[base.Data]) -> bool:
        base.check_key(key)
        content = _joined(parts)
        with self._lock:
            return self._objects.setdefault(key, content) is content

    def put(self, key: str, parts: Sequence[base.Data]) -> None:
        base.check_key(key)
        content = _joined(parts)
        with self._lock:
            self._objects[key] = content

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        with self._lock:
            content = self._objects.get(base.check_key(key))
        if content is None:
            raise NoSuchObject(f"There is no object {key!r}.", key=key)
        begin, end = base.window(len(content), first, size)
        return memoryview(content)[begin:end]

    def items(self, prefix: str) -> list[base.Item]:
        base.check_prefix(prefix)
        with self._lock:
            objects = sorted(self._objects.items())
        return [
            base.Item(key, len(content))
            for key, content in objects
            if key.startswith(prefix)
        ]

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            base.check_key(key)
            with self._lock:
                self._objects.pop(key, None)


def _joined(parts: Sequence[base.Data]) -> bytes:
    base.size_of(parts)
    # A copy, even of bytes: `put_new` compares identities, so it must be a new object.
    return bytes(bytearray().join(parts))
