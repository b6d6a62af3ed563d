"""The machine's own disk: a directory that one process owns.

A run needs abilities that network and user-space file systems may lack. A run that
finds out in the middle of a round has lost the round, so each is tried once, at the
start.

Below are files that are written once and whole, and anonymous files.
Rule 1: a file is durable when fsync has returned. Everything else is advice to
        the system, and changes only the time of its work.
Rule 2: an anonymous file has no name, so its space is free again regardless of how
        the process ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.disk.base import LOCK, NAME, TEMPORARY, Data, check_name, translated
from atoll.errors import AtollError, DiskError, DiskFull, UsageError

_UNABLE = {
    errno.EBUSY,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENODEV,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.ENOTTY,
    errno.EOPNOTSUPP,
    errno.EPERM,
}
"""Errors of an unsupported operation. A full or broken disk has other errors."""

_PROBE = b"atoll"


@dataclass(frozen=True)
class Abilities:
    """Optional features of a file system."""

    has_tmpfile: bool
    """Files without a name; otherwise they have one for a moment."""

    has_links: bool
    """Second names of a file; otherwise private files are made under a lock."""


def require_able(directory: Path) -> Abilities:
    """Test the features that a run needs of the file system of a directory.

    Raises:
        DiskError: the run would not be safe there, or the disk fails (`DiskFull`,
            `DiskDenied`).
    """
    path = directory / f"probe-{secrets.token_hex(8)}{TEMPORARY}"
    other = path.with_name(f"other-{path.name}")
    try:
        with translated(directory):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            handle = os.open(path, flags, 0o600)
            try:
                os.write(handle, _PROBE)
                attempt(directory, "lock files", lambda: _lock(handle, path))
                attempt(directory, "make files durable", lambda: os.fsync(handle))
            finally:
                os.close(handle)
            has_links = _has_links(path, other)
            attempt(directory, "replace files", lambda: os.replace(path, other))
            attempt(
                directory,
                "make names durable",
                lambda: sync_directory(directory),
            )
            attempt(
                directory,
                "keep an open file without a name",
                lambda: _read_nameless(directory),
            )
            return Abilities(has_tmpfile=_has_tmpfile(directory), has_links=has_links)
    finally:
        for leftover in (path, other):
            with suppress(OSError):
                leftover.unlink()


def attempt(directory: Path, feature: str, act: Callable[[], object]) -> None:
    """Call `act`, which tests a feature that a run needs.

    Raises:
        DiskError: the file system does not have the feature.
        OSError: another failure.
    """
    try:
        act()
    except OSError as exc:
        if exc.errno not in _UNABLE:
            raise
        raise DiskError(
            f"The file system of {directory} cannot {feature} ({exc.strerror}), and a "
            "run would not be safe there. Choose a directory on a local disk, such as "
            "ext4 or XFS; `atoll doctor --dir DIRECTORY` tests a directory."
        ) from exc


def _lock(handle: int, path: Path) -> None:
    """Take a lock, and check that a second handle cannot take it."""
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    finally:
        os.close(second)
        fcntl.flock(handle, fcntl.LOCK_UN)
    raise OSError(errno.ENOLCK, "a lock was given twice")


def _read_nameless(directory: Path) -> None:
    """Write to a file without a name, and read it back, as the spool does."""
    handle = open_nameless(directory)
    try:
        os.write(handle, _PROBE)
        with mmap.mmap(handle, len(_PROBE), prot=mmap.PROT_READ) as mapped:
            if mapped[:] != _PROBE:
                raise OSError(errno.EINVAL, "it reads back other bytes")
    finally:
        os.close(handle)


def _has_links(path: Path, other: Path) -> bool:
    try:
        os.link(path, other)
    except OSError as exc:
        if exc.errno not in _UNABLE | {errno.EMLINK, errno.EXDEV}:
            raise
        return False
    return True


def _has_tmpfile(directory: Path) -> bool:
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None:
        return False
    try:
        os.close(os.open(directory, flag | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


_READ_BYTES = 2**23
UNKNOWN_BYTES = 2**62
"""Free space of a file system that does not report it: assume that all fits."""

_WARM_BYTES = 2**20
"""Smaller files are left in the page cache."""


class SystemDisk:
    """A directory of this machine. Implements `Disk`.

    It belongs to this process until `close`, or until the process dies in any way.

    Raises:
        UsageError: another process owns the directory, or it cannot be written to.
        DiskError: its file system cannot do what a run needs.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._appending: dict[str, int] = {}
        self._unlisted: set[str] = set()
        """Files whose directory entries are not durable yet."""

        self._making = threading.Lock()
        """Held while a directory is made: other threads see only durable ones."""

        self._warm: dict[Path, Path] = {}
        """By directory: the last large file written there, still in the page cache."""

        with translated(self.root):
            _make_directory(self.root)
            self._lock: int | None = _take_lock(self.root / LOCK)
            try:
                with suppress(DiskFull):  # an existing run waits for room
                    require_able(self.root)
                _sweep(self.root)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Release the directory. Safe to repeat."""
        for name in list(self._appending):
            self._forget(name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, name: str, data: Data) -> None:
        path = self._path(name)
        try:
            with translated(path):
                write_all(self._append_to(name, path), data)
        except AtollError:
            self._forget(name)
            raise

    def sync(self, name: str) -> None:
        path = self._path(name)
        try:
            with translated(path):
                # Only the handle that wrote gets the error of a failed write.
                handle = self._appending.get(name)
                if handle is None:
                    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                    self._appending[name] = handle
                os.fsync(handle)
                if name in self._unlisted:
                    sync_directory(path.parent)
                    self._unlisted.discard(name)
        finally:
            self._forget(name)

    def write_new(self, name: str, parts: Iterable[Data]) -> None:
        path = self._path(name)
        if path.exists():
            raise UsageError(
                f"{path} exists, and is never written twice. Remove it first."
            )
        with translated(path):
            self._make_directory(path.parent)
            temporary = path.with_name(path.name + TEMPORARY)
            self._cool(path.parent)
            try:
                size = write_whole(temporary, parts)
                os.rename(temporary, path)
                sync_directory(path.parent)
            except BaseException:
                self._unlisted.add(name)  # it may have been made, and not be removable
                for leftover in (temporary, path):
                    with suppress(OSError):
                        os.unlink(leftover)
                raise
        if size >= _WARM_BYTES:
            self._warm[path.parent] = path

    def read(self, name: str, first: int = 0, size: int | None = None) -> bytes:
        path = self._path(name)
        with translated(path), path.open("rb", buffering=0) as file:
            file.seek(first)
            if size is None:
                return file.read()
            return _read_up_to(file.fileno(), size)

    def names(self, prefix: str) -> list[str]:
        self._require_open()
        folder = prefix.rpartition("/")[0]
        if folder:
            check_name(folder)
        with translated(self.root / folder):
            matches = [n for n in _names(self.root, folder) if n.startswith(prefix)]
        return sorted(matches)

    def remove(self, name: str) -> None:
        path = self._path(name)
        self._forget(name)
        self._unlisted.discard(name)
        with translated(path):
            path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        self._require_open()
        with translated(self.root):
            stats = os.statvfs(self.root)
        # Some FUSE file systems do not report their size.
        return stats.f_bavail * stats.f_frsize if stats.f_blocks else UNKNOWN_BYTES

    def _path(self, name: str) -> Path:
        self._require_open()
        if name == LOCK:
            raise UsageError(f"{name!r} is the lock of {self.root}. Use another name.")
        return self.root / check_name(name)

    def _require_open(self) -> None:
        if self._lock is None:
            raise UsageError(f"The disk at {self.root} is closed. Open it again.")

    def _cool(self, directory: Path) -> None:
        """Free the page cache of a directory's last large file for the next one.

        The last file is durable, and seldom read after the next is written. Writing
        into fresh memory is several times slower than into memory that was used.
        """
        last = self._warm.pop(directory, None)
        if last is not None:
            with suppress(OSError):  # it may be gone
                give_up_memory(last)

    def _make_directory(self, directory: Path) -> None:
        with self._making:
            _make_directory(directory)

    def _append_to(self, name: str, path: Path) -> int:
        if name not in self._appending:
            self._make_directory(path.parent)
            is_new = not path.exists()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._appending[name] = os.open(path, flags, 0o600)
            if is_new:
                self._unlisted.add(name)
        return self._appending[name]

    def _forget(self, name: str) -> None:
        handle = self._appending.pop(name, None)
        if handle is not None:
            with suppress(OSError):  # close repeats the error of a failed write
                os.close(handle)


def _take_lock(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        attempt(
            path.parent,
            "lock files",
            lambda: fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB),
        )
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as exc:
        holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
        os.close(handle)
        raise UsageError(
            f"{path.parent} belongs to process {holder or 'unknown'}, which is alive. "
            "Stop that one first, or choose another directory."
        ) from exc
    except BaseException:
        os.close(handle)
        raise
    return handle


def _sweep(root: Path) -> None:
    """Remove unfinished files of a dead owner, and make its other files durable."""
    for folder, _, files in os.walk(root):
        for file in files:
            if file.endswith(TEMPORARY):
                os.unlink(os.path.join(folder, file))
        sync_directory(Path(folder))


def _names(root: Path, folder: str) -> Iterator[str]:
    for directory, _, files in os.walk(root / folder, onerror=_unless_absent):
        within = Path(directory).relative_to(root)
        for file in files:
            name = (within / file).as_posix()
            if name != LOCK and NAME.fullmatch(name):
                yield name


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(mode=0o700)
    sync_directory(directory.parent)


def _read_up_to(handle: int, size: int) -> bytes:
    parts = []
    while size > 0 and (part := os.read(handle, min(size, _READ_BYTES))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


BEHIND_BYTES = 2**21
"""Write-back of a new file starts after each such piece, so that fsync is short."""

_RANGE_WRITE = 2
"""SYNC_FILE_RANGE_WRITE of Linux."""


def write_whole(path: Path, parts: Iterable[Data]) -> int:
    """Make a durable file, and return its size."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        size = _write_parts(handle, parts)
        os.fsync(handle)
        return size
    finally:
        os.close(handle)


