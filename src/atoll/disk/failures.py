"""What the system says of a disk that fails, in our words."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import DiskDenied, DiskError, DiskFull, NoSuchFile

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_OURS = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Raise what goes wrong in the block as our own error, with the way out."""
    try:
        yield
    except FileNotFoundError as exc:
        raise NoSuchFile(f"{exc.filename or path} is not there.") from exc
    except OSError as exc:
        why = os.strerror(exc.errno) if exc.errno else str(exc)
        if exc.errno in _FULL:
            raise DiskFull(
                f"No room for {path}: {why}. Free some space there; nothing that was "
                "durable is lost."
            ) from exc
        if exc.errno in _NOT_OURS:
            raise DiskDenied(
                f"{path} cannot be written or read: {why}. Give this user the right to "
                "write there, or choose another directory."
            ) from exc
        raise DiskError(
            f"The disk failed at {path}: {why}. See what the system says of it before "
            "going on."
        ) from exc
