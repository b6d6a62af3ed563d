"""The machine's own disk: a directory that one process owns."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from atoll.disk.abilities import attempt, require_able
from atoll.disk.failures import translated
from atoll.disk.port import LOCK, NAME, TEMPORARY, Data, check_name
from atoll.disk.whole import give_up_memory, sync_directory, write_all, write_whole
from atoll.errors import AtollError, DiskFull, UsageError

_READ_BYTES = 2**23
UNKNOWN_BYTES = 2**62
"""The room on a file system that does not tell: whatever is written, it may fit."""

_WARM_BYTES = 2**20
"""Of a file that is smaller, the memory is not worth asking back."""


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
        """Whoever finds a directory that another thread has made finds it durable."""

        self._warm: dict[Path, Path] = {}
        """By directory: the last large file written there, which is still in memory."""

        with translated(self.root):
            _make_directory(self.root)
            self._lock: int | None = _take_lock(self.root / LOCK)
            try:
                with suppress(DiskFull):  # a run that is there waits for room
                    require_able(self.root)
                _sweep(self.root)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Give the directory up. Safe to repeat."""
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
                # The handle that wrote is the one that is told of a failed write.
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
                self._unlisted.add(name)  # in case that it can be made, not removed
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
            found = [n for n in _names(self.root, folder) if n.startswith(prefix)]
        return sorted(found)

    def remove(self, name: str) -> None:
        path = self._path(name)
        self._forget(name)
        self._unlisted.discard(name)
        with translated(path):
            path.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        self._require_open()
        with translated(self.root):
            found = os.statvfs(self.root)
        # Some file systems of FUSE do not say how large they are.
        return found.f_bavail * found.f_frsize if found.f_blocks else UNKNOWN_BYTES

    def _path(self, name: str) -> Path:
        self._require_open()
        if name == LOCK:
            raise UsageError(f"{name!r} is the lock of {self.root}. Use another name.")
        return self.root / check_name(name)

    def _require_open(self) -> None:
        if self._lock is None:
            raise UsageError(f"The disk at {self.root} is closed. Open it again.")

    def _cool(self, directory: Path) -> None:
        """Give the memory of a directory's last large file to the one that comes now.

        That one is durable, and seldom read when the next is there. Memory that was
        never used costs a machine several times what it takes to write a file to it.
        """
        last = self._warm.pop(directory, None)
        if last is not None:
            with suppress(OSError):  # it may have been removed
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
            with suppress(OSError):  # close repeats what a failed write has said
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
    """Remove what a dead owner left unfinished, and make what it left durable."""
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
