"""From a URL to the adapter of its store."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from atoll.errors import Unreachable, UsageError
from atoll.store.base import Store
from atoll.store.files import FileStore

OBSTORE = {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss"}
"""Schemes that `obstore` serves; `fsspec` has all others."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def open_store(url: str) -> Store:
    """Return the store of a URL; a plain path is a directory.

    Raises:
        UsageError: the URL is wrong, or what goes there is not installed.
        Unreachable: the store connects when it is opened, and cannot.
    """
    found = _SCHEME.match(url)
    if found is None:
        return FileStore(Path(url))
    scheme = found[1].lower()
    if scheme == "file":
        return FileStore(_path(url))
    try:
        return _of_cloud(url) if scheme in OBSTORE else _of_fsspec(url)
    except ImportError as exc:
        raise UsageError(
            f"{scheme}:// needs a package that is not here ({exc.name}). "
            "Install atoll[store], and for fsspec what it asks for."
        ) from exc
    except OSError as exc:  # some of fsspec connect when they are made
        raise Unreachable(f"{url} did not answer: {exc}. Check the host.") from exc


def _path(url: str) -> Path:
    said = urlsplit(url)
    if said.netloc not in ("", "localhost"):
        raise UsageError(
            f"{url} names another machine, {said.netloc!r}. A file URL has three "
            "slashes: file:///path."
        )
    return Path(unquote(said.path))


def _of_cloud(url: str) -> Store:
    from atoll.store.obstore import ObstoreStore

    return ObstoreStore.of_url(url)


def _of_fsspec(url: str) -> Store:
    from atoll.store.fsspec import FsspecStore

    return FsspecStore(url)
