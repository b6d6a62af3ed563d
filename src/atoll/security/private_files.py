"""Files that only this user may read: keys, tokens, and credentials of runs.

Rule 1: a file is complete and durable, or absent: temporary, fsync, rename or link.
Rule 2: a file has mode 0600 from its first byte on; a file that others may read is
refused, because its secret may have leaked already.
Rule 3: a file or directory of another user is refused: in a folder that many can write
to, it may be planted. Root is trusted.
Rule 4: checks are made on the open file: a name may mean another file a moment later.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.disk import TEMPORARY, sync_directory
from atoll.errors import CorruptError, DiskError, DiskFull, NoSuchFile, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_LINKS = {errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV}
"""Errors of file systems without hard links: FAT, some of FUSE."""

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
    """Return `directory`, made with its parents if absent; only this user may enter it.

    Raises:
        UsageError: others may enter it, it belongs to another user or could be
            replaced by one, or it cannot be made.
        DiskError: the disk failed.
    """
    with translated(directory):
        _make_directory(directory)
        status = _directory_status(directory)
        _require_own(directory, status)
        _require_lasting(directory)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise UsageError(
            f"{directory} has mode {mode:03o}: others may enter it, and it keeps "
            f"secrets. Run: chmod 700 {directory}"
        )
    return directory


def require_own_directory(directory: Path) -> None:
    """Return if an existing directory is this user's, and others cannot change it.

    Others may read it. Its content then comes from this user, or from root.

    Raises:
        NoSuchFile: it does not exist.
        UsageError: it belongs to another user, or others can write to it or put
            another in its place.
    """
    with translated(directory):
        status = _directory_status(directory)
        _require_own(directory, status)
        _require_lasting(directory)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise UsageError(
            f"{directory} has mode {mode:03o}: others may write to it, and change what "
            f"this user relies on. Run: chmod go-w {directory}"
        )


def replace_private(path: Path, data: bytes) -> None:
    """Replace the content of a file by `data`. After an error the old file stays.

    Of two concurrent writers, the file of one remains, complete.
    """
    with translated(path), _draft(path, data) as draft:
        os.rename(draft, path)
        sync_directory(path.parent)


def make_private(path: Path, data: bytes) -> bool:
    """Make a file with `data` unless it exists; return whether it was made."""
    with translated(path):
        _make_directory(path.parent)
        with _draft(path, data) as draft:
            try:
                _name(draft, path)
            except FileExistsError:
                return False
            sync_directory(path.parent)
    return True


def read_private(
    path: Path, *, content: str, max_bytes: int, is_given: bool = False
) -> bytes:
    """Return a file that only this user may read.

    A file whose path the user has given may be a link, as in a mounted Kubernetes
    secret, and root's file that this process may read through its group.

    Raises:
        NoSuchFile: there is none.
        UsageError: it belongs to another user, others may read it, it is a link, or
            this user may not read it.
        CorruptError: it has more than `max_bytes`.
        DiskError: the disk failed.
    """
    with translated(path):
        # Opening must not wait for the other end of a pipe.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        handle = os.open(path, flags if is_given else flags | os.O_NOFOLLOW)
        with open(handle, "rb") as file:
            _require_private(path, os.fstat(handle), content, is_given=is_given)
            data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CorruptError(
            f"{path} holds no {content}: it has more than {max_bytes} bytes. "
            "Give the right file."
        )
    return data


def remove_private(path: Path) -> bool:
    """Remove a file; return whether it existed."""
    with translated(path):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync_directory(path.parent)
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file during the block.

    Threads of any process wait for it; the death of the owner releases it.
    """
    with translated(path):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o600)
    try:
        with translated(path):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # Closing is not enough: a forked process may have the file open, too.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _require_private(
    path: Path, status: os.stat_result, content: str, *, is_given: bool
) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is no file that could hold a {content}. Give a file.")
    _require_own(path, status)
    mode = stat.S_IMODE(status.st_mode)
    is_mounted = is_given and status.st_uid == 0 and status.st_gid in _groups()
    if mode & (0o037 if is_mounted else 0o077):
        raise UsageError(
            f"{path} has mode {mode:03o}: others may read this {content}. "
            f"Run: chmod 600 {path}"
        )


def _name(draft: Path, path: Path) -> None:
    """Give a complete file its name, unless a file with that name exists.

    A hard link replaces nothing. Without hard links, makers of the file take a lock,
    check, and rename.
    """
    try:
        os.link(draft, path)
        return
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
    with locked(path.with_name(f".{path.name}.lock")):
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        os.rename(draft, path)


def _directory_status(directory: Path) -> os.stat_result:
    """Return the status of a directory, whose name may be a link of this user's own."""
    link = os.lstat(directory)
    if stat.S_ISLNK(link.st_mode):
        _require_own(directory, link)
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return os.fstat(handle)
    finally:
        os.close(handle)


def _require_own(path: Path, status: os.stat_result) -> None:
    """Return if a file or directory belongs to this user, or to root."""
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{path} belongs to user {_user(status.st_uid)} (mode "
            f"{stat.S_IMODE(status.st_mode):03o}), and this is user "
            f"{_user(os.geteuid())}: its content cannot be trusted. Choose "
            "another place, or remove it if it does not belong there."
        )


def _require_lasting(directory: Path) -> None:
    """Return if no other user can replace this directory by another one.

    A world-writable folder needs the sticky bit, so that users can rename or remove
    only their own files. The owner of a folder above, or its group, can remove the
    directory, but a replacement has another owner and is refused.
    """
    for parent in directory.resolve().parents:
        status = parent.stat()
        mode = stat.S_IMODE(status.st_mode)
        is_kept = mode & stat.S_ISVTX and status.st_uid in (os.geteuid(), 0)
        # Volumes of containers are often mounted with mode 0777, which only their
        # operator can change.
        is_volume = status.st_uid == 0 and os.path.ismount(parent)
        if mode & 0o002 and not (is_kept or is_volume):
            raise UsageError(
                f"{parent}, which {directory} is in, has mode {mode:04o} and belongs "
                f"to user {_user(status.st_uid)}: any user may put another directory "
                f"in its place. Run: chmod o-w {parent}, or choose another place."
            )


def _groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def _user(number: int) -> str:
    """Return a user's number, with the name if there is one."""
    try:
        return f"{number} ({pwd.getpwuid(number).pw_name})"
    except KeyError:
        return str(number)


@contextmanager
def _draft(path: Path, data: bytes) -> Iterator[Path]:
    """Yield a complete and durable file with a temporary name; remove it at the end."""
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
    """Translate an `OSError` about `path` into an error of `atoll.errors`."""
    try:
        yield
    except FileNotFoundError as exc:
        raise NoSuchFile(f"{path} does not exist.") from exc
    except OSError as exc:
        reason = exc.strerror or str(exc)
        if exc.errno in _CHOSEN_WRONGLY:
            raise UsageError(
                f"{path} cannot be written or read: {reason}. Choose a place that "
                "belongs to this user."
            ) from exc
        if exc.errno in _FULL:
            raise DiskFull(f"No room for {path}: {reason}. Free some there.") from exc
        raise DiskError(f"{path} cannot be written or read: {reason}.") from exc
