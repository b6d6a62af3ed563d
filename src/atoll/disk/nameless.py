"""Files without a name: their room comes back however the process ends."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from atoll.disk.port import TEMPORARY

_O_TMPFILE: int | None = getattr(os, "O_TMPFILE", None)  # Linux only

_UNSUPPORTED = {
    errno.EINVAL,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
}
"""How file systems answer O_TMPFILE that do not have it: NFS, most of FUSE."""

_PREFIX = "nameless-"


def open_nameless(directory: Path) -> int:
    """Return a new file for reading and writing that vanishes with its last handle.

    Where the file system has no O_TMPFILE, the file is made with a name that is
    removed at once. A crash between the two leaves an empty file for `sweep_nameless`.
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
    """Remove the names that a crash left behind. Nobody else uses the directory."""
    for path in directory.glob(f"{_PREFIX}*{TEMPORARY}"):
        with suppress(FileNotFoundError):
            path.unlink()
