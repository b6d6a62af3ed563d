"""Saves checkpoints: copies the state while the step waits, then writes in background.

Rule 1: a call of `save` raises the error of the call before it, on every rank.
Rule 2: one checkpoint is written at a time. Meanwhile no other is begun, and no step
        waits for it.
Rule 3: ranks communicate only inside calls, never from the background thread.

`WriteJob` writes one checkpoint in a thread: every rank its part, then the leader the
manifest. A snapshot is taken at one moment: trees as text, arrays as a copy. A training
step waits for the copy. Its memory is used again: fresh memory costs several copies.
Rule 4: a rank reports in its own file that its part is durable, or that it failed.
Rule 5: the leader writes the manifest when all ranks have reported, and renames last.
Rule 6: in the thread, ranks communicate only through the directory, so that it can run
        beside the collectives of the training.

`Policy` holds when an island saves by itself, the directory, and the components.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
from blake3 import blake3

from atoll.checkpoint import frameworks, manifest
from atoll.checkpoint.arrays import (
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
from atoll.checkpoint.loader import Found, Loaded, find, read, restore, with_random
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
from atoll.checkpoint.tree import (
    Encoder,
    Json,
    Objects,
    check_component,
    is_replicated,
    state_of,
)
from atoll.disk import TEMPORARY, Data, sync_directory
from atoll.disk.base import translated
from atoll.disk.system import write_whole
from atoll.errors import AtollError, RemoteError, UsageError
from atoll.runtime import Clock, SystemClock
from atoll.safetensors import MAX_ARRAYS

MAX_METADATA_BYTES = 2**16


def save(
    directory: str | Path,
    objects: Objects,
    *,
    components: Iterable[str] | None = None,
    metadata: Mapping[str, Json] | None = None,
    keep: int = 3,
) -> Path:
    """Save a checkpoint, and return its directory when it is durable.

    In a distributed world every rank calls it, with the same arguments. On an error
    there is no such checkpoint, and saving again is safe.

    Args:
        directory: the directory of the checkpoints of one island.
        objects: by component, an object with `state_dict` and `load_state_dict`, or
            dicts and lists of them and of plain values. `rng` is added by itself.
        components: the components to save; None means all. Without "model" the
            checkpoint is marked as one whose weights are external.
        metadata: values to keep with the checkpoint, such as {"round": 3}; `load`
            returns them.
        keep: the number of newest checkpoints to keep.

    Raises:
        UsageError: a component is not known, `model` is chosen and not given, or a
            state holds a value that cannot be represented.
    """
    with Saver(directory, objects, components=components, keep=keep) as saver:
        saver.save_and_wait(metadata=metadata)
        path = saver.wait()
    assert path is not None
    return path


class Saver:
    """Saves the same objects repeatedly, in the background of their training.

    Every rank makes one and calls the same methods. As a context manager it waits at
    the end until the last checkpoint is durable. `ranks` are the processes that save
    together; None means all of the distributed world, if there is one.
    """

    def __init__(
        self,
        directory: str | Path,
        objects: Objects,
        *,
        components: Iterable[str] | None = None,
        keep: int = 3,
        ranks: frameworks.Ranks | None = None,
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep} would keep nothing. Keep at least 1.")
        manifest.check_names(objects)
        self.directory = Path(directory)
        self.components = manifest.chosen_components(components)
        self._caller_objects, self._objects = objects, with_random(objects)
        self._produced = _produced(self.components, self._objects)
        self._keep = keep
        self._ranks: frameworks.Ranks = (
            ranks or frameworks.present_ranks() or frameworks.SingleRank()
        )
        self._background = BackgroundWriter()
        self._arenas = (Arena(), Arena())
        self._lock: int | None = None
        self._pending: _PendingCheckpoint | None = None
        self._newest: Found | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            # Other ranks may have ended: only this rank's part is finished.
            self._pending = None
            self._background.abandon()
            self._give_up_lock()

    def add(self, component: str, value: object) -> None:
        """Save one more object from the next checkpoint on. Every rank calls it.

        Raises:
            UsageError: the component has an object already.
        """
        if component in self._caller_objects:
            raise UsageError(f"{component} is saved already. Give it once.")
        objects = {**self._caller_objects, component: value}
        manifest.check_names(objects)
        self._caller_objects, self._objects = objects, with_random(objects)
        self._produced = _produced(self.components, self._objects)

    def find(self) -> Found | None:
        """Return the newest valid checkpoint, or None; nothing is restored."""
        self._newest = find(self.directory, self._ranks)
        return self._newest

    def restore(self, *, components: Iterable[str] | None = None) -> Loaded | None:
        """Restore the newest valid checkpoint into the objects; None if there is none.

        `components` are those to restore; None means those that are saved.
        """
        chosen = manifest.chosen_components(components, default=self.components)
        checkpoint = self._newest or self.find()
        if checkpoint is None:
            return None
        return restore(checkpoint, self._caller_objects, chosen, self._ranks)

    def read(self, component: str) -> object:
        """Return a component's state of the newest checkpoint; None if it has none."""
        manifest.check_names([component])
        checkpoint = self._newest or self.find()
        return None if checkpoint is None else read(checkpoint, component, self._ranks)

    def save(
        self, metadata: Mapping[str, Json] | None = None, *, late: Iterable[str] = ()
    ) -> bool:
        """Copy the state, start to write it in the background, and return True.

        Return False if a rank still writes the last checkpoint: nothing was copied.
        Call again later.

        Args:
            metadata: values to keep with the checkpoint.
            late: components that `finish` copies: a scheduler steps after an optimizer.

        Raises:
            AtollError: the last save has failed, or this copy.
        """
        return self._begin(metadata, tuple(manifest.check_names(late)), is_copied=True)

    def save_and_wait(self, metadata: Mapping[str, Json] | None = None) -> None:
        """Save, and wait until it is durable. The state is not copied."""
        self.wait()
        self._begin(metadata, (), is_copied=False)
        self.wait()

    def finish(self) -> None:
        """Copy the late components of a pending checkpoint, and start to write it."""
        if self._pending is None:
            return
        writing, drafts, late = self._pending
        self._pending = None
        late_drafts: list[CheckpointDraft] = []

        def act() -> str:
            late_drafts.extend(self._arenas[1].copy(self._encode(late)))
            return ""

        frameworks.together(self._ranks, act)
        self._background.start(writing, drafts + late_drafts)

    def wait(self) -> Path | None:
        """Return the newest checkpoint written here, when it is durable.

        Raises:
            AtollError: it could not be written.
        """
        self.finish()
        paths = frameworks.together(self._ranks, self._background.outcome)
        return Path(paths[frameworks.LEADER]) if paths[frameworks.LEADER] else None

    def close(self) -> None:
        """Wait until the last checkpoint is durable, and unlock the directory."""
        try:
            self.wait()
        finally:
            self._give_up_lock()

    def _begin(
        self,
        metadata: Mapping[str, Json] | None,
        late: tuple[str, ...],
        *,
        is_copied: bool,
    ) -> bool:
        self.finish()
        checked = _checked_metadata(metadata)
        if BUSY in frameworks.together(self._ranks, self._background.status):
            return False
        replies = frameworks.together(self._ranks, self._open)
        self._newest = None  # this checkpoint will be the newest
        if len({reply.partition("|")[2] for reply in replies}) > 1:
            raise UsageError(
                f"The ranks save different components: {sorted(set(replies))}."
            )
        writing = WriteJob(
            unfinished=Path(replies[frameworks.LEADER].partition("|")[0]),
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            metadata=checked,
            keep=self._keep,
            components=self._produced,
        )
        now = tuple(name for name in self._produced if name not in late)
        drafts = self._encode_together(writing, now, is_copied=is_copied)
        self._pending = (writing, drafts, tuple(n for n in self._produced if n in late))
        if not late:
            self._pending = None
            self._background.start(writing, drafts)
        return True

    def _open(self) -> str:
        """Make a directory, on the leader; return its path and the components."""
        names = ",".join(self._produced)
        if self._ranks.rank != frameworks.LEADER:
            return f"|{names}"
        if self._lock is None:
            self._lock = manifest.lock_directory(self.directory)
        manifest.sweep(self.directory)  # files of the last checkpoint, if it failed
        path = manifest.begin(self.directory, manifest.next_number(self.directory))
        return f"{path.resolve()}|{names}"

    def _encode_together(
        self, writing: WriteJob, names: tuple[str, ...], *, is_copied: bool
    ) -> list[CheckpointDraft]:
        drafts: list[CheckpointDraft] = []

        def act() -> str:
            if not writing.unfinished.is_dir():
                raise UsageError(
                    f"Rank {self._ranks.rank} does not see {writing.unfinished}, which "
                    "rank 0 has made. Save to a file system that all ranks share."
                )
            rank_drafts = self._encode(names)
            drafts.extend(
                self._arenas[0].copy(rank_drafts) if is_copied else rank_drafts
            )
            return ""

        try:
            frameworks.together(self._ranks, act)
        except BaseException:
            if self._ranks.rank == frameworks.LEADER:
                manifest.sweep(self.directory)
            raise
        return drafts

    def _encode(self, names: tuple[str, ...]) -> list[CheckpointDraft]:
        return encode_components(
            names, self._objects, is_leader=self._ranks.rank == frameworks.LEADER
        )

    def _give_up_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _produced(chosen: tuple[str, ...], objects: Objects) -> tuple[str, ...]:
    """Return the chosen components that there are objects for."""
    if manifest.MODEL in chosen and manifest.MODEL not in objects:
        raise UsageError(
            "No model was given, so the checkpoint would lack its weights. Give one, "
            "or leave 'model' out of components, which marks the weights as external."
        )
    produced = tuple(name for name in chosen if name in objects)
    for name in produced:
        check_component(name, objects[name], objects)
    return produced


