"""Files that only this user may read: keys, tokens, and what is known of runs.

Rule 1: a file is complete and durable, or not there: temporary, fsync, rename or link.
Rule 2: a file has mode 0600 from its first byte on; one that others may read is
refused, because its secret may be known already.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.disk import TEMPORARY, sync_directory
from atoll.errors import CorruptError, DiskError, DiskFull, NoSuchFile, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_CHOSEN_WRONGLY = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


def private_directory(directory: Path) -> Path:
    """Return `directory`, made with its parents if absent; nobody else may enter it.

    Raises:
        UsageError: others may, or it cannot be made.
        DiskError: the disk failed.
    """
    with translated(directory):
        _make_directory(directory)
        mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o077:
        raise UsageError(
            f"{directory} has mode {mode:03o}: others may enter it, and it keeps "
            f"secrets. Run: chmod 700 {directory}"
        )
    return directory


def replace_private(path: Path, data: bytes) -> None:
    """Put `data` there, in place of what was. On an error the old file stands.

    Two writers at the same time leave the file of one of them, whole.
    """
    with translated(path), _draft(path, data) as draft:
        os.rename(draft, path)
        sync_directory(path.parent)


def make_private(path: Path, data: bytes) -> bool:
    """Put `data` there unless a file is there first; say whether it was put."""
    with translated(path):
        _make_directory(path.parent)
        with _draft(path, data) as draft:
            try:
                os.link(draft, path)
            except FileExistsError:
                return False
            sync_directory(path.parent)
    return True


def read_private(path: Path, *, what: str, max_bytes: int) -> bytes:
    """Return a file that only this user may read.

    Raises:
        NoSuchFile: there is none.
        UsageError: others may read it, or this user may not.
        CorruptError: it has more than `max_bytes`.
        DiskError: the disk failed.
    """
    with translated(path):
        # Opening must not wait for the other end of a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            _require_private(path, os.fstat(handle), what)
            data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CorruptError(
            f"{path} holds no {what}: it has more than {max_bytes} bytes. "
            "Give the right file."
        )
    return data


def remove_private(path: Path) -> bool:
    """Forget a file; say whether it was there."""
    with translated(path):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync_directory(path.parent)
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be alone with a file of locks while the block lasts.

    Others wait, in whatever process; one that dies lets go.
    """
    with translated(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with translated(path):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # Closing is not enough: a fork may have the file open, too.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _require_private(path: Path, status: os.stat_result, what: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is no file that could hold a {what}. Give a file.")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise UsageError(
            f"{path} has mode {mode:03o}: others may read this {what}. "
            f"Run: chmod 600 {path}"
        )


@contextmanager
def _draft(path: Path, data: bytes) -> Iterator[Path]:
    """Give a complete and durable file under a name of its own, gone afterwards."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(draft, flags, 0o600), "wb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            yield draft
        finally:
            with suppress(FileNotFoundError):
                draft.unlink()


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    # Another process may have made it since.
    directory.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory.parent)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise what the system says of `path` as errors of ours."""
    try:
        yield
    except FileNotFoundError as exc:
        raise NoSuchFile(f"{path} is not there.") from exc
    except OSError as exc:
        why = exc.strerror or str(exc)
        if exc.errno in _CHOSEN_WRONGLY:
            raise UsageError(
                f"{path} cannot be written or read: {why}. Choose a place that "
                "belongs to this user."
            ) from exc
        if exc.errno in _FULL:
            raise DiskFull(f"No room for {path}: {why}. Free some there.") from exc
        raise DiskError(f"{path} cannot be written or read: {why}.") from exc
