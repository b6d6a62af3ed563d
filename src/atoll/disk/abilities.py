"""What a file system must be able to do, before a run is kept on it.

Network and user-space file systems lack some of it. A run that finds out in the middle
of a round has lost the round; so all is tried once, at the start.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.disk.failures import translated
from atoll.disk.nameless import open_nameless
from atoll.disk.port import TEMPORARY
from atoll.disk.whole import sync_directory
from atoll.errors import DiskError

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
    """What a file system has of the things that a run can do without."""

    has_tmpfile: bool
    """Files that never have a name; otherwise they have one for a moment."""

    has_links: bool
    """Second names of a file; otherwise private files are made under a lock."""


def require_able(directory: Path) -> Abilities:
    """Try all that a run needs of the file system under an existing directory.

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


def attempt(directory: Path, what: str, act: Callable[[], object]) -> None:
    """Do something that a run cannot do without.

    Raises:
        DiskError: the file system does not have it.
        OSError: it has, and something else is wrong.
    """
    try:
        act()
    except OSError as exc:
        if exc.errno not in _UNABLE:
            raise
        raise DiskError(
            f"The file system of {directory} cannot {what} ({exc.strerror}), and a run "
            "would not be safe there. Choose a directory on a local disk, such as ext4 "
            "or XFS; `atoll doctor --dir DIRECTORY` says whether one will do."
        ) from exc


def _lock(handle: int, path: Path) -> None:
    """Take a lock and check that a second handle cannot."""
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
    """Read back what was written to a file without a name, as the spool does."""
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