def _checked_metadata(metadata: Mapping[str, Json] | None) -> Mapping[str, Json]:
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise UsageError(
            f"metadata={metadata!r} must be made of strings, finite numbers, lists and "
            f"dicts: {exc}."
        ) from exc
    if len(text) > MAX_METADATA_BYTES:
        raise UsageError(
            f"metadata= is {len(text)} bytes of JSON, above the limit of "
            f"{MAX_METADATA_BYTES}. Save larger values as 'trainer'."
        )
    copy: Mapping[str, Json] = json.loads(text)
    return copy


@dataclass(frozen=True)
class Policy:
    """When and where `join(..., checkpoint=...)` saves, and which components.

    Raises:
        UsageError: a component is not known, or a number is out of range.
    """

    directory: str | os.PathLike[str]
    """The directory of the checkpoints; every island needs its own."""

    every_rounds: int = 10
    """Number of rounds from one checkpoint to the next."""

    components: Iterable[str] | None = None
    """The components to save. None: all except `model`, which the run owns, and except
    `data` when the run owns the order of the data."""

    extra: Mapping[str, object] = field(default_factory=dict)
    """Objects to save that `join` does not know: {"scheduler": s, "data": loader}."""

    keep: int = 3
    """The number of newest checkpoints to keep."""

    def __post_init__(self) -> None:
        if self.components is not None:
            chosen = manifest.chosen_components(self.components)
            object.__setattr__(self, "components", chosen)
        manifest.check_names(self.extra)
        if self.every_rounds < 1 or self.keep < 1:
            raise UsageError(
                f"every_rounds={self.every_rounds} and keep={self.keep} must be at "
                "least 1."
            )

    def chosen(self, default: Iterable[str] = manifest.COMPONENTS) -> tuple[str, ...]:
        """Return the components to save; `default` if `components` is None."""
        return manifest.chosen_components(self.components, default=default)

    def is_due(self, round: int, saved: int | None) -> bool:
        """Whether to save after `round`; `saved` is the last checkpoint's round."""
        return round - (saved or 0) >= self.every_rounds

    def saver(
        self,
        objects: Objects,
        *,
        default: Iterable[str] = manifest.COMPONENTS,
        ranks: frameworks.Ranks | None = None,
    ) -> Saver:
        """Return a saver of these objects and those of `extra`.

        Raises:
            UsageError: `extra` has a component that the island saves itself.
        """
        duplicates = sorted(objects.keys() & self.extra.keys())
        if duplicates:
            raise UsageError(
                f"extra= has {', '.join(duplicates)}, which the island saves by "
                "itself. Leave it out."
            )
        all_objects = {**objects, **self.extra}
        components = self.chosen(default)
        return Saver(
            Path(self.directory),
            all_objects,
            components=components,
            keep=self.keep,
            ranks=ranks,
        )


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


_PendingCheckpoint: TypeAlias = tuple[WriteJob, list[CheckpointDraft], tuple[str, ...]]
"""A checkpoint whose late components are not copied yet, with their names."""
