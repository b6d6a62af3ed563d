"""Objects in S3, Google Cloud Storage or Azure, by `obstore`.

Credentials come from where each cloud's own tools look for them, as `credentials` says.
Retries are ours, in `patient`: a put that is conditional must not be made again unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from atoll.errors import Unreachable, UsageError
from atoll.store.answers import explained, is_beyond_the_end, is_gone, short
from atoll.store.credentials import credentials_of
from atoll.store.port import (
    Data,
    Item,
    Traits,
    check_key,
    check_prefix,
    is_key,
    size_of,
    window,
)

RETRIES: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
CONNECTIONS: Any = {
    "timeout": "300s",
    "connect_timeout": "10s",
    "allow_http": True,  # an endpoint of http is one that somebody has written so
}
PUTS: Any = CONNECTIONS | {"timeout": "3600s"}
"""A put is one request whatever its size: 400 MB over 1 MB/s take seven minutes."""

AT_ONCE = 1000
"""How many keys one request removes."""


class ObstoreStore:
    """Keeps objects where `obstore` can. Implements `Store`."""

    traits = Traits()

    def __init__(self, store: Any, *, name: str, puts: Any = None) -> None:
        self._store, self._name = store, name
        self._puts = store if puts is None else puts

    @classmethod
    def of_url(cls, url: str) -> ObstoreStore:
        """Return the store of a URL such as `s3://bucket/path`."""
        said = credentials_of(url) | {"retry_config": RETRIES}
        try:
            store, puts = (
                obstore.store.from_url(url, client_options=each, **said)
                for each in (CONNECTIONS, PUTS)
            )
        except (BaseError, ValueError) as exc:
            raise UsageError(f"{url} cannot be opened: {short(exc)}") from exc
        return cls(store, name=url, puts=puts)

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        try:
            self._put(key, parts, "create")
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def put(self, key: str, parts: Sequence[Data]) -> None:
        self._put(key, parts, "overwrite")

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        check_key(key)
        window(0, first, size)
        if size == 0:
            # No range is empty, and whether the object is there must be known.
            return self.get(key, first, 1)[:0]
        try:
            with self._told("get", key):
                found = obstore.get(self._store, key, options=_asked(first, size))
                return memoryview(found.bytes())
        except Unreachable as exc:
            # No store has a range from there on; some say so of what is not there.
            if is_beyond_the_end(_cause(exc)) and first >= self._size(key):
                return memoryview(b"")
            raise

    def items(self, prefix: str) -> list[Item]:
        check_prefix(prefix)
        with self._told("list", prefix):
            pages = obstore.list(self._store, prefix=prefix or None)
            return sorted(
                Item(each["path"], each["size"])
                for page in pages
                for each in page
                if each["path"].startswith(prefix) and is_key(each["path"])
            )

    def remove(self, keys: Iterable[str]) -> None:
        left = [check_key(key) for key in keys]
        while left:
            now, left = left[:AT_ONCE], left[AT_ONCE:]
            self._remove(now[0] if len(now) == 1 else now)

    def _remove(self, keys: str | list[str]) -> None:
        with self._told("delete", keys if isinstance(keys, str) else keys[0]):
            try:
                obstore.delete(self._store, keys)
            except FileNotFoundError as exc:
                if is_gone(exc):
                    raise
                if not isinstance(keys, str):
                    for key in keys:
                        self._remove(key)

    def _size(self, key: str) -> int:
        with self._told("get", key):
            return int(obstore.head(self._store, key)["size"])

    def _put(
        self, key: str, parts: Sequence[Data], mode: Literal["create", "overwrite"]
    ) -> None:
        check_key(key)
        size_of(parts)
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        with self._told("put", key):
            obstore.put(self._puts, key, views or b"", mode=mode, use_multipart=False)

    @contextmanager
    def _told(self, what: str, key: str) -> Iterator[None]:
        """Say in our words what went wrong, and whether asking again may help."""
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except (BaseError, OSError) as exc:
            raise explained(exc, what, key, store=self._name) from exc


def _cause(exc: BaseException) -> Exception:
    assert isinstance(exc.__cause__, Exception)
    return exc.__cause__


def _asked(first: int, size: int | None) -> Any:
    """Return the range to ask for; a whole object is asked for without one."""
    if size is not None:
        return {"range": (first, first + size)}
    return {"range": {"offset": first}} if first else {}
