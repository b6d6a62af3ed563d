"""An island's key: who holds it is the island, whatever process that may be.

A key is 32 random bytes in a file of its own that nobody else may read. The run knows
only its digest; with the key an island's next life is welcome at once, without it a
live name is refused.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from atoll.disk import sync_directory
from atoll.errors import CorruptError, DiskError, UsageError
from atoll.island.environment import Surroundings
from atoll.security.private import private_directory, replace_private
from atoll.wire import blake3_digest

KEY_BYTES = 32


def island_key(directory: Path, *, run: str, island: str) -> bytes:
    """Return the key of an island, made if this is the first time it is asked for.

    Two processes that ask at the same time get the same key.

    Raises:
        UsageError: others may read the file, or the directory cannot be written.
        CorruptError: the file holds no key.
        DiskError: the disk failed.
    """
    path = directory / _name(run, island)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path)
        return _read(path)
    except (FileExistsError, NotADirectoryError, PermissionError) as exc:
        raise UsageError(
            f"{path} cannot be written or read: {exc.strerror}. Choose a directory "
            "that belongs to this user."
        ) from exc
    except OSError as exc:
        raise DiskError(f"{path} cannot be written or read: {exc.strerror}.") from exc


def keep_key(directory: Path, *, run: str, island: str, key: bytes) -> None:
    """Let an island have a key that it was given, in place of what was there.

    Raises:
        UsageError: the directory cannot be written.
        DiskError: the disk failed.
    """
    replace_private(private_directory(directory) / _name(run, island), key)


def life_key(island: str | None, *, run: str, surroundings: Surroundings) -> bytes:
    """Return the key of an island; one without a name of its own has it for a life."""
    if island is None:
        return secrets.token_bytes(KEY_BYTES)
    return island_key(surroundings.keys, run=run, island=island)


def _name(run: str, island: str) -> str:
    """Return a name that any file system takes, for names that it may not."""
    return blake3_digest(f"{run}\0{island}".encode()).hex()[:32] + ".key"


def _make(path: Path) -> None:
    """Put a key there that is complete and durable, unless another is there first."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, secrets.token_bytes(KEY_BYTES))
        os.fsync(handle)
        os.link(draft, path)
    except FileExistsError:
        pass  # made by another process since: that one is the key
    finally:
        os.close(handle)
        draft.unlink()
    sync_directory(path.parent)


def _read(path: Path) -> bytes:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise UsageError(
            f"{path} has mode {mode:03o}: others may read this island's key. "
            f"Run: chmod 600 {path}"
        )
    with path.open("rb") as file:
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise CorruptError(
            f"{path} holds no key: a key has {KEY_BYTES} bytes. Remove the file if the "
            "island is not live; it will be a new one."
        )
    return key