def write_all(handle: int, data: Data) -> None:
    """Write all of `data` to a file, which may take several calls."""
    view = _bytes_of(data)
    while view:
        view = view[os.write(handle, view) :]


def give_up_memory(path: Path) -> None:
    """Drop a file from the page cache; it is durable on the disk."""
    if sys.platform == "linux":
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def sync_directory(directory: Path) -> None:
    """Return when the names in a directory are durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_parts(handle: int, parts: Iterable[Data]) -> int:
    size = begun = 0
    for part in parts:
        for piece in _pieces(_bytes_of(part)):
            write_all(handle, piece)
            size += len(piece)
            if size - begun >= BEHIND_BYTES:
                _begin(handle, begun, size - begun)
                begun = size
    return size


def _pieces(view: memoryview) -> Iterator[memoryview]:
    for first in range(0, len(view), BEHIND_BYTES):
        yield view[first : first + BEHIND_BYTES]


def _bytes_of(data: Data) -> memoryview:
    view = memoryview(data)
    return (
        view.cast("B") if view.nbytes else memoryview(b"")
    )  # an empty view cannot be cast


def _beginner() -> Callable[[int, int, int], object]:
    """Return a function that starts the write-back of a file's range without waiting.

    Its errors are reported by fsync.
    """
    try:
        start = ctypes.CDLL(None).sync_file_range
    except AttributeError:  # not on this system: fsync does it all
        return lambda handle, first, size: None
    start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return lambda handle, first, size: start(handle, first, size, _RANGE_WRITE)


_begin = _beginner()


_O_TMPFILE: int | None = getattr(os, "O_TMPFILE", None)  # Linux only

_UNSUPPORTED = {
    errno.EINVAL,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
}
"""Errors of file systems without O_TMPFILE: NFS, most of FUSE."""

_PREFIX = "nameless-"


def open_nameless(directory: Path) -> int:
    """Return a new file for reading and writing that is removed with its last handle.

    Where the file system has no O_TMPFILE, the file is made with a name that is
    removed immediately. A crash between the two leaves an empty file, see
    `sweep_nameless`.
    """
    if _O_TMPFILE is not None:
        try:
            return os.open(directory, _O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            if exc.errno not in _UNSUPPORTED:
                raise
    path = directory / f"{_PREFIX}{secrets.token_hex(16)}{TEMPORARY}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        os.unlink(path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def sweep_nameless(directory: Path) -> None:
    """Remove names that a crash left. No other process may use the directory."""
    for path in directory.glob(f"{_PREFIX}*{TEMPORARY}"):
        with suppress(FileNotFoundError):
            path.unlink()
