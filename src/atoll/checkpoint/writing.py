"""Writing one checkpoint: every rank its part, then the leader the manifest.

Rule 1: a rank says that its part is durable by a file of its own, or that it failed.
Rule 2: the leader writes the manifest when all ranks have said so, and renames last.
Rule 3: nothing here talks to other ranks but through the directory, so that it can run
        beside the training's own collectives.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from atoll.checkpoint.array_file import array_file_parts
from atoll.checkpoint.components import MODEL
from atoll.checkpoint.directory import commit, retain
from atoll.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    arrays_name,
    done_name,
    dump_manifest,
    parse_files,
    tree_name,
)
from atoll.checkpoint.mistrust import parse_json, read_bounded
from atoll.checkpoint.snapshot import Draft
from atoll.checkpoint.tree import Json
from atoll.clock import Clock
from atoll.disk import TEMPORARY, Data, sync_directory
from atoll.disk.failures import translated
from atoll.disk.whole import write_whole
from atoll.errors import AtollError, RemoteError

PATIENCE_S = 600.0
"""How long the leader waits for the slowest rank's disk before it gives up."""

_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Writing:
    """A checkpoint that is being written, as one rank sees it."""

    unfinished: Path
    rank: int
    num_ranks: int
    at: Mapping[str, Json]
    keep: int
    components: tuple[str, ...]
    """All that the checkpoint will hold."""


def write_part(writing: Writing, drafts: Iterable[Draft]) -> None:
    """Make this rank's files durable, and say so. On an error say that instead."""
    try:
        files = {}
        for draft in drafts:
            files.update(_write_draft(writing, draft))
        sync_with(writing.unfinished)
        word: object = {"files": {k: _entry(v) for k, v in files.items()}}
    except BaseException as exc:
        with suppress(AtollError, OSError):
            _say(writing, {"error": f"{type(exc).__name__}: {exc}"[:2000]})
        raise
    _say(writing, word)


def finish(writing: Writing, clock: Clock, stop: threading.Event) -> Path:
    """Make the checkpoint complete when all ranks have written their parts.

    Only the leader calls it. On an error what was written stays unfinished, and is
    swept before the next one.

    Raises:
        RemoteError: a rank has failed, or says nothing.
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
        at=writing.at,
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


def _write_draft(writing: Writing, draft: Draft) -> dict[str, FileEntry]:
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


def _say(writing: Writing, word: object) -> None:
    path = writing.unfinished / done_name(writing.rank)
    unseen = path.with_name(path.name + TEMPORARY)
    with translated(path):
        write_whole(unseen, [json.dumps(word).encode()])
        os.rename(unseen, path)  # the leader never sees half of a word
        sync_directory(path.parent)


def _part_of(
    writing: Writing, rank: int, clock: Clock, stop: threading.Event
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
    word = parse_json(read_bounded(path), path)
    assert isinstance(word, dict)
    if "error" in word:
        raise RemoteError(f"Rank {rank} could not write its part: {word['error']}")
    return parse_files(word["files"])


def _entry(entry: FileEntry) -> dict[str, object]:
    return {"size_bytes": entry.size_bytes, "digest": entry.digest}
