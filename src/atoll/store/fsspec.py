"""Objects in any file system of `fsspec`: `hf://`, `sftp://`, `memory://` and the rest.

These file systems share no way to put an object only if it is absent. So `put_new`
checks first, and two islands may do that at once: `traits` reports it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it ships no types

from atoll.errors import AtollError, NoSuchObject, StoreDenied, Unreachable, UsageError
from atoll.store.base import (
    Data,
    Item,
    StoreTraits,
    check_key,
    check_prefix,
    is_key,
    size_of,
    window,
)

TEMPORARY = ".~"
"""Begins the name of what is being written; no key begins so."""

_RENAMING = {"file", "local", "sftp", "ssh"}
"""Where an object shows while it is written, and a rename puts it in place."""


class FsspecStore:
    """Keeps objects in a file system of `fsspec`. Implements `Store`."""

    traits = StoreTraits(has_put_new=False)

    def __init__(self, url: str, **options: Any) -> None:
        try:
            self._files, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as exc:
            raise UsageError(f"{url} cannot be opened: {exc}") from exc
        self._name, self._root = url, root.rstrip("/")

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        place = self._place(key)
        with self._told("put", key):
            if self._files.exists(place):
                return False
        self.put(key, parts)
        return True

    def put(self, key: str, parts: Sequence[Data]) -> None:
        place = self._place(key)
        size_of(parts)
        with self._told("put", key):
            parent = place.rpartition("/")[0]
            self._files.makedirs(parent, exist_ok=True)
            self._put(place, b"".join(parts))

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        place = self._place(key)
        with self._told("get", key):
            found = self._files.info(place)
            if found["type"] != "file":
                raise FileNotFoundError(place)
            begin, end = window(int(found["size"]), first, size)
            if begin == end:
                return memoryview(b"")
            # Not up to `end`: an owner may have put a longer one since.
            last = None if size is None else first + size
            return memoryview(
                self._files.cat_file(place, start=first or None, end=last)
            )

    def items(self, prefix: str) -> list[Item]:
        check_prefix(prefix)
        with self._told("list", prefix):
            self._files.invalidate_cache()
            top = f"{self._root}/{prefix}".rstrip("/")
            if not self._files.exists(top):
                return []
            found = self._files.find(top, detail=True)
        return sorted(
            Item(key, int(each["size"]))
            for place, each in found.items()
            if (key := self._key(place)).startswith(prefix) and is_key(key)
        )

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            place = self._place(key)
            with self._told("delete", key):
                try:
                    self._files.rm_file(place)
                except FileNotFoundError:
                    continue

    def _put(self, place: str, whole: bytes) -> None:
        """Put an object so that nobody sees a part of it."""
        if not _RENAMING.intersection(_protocols(self._files)):
            self._files.pipe_file(place, whole)
            return
        temporary = f"{self._root}/{TEMPORARY}{secrets.token_hex(16)}"
        self._files.pipe_file(temporary, whole)
        self._files.mv(temporary, place)

    def _place(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _key(self, place: str) -> str:
        return place.removeprefix(self._root).lstrip("/")

    @contextmanager
    def _told(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except AtollError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
            raise NoSuchObject(f"There is no object {key!r}.", key=key) from exc
        except PermissionError as exc:
            raise StoreDenied(
                f"{self._name} does not let this machine {what} objects ({key!r}). "
                f"Give its credentials the permission to {what}."
            ) from exc
        except Exception as exc:  # every file system has errors of its own
            said = str(exc) or type(exc).__name__
            raise Unreachable(f"{self._name} failed to {what} {key!r}: {said}") from exc


def _protocols(files: Any) -> tuple[str, ...]:
    said = files.protocol
    return (said,) if isinstance(said, str) else tuple(said)
