"""Objects as files in a directory, which many machines may share.

Rule 1: an object is written to a temporary file and synced, and gets its name in one
        step: by a hard link if the key must be new, by a rename if it may be replaced.
        Both are atomic on local disks and on NFS; there are no locks.
Rule 2: a hard link that fails may exist nevertheless, its response lost: the number of
        links to the temporary file tells.
Rule 3: directories are created with their first object and removed with the last.
Rule 4: a temporary file of a dead process is removed after a day.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from atoll.disk import sync_directory, write_all
from atoll.errors import NoSuchObject, StoreDenied, Unreachable
from atoll.store import base

TEMPORARY = ".~"
"""Directory of files that are being written; no key has a part like this."""

STALE_S = 86_400.0
"""Age at which no process can still be writing a temporary file."""

DIRECTORY_RETRIES = 100
"""How often another process may remove a directory while an object is put there."""

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


class FileStore:
    """Keeps objects below a directory, which it creates. Implements `Store`."""

    traits = base.StoreTraits()

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._temporary = self.root / TEMPORARY
        with _errors_translated("make", self.root):
            self._temporary.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def put_new(self, key: str, parts: Sequence[base.Data]) -> bool:
        path = self._path(key)
        with _errors_translated("put", path), self._written(parts) as temporary:
            return _named(path, partial(_link, temporary, path))

    def put(self, key: str, parts: Sequence[base.Data]) -> None:
        path = self._path(key)
        with _errors_translated("put", path), self._written(parts) as temporary:
            _named(path, partial(_replace, temporary, path))

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        path = self._path(key)
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as exc:
            raise self._translated_get(exc, key) from exc
        try:
            return _read(handle, first, size)
        except OSError as exc:
            raise self._translated_get(exc, key) from exc
        finally:
            os.close(handle)

    def items(self, prefix: str) -> list[base.Item]:
        top = self.root / base.check_prefix(prefix)
        with _errors_translated("list", top):
            items = sorted(self._walk(top))
            # A directory that was removed also has no items, but is no empty store.
            os.stat(self._temporary)
            return items

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with _errors_translated("remove", path), suppress(*_ABSENT):
                path.unlink()
                self._prune(path.parent)

    def _prune(self, directory: Path) -> None:
        """Remove empty directories; a later put creates them again."""
        with suppress(OSError):  # one that is not empty stays
            while directory != self.root:
                directory.rmdir()
                directory = directory.parent

    def _path(self, key: str) -> Path:
        return self.root / base.check_key(key)

    def _translated_get(self, exc: OSError, key: str) -> Exception:
        if exc.errno in _NONE and self._temporary.is_dir():
            return NoSuchObject(f"There is no object {key!r}.", key=key)
        return _translated("get", self.root / key, exc)

    @contextmanager
    def _written(self, parts: Sequence[base.Data]) -> Iterator[Path]:
        """Yield a durable temporary file; it is removed afterwards unless renamed."""
        base.size_of(parts)
        temporary = self._temporary / secrets.token_hex(16)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                for part in parts:
                    write_all(handle, part)
                os.fsync(handle)
            finally:
                os.close(handle)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _walk(self, top: Path) -> Iterator[base.Item]:
        for directory, children, files in os.walk(top, onerror=_unless_absent):
            children[:] = [child for child in children if child != TEMPORARY]
            for name in files:
                path = Path(directory, name)
                key = path.relative_to(self.root).as_posix()
                if base.is_key(key):  # other programs may keep files here
                    with suppress(FileNotFoundError):  # removed meanwhile
                        yield base.Item(key, path.stat().st_size)

    def _sweep(self) -> None:
        now_s = time.time()
        for path in self._temporary.iterdir():
            with suppress(OSError):  # another process may sweep at the same time
                if now_s - path.stat().st_mtime > STALE_S:
                    path.unlink()


def _unless_absent(exc: OSError) -> None:
    if exc.errno not in _NONE:
        raise exc


def _named(path: Path, act: Callable[[], bool]) -> bool:
    """Name a file in a directory that another process may be removing as empty."""
    for _ in range(DIRECTORY_RETRIES):
        with suppress(FileNotFoundError):
            _make_directory(path.parent)
            return act()
    _make_directory(path.parent)
    return act()


def _link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return _is_linked(temporary)
    except OSError:
        if not _is_linked(temporary):
            raise
    _sync(path.parent)
    return True


def _replace(temporary: Path, path: Path) -> bool:
    os.replace(temporary, path)
    _sync(path.parent)
    return True


def _sync(directory: Path) -> None:
    with suppress(FileNotFoundError):  # it was put, and has been removed since
        sync_directory(directory)


def _is_linked(temporary: Path) -> bool:
    return temporary.stat().st_nlink == 2


def _read(handle: int, first: int, size: int | None) -> memoryview:
    status = os.fstat(handle)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    begin, end = base.window(status.st_size, first, size)
    buffer = memoryview(bytearray(end - begin))
    filled = 0
    while filled < len(buffer):
        read_bytes = os.preadv(handle, [buffer[filled:]], begin + filled)
        if not read_bytes:
            raise Unreachable("A file got shorter while it was read. Ask again.")
        filled += read_bytes
    return buffer


def _make_directory(directory: Path) -> None:
    """Create a directory and its parents, each durable in its parent."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with suppress(FileExistsError):  # another process has created it
        directory.mkdir()
    sync_directory(directory.parent)


@contextmanager
def _errors_translated(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise _translated(action, path, exc) from exc


def _translated(action: str, path: Path, exc: OSError) -> Exception:
    fact = f"{path}: cannot {action}: {exc.strerror or exc}."
    if exc.errno in _DENIED:
        return StoreDenied(
            f"{fact} Give user {os.geteuid()} the permission to {action}, here and in "
            "the directories above, or mount it with that permission."
        )
    if exc.errno in _NONE:
        return Unreachable(
            f"{fact} The store's directory may be gone: mount it again, or create it "
            "again if no data is lost."
        )
    return Unreachable(f"{fact} A retry may help.")
