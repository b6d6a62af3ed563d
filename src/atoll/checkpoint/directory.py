"""The directory of a run's checkpoints: numbered, finished by one rename, and swept.

Rule 1: a checkpoint is written under a name that ends in "~", made durable, and then
        renamed. Whoever finds it under its own name finds all of it.
Rule 2: a number is used once. The highest is the newest, whatever was resumed from.
Rule 3: only what a manifest of ours lists is removed, and never the last valid one.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.checkpoint.manifest import MANIFEST, Manifest, is_our_file, read_manifest
from atoll.disk import LOCK, TEMPORARY, sync_directory
from atoll.disk.failures import translated
from atoll.errors import CorruptError, UsageError

_NAME = re.compile(r"checkpoint-([0-9]{8})(~?)")
MAX_NUMBER = 10**8 - 1


def checkpoint_name(number: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"checkpoint-{number:08d}"


def number_of(path: Path) -> int | None:
    """Return a finished checkpoint's number; None if the name is not of one."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and not match[2] else None


def finished(root: Path) -> list[Path]:
    """Return the directories of checkpoints that were finished, the newest first."""
    with translated(root):
        if not root.is_dir():
            return []
        found = [path for path in root.iterdir() if number_of(path) is not None]
    return sorted((path for path in found if _is_directory(path)), reverse=True)


def next_number(root: Path) -> int:
    """Return a number above all that were ever used, finished or not."""
    with translated(root):
        taken = [_NAME.fullmatch(path.name) for path in root.iterdir()]
    number = max((int(match[1]) for match in taken if match), default=0) + 1
    if number > MAX_NUMBER:
        raise UsageError(f"{root} has no numbers left. Save to another directory.")
    return number


@contextmanager
def owned(root: Path) -> Iterator[None]:
    """Be the only process that writes checkpoints to a directory, in the block.

    What a process that died left unfinished is removed.

    Raises:
        UsageError: another process does, and is alive.
    """
    handle = own(root)
    try:
        yield
    finally:
        os.close(handle)


def own(root: Path) -> int:
    """Be the only process that writes to a directory, until the handle is closed."""
    with translated(root):
        _make(root)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(root / LOCK, flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(handle)
        raise UsageError(
            f"Another process saves its checkpoints to {root}, and is alive. "
            "Give every island a directory of its own, or stop that process first."
        ) from exc
    sweep(root)
    return handle


def begin(root: Path, number: int) -> Path:
    """Make the directory in which a checkpoint is written, durable after `commit`."""
    path = root / (checkpoint_name(number) + TEMPORARY)
    with translated(path):
        path.mkdir(mode=0o700)
    return path


def commit(unfinished: Path) -> Path:
    """Make a directory, all files of which are durable, a checkpoint."""
    path = unfinished.with_name(unfinished.name.removesuffix(TEMPORARY))
    with translated(path):
        sync_directory(unfinished)
        os.rename(unfinished, path)
        sync_directory(path.parent)
    return path


def sweep(root: Path) -> None:
    """Remove what was left unfinished. The caller owns the directory."""
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and match[2] and _is_directory(path):
            _remove(path, [name for name in os.listdir(path) if is_our_file(name)])


def retain(root: Path, keep: int, newest: Path) -> list[Path]:
    """Remove all but the `keep` newest checkpoints that are whole; return those.

    `newest` has just been written: it is valid, and stays. What is not whole is not
    counted and not touched: somebody may want to see what happened to it.
    """
    whole = [newest]
    for path in finished(root):
        if path == newest:
            continue
        manifest = _manifest_if_whole(path)
        if manifest is None:
            continue
        whole.append(path)
        if len(whole) > keep:
            retire(path, manifest)
    return whole[keep:]


def retire(path: Path, manifest: Manifest) -> None:
    """Remove a checkpoint, unless somebody has put something else into it.

    It loses its name first, so that half of it is never taken for a checkpoint.
    """
    ours = {MANIFEST, *manifest.files}
    unfinished = path.with_name(path.name + TEMPORARY)
    with suppress(OSError):  # what cannot be removed now is found another time
        if set(os.listdir(path)) <= ours:
            os.rename(path, unfinished)
            _remove(unfinished, sorted(ours))


def missing_from(path: Path, manifest: Manifest) -> str | None:
    """Return what a checkpoint lacks by the sizes of its files; None if nothing."""
    for name, entry in manifest.files.items():
        try:
            size = (path / name).lstat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry.size_bytes:
            return f"{name} has {size} bytes instead of {entry.size_bytes}"
    return None


def _manifest_if_whole(path: Path) -> Manifest | None:
    try:
        manifest = read_manifest(path)
    except CorruptError:
        return None
    return None if missing_from(path, manifest) else manifest


def _remove(path: Path, names: list[str]) -> None:
    with suppress(OSError):  # what stays is swept another time
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(path / name)
        os.rmdir(path)  # refused where somebody else has put something


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _make(root: Path) -> None:
    if not root.is_dir():
        _make(root.parent)
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        sync_directory(root.parent)
