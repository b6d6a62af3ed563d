"""Objects in any file system of `fsspec`: `hf://`, `sftp://`, `memory://` and the rest.

These file systems have no common conditional put. So `put_new` checks first, and two
islands may do that at the same time: `traits` reports it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec  # type: ignore[import-untyped]  # it ships no types

from atoll.errors import AtollError, NoSuchObject, StoreDenied, Unreachable, UsageError
from atoll.store import base

TEMPORARY = ".~"
"""Prefix of objects that are being written; no key begins with it."""

_RENAMING = {"file", "local", "sftp", "ssh"}
"""Protocols that show an object while it is written; they rename it when complete."""


class FsspecStore:
    """Keeps objects in a file system of `fsspec`. Implements `Store`."""

    traits = base.StoreTraits(has_put_new=False)

    def __init__(self, url: str, **options: Any) -> None:
        try:
            self._files, root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as exc:
            raise UsageError(f"{url} cannot be opened: {exc}") from exc
        self._name, self._root = url, root.rstrip("/")

    def put_new(self, key: str, parts: Sequence[base.Data]) -> bool:
        path = self._path(key)
        with self._errors_translated("put", key):
            if self._files.exists(path):
                return False
        self.put(key, parts)
        return True

    def put(self, key: str, parts: Sequence[base.Data]) -> None:
        path = self._path(key)
        base.size_of(parts)
        with self._errors_translated("put", key):
            parent = path.rpartition("/")[0]
            self._files.makedirs(parent, exist_ok=True)
            self._put(path, b"".join(parts))

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        path = self._path(key)
        with self._errors_translated("get", key):
            info = self._files.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
            begin, end = base.window(int(info["size"]), first, size)
            if begin == end:
                return memoryview(b"")
            # Not up to `end`: an owner may have put a longer object since.
            last = None if size is None else first + size
            return memoryview(self._files.cat_file(path, start=first or None, end=last))

    def items(self, prefix: str) -> list[base.Item]:
        base.check_prefix(prefix)
        with self._errors_translated("list", prefix):
            self._files.invalidate_cache()
            top = f"{self._root}/{prefix}".rstrip("/")
            if not self._files.exists(top):
                return []
            files = self._files.find(top, detail=True)
        return sorted(
            base.Item(key, int(info["size"]))
            for path, info in files.items()
            if (key := self._key(path)).startswith(prefix) and base.is_key(key)
        )

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._errors_translated("delete", key):
                try:
                    self._files.rm_file(path)
                except FileNotFoundError:
                    continue

    def _put(self, path: str, content: bytes) -> None:
        """Put an object so that no reader sees a part of it."""
        if not _RENAMING.intersection(_protocols(self._files)):
            self._files.pipe_file(path, content)
            return
        temporary = f"{self._root}/{TEMPORARY}{secrets.token_hex(16)}"
        self._files.pipe_file(temporary, content)
        self._files.mv(temporary, path)

    def _path(self, key: str) -> str:
        return f"{self._root}/{base.check_key(key)}"

    def _key(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")

    @contextmanager
    def _errors_translated(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except AtollError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as exc:
            raise NoSuchObject(f"There is no object {key!r}.", key=key) from exc
        except PermissionError as exc:
            raise StoreDenied(
                f"{self._name} does not let this machine {action} objects ({key!r}). "
                f"Give its credentials the permission to {action}."
            ) from exc
        except Exception as exc:  # every file system has its own errors
            reason = str(exc) or type(exc).__name__
            raise Unreachable(
                f"{self._name} failed to {action} {key!r}: {reason}"
            ) from exc


def _protocols(files: Any) -> tuple[str, ...]:
    protocol = files.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
