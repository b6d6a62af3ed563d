"""Objects as files in a directory, which many machines may share.

Rule 1: an object is written to a temporary file and synced, and gets its name at once:
        by a hard link if there must be none, by a rename if it may be replaced. Both
        are atomic on local disks and on NFS; nothing is ever locked.
Rule 2: a hard link that fails may have been made, and its answer lost: the number of
        links to the temporary file tells.
Rule 3: a temporary file that a dead process left is swept up after a day.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.disk import sync_directory
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

TEMPORARY = ".~"
"""Directory of what is being written; no key has a part like this."""

FORGOTTEN_S = 86_400.0
"""How old a temporary file is that nobody can be writing any more."""

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


class FileStore:
    """Keeps objects below a directory, made if absent. Implements `Store`."""

    traits = Traits()

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._temporary = self.root / TEMPORARY
        with _told("make", self.root):
            self._temporary.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        place = self._place(key)
        with _told("put", place), self._written(parts) as temporary:
            _make_directory(place.parent)
            try:
                os.link(temporary, place)
            except FileExistsError:
                return _is_linked(temporary)
            except OSError:
                if not _is_linked(temporary):
                    raise
            sync_directory(place.parent)
            return True

    def put(self, key: str, parts: Sequence[Data]) -> None:
        place = self._place(key)
        with _told("put", place), self._written(parts) as temporary:
            _make_directory(place.parent)
            os.replace(temporary, place)
            sync_directory(place.parent)

    def get(self, key: str, first: int = 0, size: int | None = None) -> memoryview:
        place = self._place(key)
        try:
            handle = os.open(place, os.O_RDONLY)
        except OSError as exc:
            raise self._translated_get(exc, key) from exc
        try:
            return _read(handle, first, size)
        except OSError as exc:
            raise self._translated_get(exc, key) from exc
        finally:
            os.close(handle)

    def items(self, prefix: str) -> list[Item]:
        top = self.root / check_prefix(prefix)
        with _told("list", top):
            return sorted(self._walk(top))

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            place = self._place(key)
            with _told("remove", place), suppress(*_ABSENT):
                place.unlink()

    def _place(self, key: str) -> Path:
        return self.root / check_key(key)

    def _translated_get(self, exc: OSError, key: str) -> Exception:
        if exc.errno in _NONE and self.root.is_dir():
            return NoSuchObject(f"There is no object {key!r}.", key=key)
        return _translated("get", self.root / key, exc)

    @contextmanager
    def _written(self, parts: Sequence[Data]) -> Iterator[Path]:
        """Give a durable temporary file, gone afterwards unless it was renamed."""
        size_of(parts)
        temporary = self._temporary / secrets.token_hex(16)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                for part in parts:
                    _write_all(handle, memoryview(part).cast("B"))
                os.fsync(handle)
            finally:
                os.close(handle)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _walk(self, top: Path) -> Iterator[Item]:
        for place, directories, files in os.walk(top, onerror=_unless_absent):
            directories[:] = [each for each in directories if each != TEMPORARY]
            for name in files:
                path = Path(place, name)
                with suppress(FileNotFoundError, UsageError):  # gone; or not of ours
                    key = check_key(path.relative_to(self.root).as_posix())
                    yield Item(key, path.stat().st_size)

    def _sweep(self) -> None:
        now_s = time.time()
        for each in self._temporary.iterdir():
            with suppress(OSError):  # somebody else sweeps, too
                if now_s - each.stat().st_mtime > FORGOTTEN_S:
                    each.unlink()


def _unless_absent(exc: OSError) -> None:
    if exc.errno not in _NONE:
        raise exc


def _is_linked(temporary: Path) -> bool:
    return temporary.stat().st_nlink == 2


def _read(handle: int, first: int, size: int | None) -> memoryview:
    found = os.fstat(handle)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    begin, end = window(found.st_size, first, size)
    place = memoryview(bytearray(end - begin))
    filled = 0
    while filled < len(place):
        got = os.preadv(handle, [place[filled:]], begin + filled)
        if not got:
            raise Unreachable("A file got shorter while it was read. Ask again.")
        filled += got
    return place


def _write_all(handle: int, view: memoryview) -> None:
    while view:
        view = view[os.write(handle, view) :]


def _make_directory(directory: Path) -> None:
    """Make a directory and those above it, each durable in the one above."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


@contextmanager
def _told(what: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise _translated(what, place, exc) from exc


def _translated(what: str, place: Path, exc: OSError) -> Exception:
    said = f"{place}: cannot {what}: {exc.strerror or exc}."
    if exc.errno in _DENIED:
        return StoreDenied(f"{said} Give this user the permission to.")
    return Unreachable(f"{said} Asking again may help.")
