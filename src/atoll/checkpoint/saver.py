"""Saves checkpoints: a copy while the step waits, and the writing in the background.

Rule 1: a call of `save` raises the failure of the one before it, on every rank.
Rule 2: one checkpoint is written at a time. Meanwhile another is not begun, and no step
        waits for it.
Rule 3: ranks talk to one another only inside calls, never from the background.

`Policy` is when an island saves by itself, where, and what.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from atoll.checkpoint.frameworks import (
    LEADER,
    Ranks,
    SingleRank,
    present_ranks,
    together,
)
from atoll.checkpoint.loader import Found, Loaded, find, read, restore, with_random
from atoll.checkpoint.manifest import (
    COMPONENTS,
    MODEL,
    begin,
    check_names,
    chosen_components,
    next_number,
    own,
    sweep,
)
from atoll.checkpoint.tree import Json, Objects, check_component
from atoll.checkpoint.writer import (
    BUSY,
    Arena,
    BackgroundWriter,
    CheckpointDraft,
    WriteJob,
    take,
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
        directory: where checkpoints are kept, one directory each; of one island only.
        objects: by component, an object with `state_dict` and `load_state_dict`, or
            dicts and lists of them and of plain values. `rng` comes by itself.
        components: what to save of it; None means all. Without "model" the checkpoint
            is marked as one whose weights are external.
        metadata: values to keep with the checkpoint, such as {"round": 3}; `load`
            returns them.
        keep: how many checkpoints stay.

    Raises:
        UsageError: a component is not known, there is no model though it was chosen, or
            a state holds what cannot be represented.
    """
    with Saver(directory, objects, components=components, keep=keep) as saver:
        saver.save_and_wait(metadata=metadata)
        path = saver.wait()
    assert path is not None
    return path


class Saver:
    """Saves the same objects again and again, without holding up their training.

    Every rank makes one and calls the same methods. As a context manager it waits at
    the end for what is being written. `ranks` are the processes that save together;
    None means all of the distributed world, if there is one.
    """

    def __init__(
        self,
        directory: str | Path,
        objects: Objects,
        *,
        components: Iterable[str] | None = None,
        keep: int = 3,
        ranks: Ranks | None = None,
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep} would keep nothing. Keep at least 1.")
        check_names(objects)
        self.directory = Path(directory)
        self.components = chosen_components(components)
        self._given, self._objects = objects, with_random(objects)
        self._produced = _produced(self.components, self._objects)
        self._keep = keep
        self._ranks: Ranks = ranks or present_ranks() or SingleRank()
        self._background = BackgroundWriter()
        self._arenas = (Arena(), Arena())
        self._lock: int | None = None
        self._held: tuple[WriteJob, list[CheckpointDraft], tuple[str, ...]] | None = (
            None
        )
        self._found: Found | None = None

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
            # Other ranks may be gone: only what is this rank's own is settled.
            self._held = None
            self._background.abandon()
            self._give_up_lock()

    def add(self, component: str, value: object) -> None:
        """Save one more object from the next checkpoint on; every rank says so.

        Raises:
            UsageError: the component has an object already.
        """
        if component in self._given:
            raise UsageError(f"{component} is saved already. Give it once.")
        objects = {**self._given, component: value}
        check_names(objects)
        self._given, self._objects = objects, with_random(objects)
        self._produced = _produced(self.components, self._objects)

    def find(self) -> Found | None:
        """Return the newest valid checkpoint, or None; nothing is restored."""
        self._found = find(self.directory, self._ranks)
        return self._found

    def restore(self, *, components: Iterable[str] | None = None) -> Loaded | None:
        """Put the newest valid checkpoint into the objects; None if there is none.

        `components` are what to restore; None means what is saved.
        """
        chosen = chosen_components(components, default=self.components)
        found = self._found or self.find()
        if found is None:
            return None
        return restore(found, self._given, chosen, self._ranks)

    def read(self, component: str) -> object:
        """Return a component's state of the newest checkpoint; None if it has none."""
        check_names([component])
        found = self._found or self.find()
        return None if found is None else read(found, component, self._ranks)

    def save(
        self, metadata: Mapping[str, Json] | None = None, *, late: Iterable[str] = ()
    ) -> bool:
        """Copy the state, have it written in the background, and return True.

        False when a rank still writes the last one: nothing was copied, and asking
        again after a while is right.

        Args:
            metadata: values to keep with the checkpoint.
            late: components that `finish` takes; a scheduler steps after an optimizer.

        Raises:
            AtollError: what the last save failed with, or this one's copy.
        """
        return self._begin(metadata, tuple(check_names(late)), is_copied=True)

    def save_and_wait(self, metadata: Mapping[str, Json] | None = None) -> None:
        """Save without a copy: nothing changes meanwhile, since the caller waits."""
        self.wait()
        self._begin(metadata, (), is_copied=False)
        self.wait()

    def finish(self) -> None:
        """Take what was left for late, and let the writing begin; else do nothing."""
        if self._held is None:
            return
        writing, drafts, late = self._held
        self._held = None
        taken: list[CheckpointDraft] = []

        def act() -> str:
            taken.extend(self._arenas[1].copy(self._take(late)))
            return ""

        together(self._ranks, act)
        self._background.start(writing, drafts + taken)

    def wait(self) -> Path | None:
        """Return the newest checkpoint written here, when it is durable.

        Raises:
            AtollError: what it failed with.
        """
        self.finish()
        words = together(self._ranks, self._background.outcome)
        return Path(words[LEADER]) if words[LEADER] else None

    def close(self) -> None:
        """Wait for what is being written, and give the directory up."""
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
        if BUSY in together(self._ranks, self._background.status):
            return False
        words = together(self._ranks, self._open)
        self._found = None  # the newest will be this one
        if len({word.partition("|")[2] for word in words}) > 1:
            raise UsageError(
                f"The ranks save different components: {sorted(set(words))}."
            )
        writing = WriteJob(
            unfinished=Path(words[LEADER].partition("|")[0]),
            rank=self._ranks.rank,
            num_ranks=self._ranks.size,
            metadata=checked,
            keep=self._keep,
            components=self._produced,
        )
        now = tuple(name for name in self._produced if name not in late)
        drafts = self._taken(writing, now, is_copied=is_copied)
        self._held = (writing, drafts, tuple(n for n in self._produced if n in late))
        if not late:
            self._held = None
            self._background.start(writing, drafts)
        return True

    def _open(self) -> str:
        """Make the directory, on the leader; say what is saved, on every rank."""
        names = ",".join(self._produced)
        if self._ranks.rank != LEADER:
            return f"|{names}"
        if self._lock is None:
            self._lock = own(self.directory)
        sweep(self.directory)  # what the last one left if it failed
        path = begin(self.directory, next_number(self.directory))
        return f"{path.resolve()}|{names}"

    def _taken(
        self, writing: WriteJob, names: tuple[str, ...], *, is_copied: bool
    ) -> list[CheckpointDraft]:
        drafts: list[CheckpointDraft] = []

        def act() -> str:
            if not writing.unfinished.is_dir():
                raise UsageError(
                    f"Rank {self._ranks.rank} does not see {writing.unfinished}, which "
                    "rank 0 has made. Save to a file system that all ranks share."
                )
            taken = self._take(names)
            drafts.extend(self._arenas[0].copy(taken) if is_copied else taken)
            return ""

        try:
            together(self._ranks, act)
        except BaseException:
            if self._ranks.rank == LEADER:
                sweep(self.directory)
            raise
        return drafts

    def _take(self, names: tuple[str, ...]) -> list[CheckpointDraft]:
        return take(names, self._objects, is_leader=self._ranks.rank == LEADER)

    def _give_up_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _produced(chosen: tuple[str, ...], objects: Objects) -> tuple[str, ...]:
    """Return the chosen components that there are objects for."""
    if MODEL in chosen and MODEL not in objects:
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
    found: Mapping[str, Json] = json.loads(text)
    return found


