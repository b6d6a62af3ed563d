"""The manifest of a checkpoint, and the directory that holds a run's checkpoints.

Rule 1: the manifest is written last, so a directory without one was never finished.
Rule 2: every file is listed with its size and digest, and the manifest has its own.
Rule 3: a checkpoint has its weights, or records that they are external. One that has
        neither is not valid: it could have lost them.
Rule 4: a checkpoint is written under a name that ends in "~", made durable, and then
        renamed. A checkpoint under its own name is whole.
Rule 5: a number is used once. The highest is the newest, even after an older one was
        restored.
Rule 6: only files that a manifest of ours lists are removed, and never the last valid
        checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blake3 import blake3

from atoll.checkpoint.arrays import parse_json, read_bounded
from atoll.checkpoint.tree import Json
from atoll.disk import LOCK, TEMPORARY, sync_directory
from atoll.disk.base import translated
from atoll.errors import CorruptError, UsageError
from atoll.fields import nearest

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "data", "rng", "island")
"""In the order in which they are restored: an island needs model and optimizer."""

MODEL = "model"
RNG = "rng"


def chosen_components(
    names: Iterable[str] | None, *, default: Iterable[str] = COMPONENTS
) -> tuple[str, ...]:
    """Return the chosen components in our order; None chooses the default.

    Raises:
        UsageError: a name is not one of `COMPONENTS`. A misspelt "model" must not make
            a checkpoint that has no weights.
    """
    if isinstance(names, str):
        raise UsageError(
            f"components={names!r} is a word. Write components=[{names!r}]."
        )
    wanted = set(check_names(default if names is None else names))
    return tuple(name for name in COMPONENTS if name in wanted)


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names as a tuple if each of them is one of `COMPONENTS`."""
    listed = tuple(names)
    for name in listed:
        if name not in COMPONENTS:
            raise UsageError(
                f"{name!r} is no component of a checkpoint. "
                f"Did you mean {nearest(str(name), COMPONENTS)!r}? "
                f"Known are {', '.join(COMPONENTS)}."
            )
    return listed


MANIFEST = "manifest.json"
FORMAT = "atoll-checkpoint"
VERSION = 1

MAX_MANIFEST_BYTES = 2**26
MAX_RANKS = 2**16

Weights = Literal["here", "external"]

_FILE = re.compile(rf"({'|'.join(COMPONENTS)})-([0-9]{{5}})\.(json|safetensors)")
_DONE = re.compile(r"done-[0-9]{5}\.json~?")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint."""

    num_ranks: int
    """The number of processes that wrote it together."""

    components: tuple[str, ...]
    """The components that were saved."""

    weights: Weights
    """Whether the weights are in it, or external, in the run. Always explicit."""

    files: Mapping[str, FileEntry]
    """By name: a tree per component and rank, and its arrays if it has any."""

    metadata: Mapping[str, Json] = field(default_factory=dict)
    """Values of the caller of `save`, such as a round or a number of inner steps."""

    def part_of(self, component: str, rank: int) -> int:
        """Return the rank whose part of a component a rank restores: its own or 0's."""
        name = tree_name(component, rank)
        return rank if name in self.files else 0

    def is_replicated(self, component: str) -> bool:
        """Whether one rank wrote a component for all of them."""
        return self.num_ranks > 1 and tree_name(component, 1) not in self.files


def tree_name(component: str, rank: int) -> str:
    """Return the name of the file with a component's tree of a rank."""
    return f"{component}-{rank:05d}.json"


def arrays_name(component: str, rank: int) -> str:
    """Return the name of the file with a component's arrays of a rank."""
    return f"{component}-{rank:05d}.safetensors"


def done_name(rank: int) -> str:
    """Return the name of the file in which a rank reports that its part is written."""
    return f"done-{rank:05d}.json"


def is_our_file(name: str) -> bool:
    """Return whether a checkpoint may have a file of that name."""
    return name == MANIFEST or bool(_FILE.fullmatch(name) or _DONE.fullmatch(name))


