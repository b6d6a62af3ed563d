"""Objects in S3, Google Cloud Storage or Azure, by `obstore`.

Credentials come from where each cloud's own tools look for them. Retries are ours, in
`patient`: a put that is conditional must not be made again unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from atoll.errors import NoSuchObject, StoreDenied, Unreachable, UsageError
from atoll.store.port import (
    Data,
    Item,
    Traits,
    check_key,
    check_prefix,
    size_of,
    window,
)

RETRIES: Any = {"max_retries": 0, "retry_timeout": timedelta(seconds=60)}
TIMES: Any = {"timeout": "300s", "connect_timeout": "10s"}
AT_ONCE = 1000
"""How many keys one request removes."""

_VANISHED = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")


class ObstoreStore:
    """Keeps objects where `obstore` can. Implements `Store`."""

    traits = Traits()

    def __init__(self, store: Any, *, name: str) -> None:
        self._store, self._name = store, name

    @classmethod
    def of_url(cls, url: str) -> ObstoreStore:
        """Return the store of a URL such as `s3://bucket/path`."""
        try:
            store = obstore.store.from_url(
                url,
                client_options=TIMES,
                retry_config=RETRIES,
                **_credentials(url),
            )
        except (BaseError, ValueError) as exc:
            raise UsageError(f"{url} cannot be opened: {_short(exc)}") from exc
        return cls(store, name=url)

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
            size = 1  # no range is empty; whether the object is there must be known
            return self.get(key, first, size)[:0]
        try:
            with self._told("get", key):
                found = obstore.get(self._store, key, options=_asked(first, size))
                return memoryview(found.bytes())
        except Unreachable:
            if first >= self._size(key):
                return memoryview(b"")  # no store has a range from there on
            raise

    def items(self, prefix: str) -> list[Item]:
        check_prefix(prefix)
        with self._told("list", prefix):
            pages = obstore.list(self._store, prefix=prefix or None)
            return sorted(
                Item(each["path"], each["size"])
                for page in pages
                for each in page
                if each["path"].startswith(prefix)
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
            except FileNotFoundError:
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
            obstore.put(self._store, key, views or b"", mode=mode, use_multipart=False)

    @contextmanager
    def _told(self, what: str, key: str) -> Iterator[None]:
        """Say in our words what went wrong, and whether asking again may help."""
        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            raise StoreDenied(
                f"{self._name} does not let this machine {what} objects ({key!r}). "
                f"Give its credentials the permission to {what}: {_short(exc)}"
            ) from exc
        except FileNotFoundError as exc:
            if what != "get" or any(word in str(exc) for word in _VANISHED):
                raise Unreachable(
                    f"{self._name} is not there. Make the bucket, or mend the URL."
                ) from exc
            raise NoSuchObject(f"There is no object {key!r}.", key=key) from exc
        except (BaseError, OSError) as exc:
            raise Unreachable(
                f"{self._name} failed to {what} {key!r}: {_short(exc)}"
            ) from exc


def _asked(first: int, size: int | None) -> Any:
    """Return the range to ask for; a whole object is asked for without one."""
    if size is not None:
        return {"range": (first, first + size)}
    return {"range": {"offset": first}} if first else {}


def _credentials(url: str) -> dict[str, Any]:
    """Return what finds the profiles of AWS, where boto3 is there to read them."""
    if not url.startswith(("s3://", "s3a://")):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        provider = Boto3CredentialProvider()
    except Exception:  # no boto3, or nothing that it could use: the environment serves
        return {}
    return {"credential_provider": provider}


def _short(exc: BaseException) -> str:
    """Return the first line of what a library says, which may print its insides."""
    said = str(exc).strip().splitlines()
    return said[0][:300] if said else type(exc).__name__
