"""Writes one checkpoint in a thread: every rank its part, then the leader the manifest.

A snapshot is taken at one moment: trees as text, arrays as a copy. A training step
waits for the copy. Its memory is kept and used again, because memory that was never
touched costs several times the copy itself.

Rule 1: a rank reports in its own file that its part is durable, or that it failed.
Rule 2: the leader writes the manifest when all ranks have reported, and renames last.
Rule 3: ranks communicate here only through the directory, so that the thread can run
        beside the collectives of the training.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from atoll.checkpoint.arrays import (
    MAX_ARRAYS,
    MAX_JSON_BYTES,
    Bytes,
    CheckpointArray,
    HostArray,
    array_file_parts,
    parse_json,
    read_bounded,
    size_bytes,
)
from atoll.checkpoint.frameworks import LEADER
from atoll.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    FileEntry,
    Manifest,
    arrays_name,
    commit,
    done_name,
    dump_manifest,
    parse_files,
    retain,
    tree_name,
)
from atoll.checkpoint.tree import Encoder, Json, Objects, is_replicated, state_of
from atoll.clock import Clock, SystemClock
from atoll.disk import TEMPORARY, Data, sync_directory
from atoll.disk.base import translated
from atoll.disk.system import write_whole
from atoll.errors import AtollError, RemoteError, UsageError

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class CheckpointDraft:
    """One component of one rank, ready to be written."""

    component: str
    tree: bytes
    arrays: Mapping[str, CheckpointArray]


class Arena:
    """A host buffer that is reused for one snapshot after the other."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def copy(self, drafts: list[CheckpointDraft]) -> list[CheckpointDraft]:
        """Return the drafts with their arrays copied into the buffer."""
        needed = sum(
            _room(array) for draft in drafts for array in draft.arrays.values()
        )
        if needed > len(self._memory):
            self._memory = np.empty(
                0, np.uint8
            )  # freed before the new one is allocated
            self._memory = np.empty(needed, np.uint8)
        first = 0
        copies = []
        for draft in drafts:
            arrays: dict[str, CheckpointArray] = {}
            for name, array in draft.arrays.items():
                size = size_bytes(array.kind, array.shape)
                into = self._memory[first : first + size]
                array.copy_to(into)
                arrays[name] = HostArray(into, array.kind, array.shape, array.offset)
                first += _room(array)
            copies.append(CheckpointDraft(draft.component, draft.tree, arrays))
        return copies


def encode_components(
    names: Iterable[str], objects: Objects, *, is_leader: bool
) -> list[CheckpointDraft]:
    """Return the drafts of some components. Their arrays are not copied.

    The leader writes the components that are equal on all ranks.

    Raises:
        UsageError: a state cannot be represented; the message names its path.
    """
    drafts = []
    for name in names:
        value = objects[name]
        if not is_leader and is_replicated(value, objects):
            continue
        encoder = Encoder()
        tree = encoder.encode(state_of(value, objects), (name,))
        text = json.dumps({"tree": tree}, separators=(",", ":"), allow_nan=False)
        drafts.append(
            _require_readable(CheckpointDraft(name, text.encode(), encoder.arrays))
        )
    return drafts


def _require_readable(draft: CheckpointDraft) -> CheckpointDraft:
    """Return the draft if it is within the limits of the reader."""
    if len(draft.tree) > MAX_JSON_BYTES or len(draft.arrays) > MAX_ARRAYS:
        raise UsageError(
            f"The state of {draft.component} is {len(draft.tree)} bytes of JSON and "
            f"{len(draft.arrays)} arrays; at most {MAX_JSON_BYTES} and {MAX_ARRAYS} "
            "can be read again. Keep large values in few arrays."
        )
    return draft


def _room(array: CheckpointArray) -> int:
    size = size_bytes(array.kind, array.shape)
    return size + -size % _ALIGNMENT_BYTES


PATIENCE_S = 600.0
"""How long the leader waits for the slowest rank's disk before it gives up."""

_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    """A checkpoint that is being written, on one rank."""

    unfinished: Path
    rank: int
    num_ranks: int
    metadata: Mapping[str, Json]
    keep: int
    components: tuple[str, ...]
    """All components of the checkpoint."""


def write_part(writing: WriteJob, drafts: Iterable[CheckpointDraft]) -> None:
    """Make this rank's files durable, and report that, or the error, to the leader."""
    try:
        files = {}
        for draft in drafts:
            files.update(_write_draft(writing, draft))
        sync_with(writing.unfinished)
        report: object = {"files": {k: _entry(v) for k, v in files.items()}}
    except BaseException as exc:
        with suppress(AtollError, OSError):
            _report(writing, {"error": f"{type(exc).__name__}: {exc}"[:2000]})
        raise
    _report(writing, report)