def dump_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as it is written."""
    body: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "num_ranks": manifest.num_ranks,
        "components": list(manifest.components),
        "weights": manifest.weights,
        "at": manifest.metadata,
        "files": {
            name: {"size_bytes": entry.size_bytes, "digest": entry.digest}
            for name, entry in sorted(manifest.files.items())
        },
    }
    return json.dumps({**body, "digest": _digest(body)}, indent=1).encode() + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CorruptError: there is none, it is torn, or it is inconsistent.
    """
    path = directory / MANIFEST
    body = parse_json(read_bounded(path, limit_bytes=MAX_MANIFEST_BYTES), path)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CorruptError(f"{MANIFEST} is not the manifest of a checkpoint")
    if body.get("version") != VERSION:
        raise CorruptError(
            f"{MANIFEST} has version {str(body.get('version'))[:20]}, not {VERSION}"
        )
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise CorruptError(f"{MANIFEST} does not have the digest that it states")
    manifest = _parse(body)
    _check_parts(manifest)
    return manifest


def _digest(body: Mapping[str, object]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode()).hexdigest()


def _parse(body: Mapping[str, object]) -> Manifest:
    num_ranks, weights = body.get("num_ranks"), body.get("weights")
    components, metadata = body.get("components"), body.get("at")
    if type(num_ranks) is not int or not 1 <= num_ranks <= MAX_RANKS:
        raise CorruptError(f"{MANIFEST} lists {str(num_ranks)[:20]} ranks")
    if not isinstance(components, list) or any(c not in COMPONENTS for c in components):
        raise CorruptError(f"{MANIFEST} has components that are not known")
    if not isinstance(metadata, dict):
        raise CorruptError(f"{MANIFEST} has no 'at'")
    _check_weights(MODEL in components, weights)
    return Manifest(
        num_ranks=num_ranks,
        components=tuple(c for c in COMPONENTS if c in components),
        weights="here" if weights == "here" else "external",
        files=parse_files(body.get("files")),
        metadata=metadata,
    )


def _check_weights(has_model: bool, weights: object) -> None:
    if has_model and weights != "here":
        raise CorruptError(f"{MANIFEST} has weights and marks them {str(weights)[:20]}")
    if not has_model and weights != "external":
        raise CorruptError(
            f"{MANIFEST} has no weights and is not marked as one whose weights are "
            "external"
        )


def parse_files(files: object) -> dict[str, FileEntry]:
    """Return the files that a manifest, or a rank, lists."""
    if not isinstance(files, dict):
        raise CorruptError(f"{MANIFEST} lists no files")
    entries = {}
    for name, entry in files.items():
        size = entry.get("size_bytes") if isinstance(entry, dict) else None
        digest = entry.get("digest") if isinstance(entry, dict) else None
        is_right = (
            _FILE.fullmatch(name) is not None
            and type(size) is int
            and size >= 0
            and isinstance(digest, str)
            and _DIGEST.fullmatch(digest) is not None
        )
        if not is_right:
            raise CorruptError(f"{MANIFEST} has a malformed entry {name[:60]!r}")
        assert isinstance(size, int)
        entries[name] = FileEntry(size, str(digest))
    return entries


def _check_parts(manifest: Manifest) -> None:
    """Require that every component has one part, or one of every rank."""
    expected = set()
    for component in manifest.components:
        is_single = manifest.is_replicated(component)
        ranks = range(1 if is_single else manifest.num_ranks)
        expected |= {tree_name(component, rank) for rank in ranks}
        for name in (tree_name(component, rank) for rank in ranks):
            if name not in manifest.files:
                raise CorruptError(f"{MANIFEST} does not list {name}")
    for name in manifest.files:
        if name.replace(".safetensors", ".json") not in expected:
            raise CorruptError(f"{MANIFEST} lists {name}, of no component that it has")


_NAME = re.compile(r"checkpoint-([0-9]{8})(~?)")
MAX_NUMBER = 10**8 - 1