@dataclass(frozen=True)
class Policy:
    """What `join(..., checkpoint=...)` does for a plain loop.

    Raises:
        UsageError: a component is not known, or a number is out of range.
    """

    directory: str | os.PathLike[str]
    """Where checkpoints are kept; every island has a directory of its own."""

    every_rounds: int = 10
    """A checkpoint is saved when so many rounds have ended since the last one."""

    components: Iterable[str] | None = None
    """What is saved. None: all but `model`, which the run owns, and but `data` when the
    run owns the order of the data."""

    extra: Mapping[str, object] = field(default_factory=dict)
    """Objects to save that `join` does not know: {"scheduler": s, "data": loader}."""

    keep: int = 3
    """How many checkpoints stay."""

    def __post_init__(self) -> None:
        if self.components is not None:
            chosen = chosen_components(self.components)
            object.__setattr__(self, "components", chosen)
        check_names(self.extra)
        if self.every_rounds < 1 or self.keep < 1:
            raise UsageError(
                f"every_rounds={self.every_rounds} and keep={self.keep} must be at "
                "least 1."
            )

    def chosen(self, default: Iterable[str] = COMPONENTS) -> tuple[str, ...]:
        """Return what is saved, where `default` is what None stands for."""
        return chosen_components(self.components, default=default)

    def is_due(self, round: int, saved: int | None) -> bool:
        """Whether to save after `round`; `saved` is the last checkpoint's round."""
        return round - (saved or 0) >= self.every_rounds

    def saver(
        self,
        objects: Objects,
        *,
        default: Iterable[str] = COMPONENTS,
        ranks: Ranks | None = None,
    ) -> Saver:
        """Return what saves and restores these objects and those of `extra`.

        Raises:
            UsageError: `extra` has what the island saves itself.
        """
        twice = sorted(objects.keys() & self.extra.keys())
        if twice:
            raise UsageError(
                f"extra= has {', '.join(twice)}, which the island saves by itself. "
                "Leave it out."
            )
        everything = {**objects, **self.extra}
        components = self.chosen(default)
        return Saver(
            Path(self.directory),
            everything,
            components=components,
            keep=self.keep,
            ranks=ranks,
        )
