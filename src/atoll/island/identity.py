"""The identity of an island: its key, and the seeds that follow from its name.

Any process with the key of an island is that island. Seeds are hashes of names: the
same names give the same numbers.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from atoll.errors import CorruptError
from atoll.island.environment import CredentialPaths
from atoll.security import private_files
from atoll.wire import blake3_digest

KEY_BYTES = 32


def island_key(directory: Path, *, run: str, island: str) -> bytes:
    """Return the key of an island; make it if there is none.

    Two processes that ask at the same time get the same key.

    Raises:
        UsageError: others may read the file, or the directory cannot be written.
        CorruptError: the file holds no key.
        DiskError: the disk failed.
    """
    path = directory / _name(run, island)
    if not os.path.lexists(path):
        private_files.make_private(path, secrets.token_bytes(KEY_BYTES))
    return _read(path)


def keep_key(directory: Path, *, run: str, island: str, key: bytes) -> None:
    """Store a key as that of an island. A former key is replaced.

    Raises:
        UsageError: the directory cannot be written.
        DiskError: the disk failed.
    """
    private_files.replace_private(
        private_files.private_directory(directory) / _name(run, island), key
    )


def connection_key(island: str | None, *, run: str, paths: CredentialPaths) -> bytes:
    """Return the key of an island; for an island without a name, a random key."""
    if island is None:
        return secrets.token_bytes(KEY_BYTES)
    return island_key(paths.keys, run=run, island=island)


def _name(run: str, island: str) -> str:
    """Return a file name that every file system accepts."""
    return blake3_digest(f"{run}\0{island}".encode()).hex()[:32] + ".key"


def _read(path: Path) -> bytes:
    wrong = (
        f"{path} holds no key: a key has {KEY_BYTES} bytes. Remove the file if the "
        "island is not live; it will be a new one."
    )
    try:
        key = private_files.read_private(
            path, content="key of an island", max_bytes=KEY_BYTES
        )
    except CorruptError as exc:
        raise CorruptError(wrong) from exc
    if len(key) != KEY_BYTES:
        raise CorruptError(wrong)
    return key


def island_seed(run: str, island: str) -> int:
    """Return a seed of 63 bits that differs for each island of a run."""
    return _hash("island", run, island) >> 1


def update_seed(run: str, fragment: int, round: int, island: str) -> int:
    """Return the seed of one update's stochastic rounding."""
    return _hash("update", run, str(fragment), str(round), island)


def _hash(*names: str) -> int:
    joined = b"\0".join(name.encode() for name in names)
    return int.from_bytes(blake3_digest(joined)[:8], "little")