def checkpoint_name(number: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"checkpoint-{number:08d}"


def number_of(path: Path) -> int | None:
    """Return the number of a finished checkpoint; None for any other name."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and not match[2] else None


def finished(root: Path) -> list[Path]:
    """Return the directories of checkpoints that were finished, the newest first."""
    with translated(root):
        if not root.is_dir():
            return []
        paths = [path for path in root.iterdir() if number_of(path) is not None]
    return sorted((path for path in paths if _is_directory(path)), reverse=True)


def next_number(root: Path) -> int:
    """Return a number above those of all checkpoints, finished or not."""
    with translated(root):
        matches = [_NAME.fullmatch(path.name) for path in root.iterdir()]
    number = max((int(match[1]) for match in matches if match), default=0) + 1
    if number > MAX_NUMBER:
        raise UsageError(f"{root} has no numbers left. Save to another directory.")
    return number


def lock_directory(root: Path) -> int:
    """Lock a directory for this process, until the returned handle is closed.

    Unfinished checkpoints of a dead process are removed.

    Raises:
        UsageError: another process holds the lock.
    """
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
            "Give every island its own directory, or stop that process first."
        ) from exc
    sweep(root)
    return handle


def begin(root: Path, number: int) -> Path:
    """Make the directory of an unfinished checkpoint. `commit` makes it durable."""
    path = root / (checkpoint_name(number) + TEMPORARY)
    with translated(path):
        path.mkdir(mode=0o700)
    return path


def commit(unfinished: Path) -> Path:
    """Rename an unfinished checkpoint, whose files are durable, to its final name."""
    path = unfinished.with_name(unfinished.name.removesuffix(TEMPORARY))
    with translated(path):
        sync_directory(unfinished)
        os.rename(unfinished, path)
        sync_directory(path.parent)
    return path


def sweep(root: Path) -> None:
    """Remove unfinished checkpoints. The caller holds the lock."""
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and match[2] and _is_directory(path):
            _remove(path, [name for name in os.listdir(path) if is_our_file(name)])


def retain(root: Path, keep: int, newest: Path) -> list[Path]:
    """Remove all but the `keep` newest complete checkpoints; return the removed ones.

    `newest` has just been written: it is valid, and stays. Incomplete checkpoints are
    not counted and not removed: they may be needed to find a fault.
    """
    complete = [newest]
    for path in finished(root):
        if path == newest:
            continue
        manifest = _manifest_if_complete(path)
        if manifest is None:
            continue
        complete.append(path)
        if len(complete) > keep:
            remove_checkpoint(path, manifest)
    return complete[keep:]


def remove_checkpoint(path: Path, manifest: Manifest) -> None:
    """Remove a checkpoint, unless a user has put other files into it.

    It is renamed first, so that a part of it is never taken for a checkpoint.
    """
    listed = {MANIFEST, *manifest.files}
    unfinished = path.with_name(path.name + TEMPORARY)
    with suppress(OSError):  # the next `retain` or `sweep` tries again
        if set(os.listdir(path)) <= listed:
            os.rename(path, unfinished)
            _remove(unfinished, sorted(listed))


def missing_from(path: Path, manifest: Manifest) -> str | None:
    """Return the first fault in the sizes of a checkpoint's files; None if none."""
    for name, entry in manifest.files.items():
        try:
            size = (path / name).lstat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry.size_bytes:
            return f"{name} has {size} bytes instead of {entry.size_bytes}"
    return None


def _manifest_if_complete(path: Path) -> Manifest | None:
    try:
        manifest = read_manifest(path)
    except CorruptError:
        return None
    return None if missing_from(path, manifest) else manifest


def _remove(path: Path, names: list[str]) -> None:
    with suppress(OSError):  # the next `sweep` tries again
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(path / name)
        os.rmdir(path)  # fails if there are other files


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _make(root: Path) -> None:
    if not root.is_dir():
        _make(root.parent)
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        sync_directory(root.parent)
