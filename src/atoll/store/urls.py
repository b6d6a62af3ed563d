"""Opens the store of a URL."""

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
        UsageError: the URL is wrong, or its adapter's package is not installed.
        Unreachable: the store connects when it is opened, and cannot.
    """
    match = _SCHEME.match(url)
    if match is None:
        return FileStore(Path(url))
    scheme = match[1].lower()
    if scheme == "file":
        return FileStore(_path(url))
    try:
        return _of_cloud(url) if scheme in OBSTORE else _of_fsspec(url)
    except ImportError as exc:
        raise UsageError(
            f"{scheme}:// needs the package {exc.name}, which is not installed. "
            "Install atoll[store], and the packages that fsspec needs for it."
        ) from exc
    except OSError as exc:  # some file systems of fsspec connect when opened
        raise Unreachable(f"{url} did not answer: {exc}. Check the host.") from exc


def _path(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"{url} names another machine, {parts.netloc!r}. A file URL has three "
            "slashes: file:///path."
        )
    return Path(unquote(parts.path))


def _of_cloud(url: str) -> Store:
    from atoll.store.obstore import ObstoreStore

    return ObstoreStore.of_url(url)


def _of_fsspec(url: str) -> Store:
    from atoll.store.fsspec import FsspecStore

    return FsspecStore(url)
