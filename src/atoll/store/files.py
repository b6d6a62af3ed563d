"""Objects as files in a directory, which many machines may share.

Rule 1: an object is written to a temporary file and synced, and gets its name at once:
        by a hard link if there must be none, by a rename if it may be replaced. Both
        are atomic on local disks and on NFS; nothing is ever locked.
Rule 2: a hard link that fails may have been made, and its answer lost: the number of
        links to the temporary file tells.
Rule 3: directories come with the first object in them and go with the last.
Rule 4: a temporary file that a dead process left is swept up after a day.
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
"""Directory of what is being written; no key has a part like this."""

FORGOTTEN_S = 86_400.0
"""How old a temporary file is that nobody can be writing any more."""

MOVES = 100
"""How often a directory may be removed under somebody who puts an object there."""

_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}


class FileStore:
    """Keeps objects below a directory, made if absent. Implements `Store`."""

    traits = StoreTraits()

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._temporary = self.root / TEMPORARY
        with _told("make", self.root):
            self._temporary.mkdir(parents=True, exist_ok=True)
            self._sweep()

    def put_new(self, key: str, parts: Sequence[Data]) -> bool:
        place = self._place(key)
        with _told("put", place), self._written(parts) as temporary:
            return _named(place, partial(_link, temporary, place))

    def put(self, key: str, parts: Sequence[Data]) -> None:
        place = self._place(key)
        with _told("put", place), self._written(parts) as temporary:
            _named(place, partial(_replace, temporary, place))

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
            found = sorted(self._walk(top))
            # Nothing is below a directory that is gone; that is not an empty store.
            os.stat(self._temporary)
            return found

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            place = self._place(key)
            with _told("remove", place), suppress(*_ABSENT):
                place.unlink()
                self._prune(place.parent)

    def _prune(self, directory: Path) -> None:
        """Remove directories that are empty now; who puts there makes them again."""
        with suppress(OSError):  # one that has something in it stays
            while directory != self.root:
                directory.rmdir()
                directory = directory.parent

    def _place(self, key: str) -> Path:
        return self.root / check_key(key)

    def _translated_get(self, exc: OSError, key: str) -> Exception:
        if exc.errno in _NONE and self._temporary.is_dir():
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
                    write_all(handle, part)
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
                key = path.relative_to(self.root).as_posix()
                if is_key(key):  # others may keep theirs beside
                    with suppress(FileNotFoundError):  # gone since
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


def _named(place: Path, act: Callable[[], bool]) -> bool:
    """Give a file its name in a directory that somebody may be removing as empty."""
    for _ in range(MOVES):
        with suppress(FileNotFoundError):
            _make_directory(place.parent)
            return act()
    _make_directory(place.parent)
    return act()


def _link(temporary: Path, place: Path) -> bool:
    try:
        os.link(temporary, place)
    except FileExistsError:
        return _is_linked(temporary)
    except OSError:
        if not _is_linked(temporary):
            raise
    _sync(place.parent)
    return True


def _replace(temporary: Path, place: Path) -> bool:
    os.replace(temporary, place)
    _sync(place.parent)
    return True


def _sync(directory: Path) -> None:
    with suppress(FileNotFoundError):  # it was put, and has been removed since
        sync_directory(directory)


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


def _make_directory(directory: Path) -> None:
    """Make a directory and those above it, each durable in the one above."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    with suppress(FileExistsError):  # whose it was may have removed it again by now
        directory.mkdir()
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
        return StoreDenied(
            f"{said} Give user {os.geteuid()} the permission to {what}, here and in "
            "the directories above; or mount it so that it has."
        )
    if exc.errno in _NONE:
        return Unreachable(
            f"{said} The store's directory may be gone: mount it again, or make it "
            "anew where nothing is lost."
        )
    return Unreachable(f"{said} Asking again may help.")
