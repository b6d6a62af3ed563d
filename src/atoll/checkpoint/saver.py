"""Saves checkpoints: copies the state while the step waits, then writes in background.

Rule 1: a call of `save` raises the error of the call before it, on every rank.
Rule 2: one checkpoint is written at a time. Meanwhile no other is begun, and no step
        waits for it.
Rule 3: ranks communicate only inside calls, never from the background thread.

`Policy` holds when an island saves by itself, the directory, and the components.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from atoll.checkpoint import frameworks, manifest
from atoll.checkpoint.loader import Found, Loaded, find, read, restore, with_random
from atoll.checkpoint.tree import Json, Objects, check_component
from atoll.checkpoint.writer import (
    BUSY,
    Arena,
    BackgroundWriter,
    CheckpointDraft,
    WriteJob,
    encode_components,
)
from atoll.errors import UsageError

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


_PendingCheckpoint: TypeAlias = tuple[WriteJob, list[CheckpointDraft], tuple[str, ...]]
"""A checkpoint whose late components are not copied yet, with their names."""


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