def finish(writing: WriteJob, clock: Clock, stop: threading.Event) -> Path:
    """Make the checkpoint complete when all ranks have written their parts.

    Only the leader calls it. On an error the files stay unfinished, and are removed
    before the next checkpoint.

    Raises:
        RemoteError: a rank has failed, or has not reported in `PATIENCE_S`.
    """
    files: dict[str, FileEntry] = {}
    for rank in range(writing.num_ranks):
        files.update(_part_of(writing, rank, clock, stop))
    for rank in range(writing.num_ranks):
        os.unlink(writing.unfinished / done_name(rank))
    manifest = Manifest(
        num_ranks=writing.num_ranks,
        components=writing.components,
        weights="here" if MODEL in writing.components else "external",
        files=files,
        metadata=writing.metadata,
    )
    path = writing.unfinished / MANIFEST
    with translated(path):
        write_whole(path, [dump_manifest(manifest)])
    final = commit(writing.unfinished)
    retain(final.parent, writing.keep, final)
    return final


def sync_with(directory: Path) -> None:
    """Return when the names in a directory are durable."""
    with translated(directory):
        sync_directory(directory)


def _write_draft(writing: WriteJob, draft: CheckpointDraft) -> dict[str, FileEntry]:
    name = tree_name(draft.component, writing.rank)
    files = {name: _write(writing.unfinished / name, [draft.tree])}
    if draft.arrays:
        name = arrays_name(draft.component, writing.rank)
        parts = array_file_parts(draft.arrays)
        files[name] = _write(writing.unfinished / name, parts)
    return files


def _write(path: Path, parts: Iterable[Data]) -> FileEntry:
    hasher = blake3()

    def seen() -> Iterator[Data]:
        for part in parts:
            hasher.update(part)
            yield part

    with translated(path):
        size = write_whole(path, seen())
    return FileEntry(size, hasher.hexdigest())


def _report(writing: WriteJob, report: object) -> None:
    path = writing.unfinished / done_name(writing.rank)
    unseen = path.with_name(path.name + TEMPORARY)
    with translated(path):
        write_whole(unseen, [json.dumps(report).encode()])
        os.rename(unseen, path)  # the leader never reads a partial report
        sync_directory(path.parent)


def _part_of(
    writing: WriteJob, rank: int, clock: Clock, stop: threading.Event
) -> dict[str, FileEntry]:
    path = writing.unfinished / done_name(rank)
    until_s = clock.now_s() + PATIENCE_S
    while path.name not in os.listdir(writing.unfinished):
        if clock.now_s() > until_s or stop.is_set():
            raise RemoteError(
                f"Rank {rank} has not written its part of {writing.unfinished} in "
                f"{PATIENCE_S:.0f} s. All ranks must see the same file system."
            )
        stop.wait(_LOOK_EVERY_S)
    report = parse_json(read_bounded(path), path)
    assert isinstance(report, dict)
    if "error" in report:
        raise RemoteError(f"Rank {rank} could not write its part: {report['error']}")
    return parse_files(report["files"])


def _entry(entry: FileEntry) -> dict[str, object]:
    return {"size_bytes": entry.size_bytes, "digest": entry.digest}


BUSY = "busy"


class BackgroundWriter:
    """Writes one checkpoint at a time. The saver is the only caller."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._newest = ""

    def start(self, writing: WriteJob, drafts: list[CheckpointDraft]) -> None:
        """Begin to write. No other checkpoint is being written."""
        self._thread = threading.Thread(
            target=self._write, args=(writing, drafts), name="atoll-checkpoint"
        )
        self._thread.start()

    def status(self) -> str:
        """Return BUSY while it writes, else as `outcome`. Raises an error once."""
        if self._thread is not None and self._thread.is_alive():
            return BUSY
        return self.outcome()

    def outcome(self) -> str:
        """Wait, and return the path of the last checkpoint. Raises an error once."""
        self.join()
        error, self._error = self._error, None
        if isinstance(error, AtollError):
            raise error
        if error is not None:
            raise RemoteError(
                f"The last checkpoint was not saved: {type(error).__name__}: {error}"
            ) from error
        return self._newest

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Wait for this rank's part only, not for the other ranks."""
        self._stop.set()
        self.join()

    def _write(self, writing: WriteJob, drafts: list[CheckpointDraft]) -> None:
        try:
            write_part(writing, drafts)
            if writing.rank == LEADER:
                path = finish(writing, SystemClock(), self._stop)
                self._newest = str(path)
        except BaseException as exc:  # the next call of `outcome` raises it
            self._error = exc
