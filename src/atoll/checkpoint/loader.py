"""Finds the newest valid checkpoint, and loads it into the objects of a program.

Rule 1: a checkpoint is used only after the size and digest of every file are verified.
Rule 2: a run never starts afresh silently: if there are checkpoints and none is valid,
        an error names each with its reason.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pathlib import Path as FilePath
from typing import cast

from atoll.checkpoint import frameworks
from atoll.checkpoint.arrays import (
    ArrayFile,
    HostArray,
    digest_of,
    parse_json,
    read_bounded,
)
from atoll.checkpoint.manifest import (
    MODEL,
    RNG,
    Manifest,
    Weights,
    arrays_name,
    check_names,
    chosen_components,
    finished,
    missing_from,
    number_of,
    read_manifest,
    tree_name,
)
from atoll.checkpoint.tree import (
    Json,
    Objects,
    ProcessRandom,
    children,
    decoded,
    dotted,
    restore_component,
)
from atoll.errors import AtollError, AtollWarning, CorruptError, NoSuchFile, UsageError

_REMOVED = "it is gone"
"""The reason for a checkpoint that was removed after it was listed: there is a newer
one."""

_LOOKS = 10


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint whose files have all been verified."""

    path: Path
    manifest: Manifest
    passed_over: tuple[tuple[Path, str], ...] = field(default=())
    """Newer checkpoints that are not valid, each with the reason."""

    @property
    def number(self) -> int:
        """The checkpoint's number in its directory; the highest is the newest."""
        return number_of(self.path) or 0

    @property
    def components(self) -> tuple[str, ...]:
        """The components that it holds."""
        return self.manifest.components

    @property
    def weights(self) -> Weights:
        """Where the weights are: "here", in the checkpoint, or "external"."""
        return self.manifest.weights

    @property
    def metadata(self) -> Mapping[str, Json]:
        """The values of `save(metadata=...)`."""
        return self.manifest.metadata


def newest(directory: str | Path) -> Found | None:
    """Return the newest valid checkpoint of a directory; None if it has none at all.

    `directory` may also be a single checkpoint. Warns about checkpoints that are not
    valid. Only for one process: ranks that load together use `load`.

    Raises:
        CorruptError: there are checkpoints, and none is valid.
    """
    return find(Path(directory), frameworks.SingleRank())


def find(directory: Path, ranks: frameworks.Ranks) -> Found | None:
    """Return the newest valid checkpoint on all ranks; each verifies a share."""
    for _ in range(_LOOKS):
        listed = frameworks.together(
            ranks, lambda: _listed(directory) if _leads(ranks) else ""
        )
        names = json.loads(listed[frameworks.LEADER])
        passed: list[tuple[Path, str]] = []
        for name in names:
            path = Path(name)
            reasons = [
                reason for reason in ranks.gather(_reason(path, ranks)) if reason
            ]
            if not reasons:
                _warn(passed, ranks)
                manifest = read_manifest(path)
                return Found(path=path, manifest=manifest, passed_over=tuple(passed))
            if _REMOVED not in reasons:
                passed.append((path, reasons[0]))
        if passed:
            raise CorruptError(
                f"None of the checkpoints is valid: {_listing(passed)}. Repair one, or "
                "move them away to start afresh."
            )
        if not names:
            return None
    raise CorruptError(
        f"The checkpoints of {directory} are removed faster than they can be read. "
        "Set a higher keep= in the process that saves them."
    )


def verify(path: Path, *, rank: int = frameworks.LEADER, size: int = 1) -> Manifest:
    """Return the manifest of a checkpoint after its files have been verified.

    Each of several ranks reads a share of the files; all ranks check the sizes.

    Raises:
        CorruptError: it is not complete, with the reason.
    """
    manifest = read_manifest(path)
    missing = missing_from(path, manifest)
    if missing:
        raise CorruptError(missing)
    for name in sorted(manifest.files)[rank::size]:
        entry = manifest.files[name]
        if digest_of(path / name) != (entry.size_bytes, entry.digest):
            raise CorruptError(
                f"{name} does not have the digest that it was saved with"
            )
    return manifest


def _reason(path: Path, ranks: frameworks.Ranks) -> str:
    try:
        verify(path, rank=ranks.rank, size=ranks.size)
    except CorruptError as exc:
        return str(exc) if path.is_dir() else _REMOVED
    return ""


def _listed(directory: Path) -> str:
    if number_of(directory) is not None:
        if not directory.is_dir():
            raise NoSuchFile(f"{directory} does not exist. Name another checkpoint.")
        return json.dumps([str(directory)])
    return json.dumps([str(path) for path in finished(directory)])


def _leads(ranks: frameworks.Ranks) -> bool:
    return ranks.rank == frameworks.LEADER


def _warn(passed: list[tuple[Path, str]], ranks: frameworks.Ranks) -> None:
    if passed and _leads(ranks):
        text = f"Passed over, not valid: {_listing(passed)}."
        warnings.warn(text, AtollWarning, stacklevel=4)


def _listing(passed: list[tuple[Path, str]]) -> str:
    return "; ".join(f"{path}: {reason}" for path, reason in passed)


@dataclass(frozen=True, kw_only=True)
class Loaded(Found):
    """A checkpoint that has been restored."""

    restored: tuple[str, ...] = ()
    """The components that were restored into their objects."""

    fresh: tuple[str, ...] = ()
    """The chosen components with objects that the checkpoint does not hold."""


def load(
    directory: str | Path,
    objects: Objects,
    *,
    components: Iterable[str] | None = None,
) -> Loaded | None:
    """Restore the newest valid checkpoint into `objects`; None if there is none at all.

    In a distributed world every rank calls it. On an error objects may be restored in
    part: load again, or build them again.

    Args:
        directory: the directory of the checkpoints, or a single checkpoint.
        objects: the objects by component, as for `save`.
        components: the components to restore; None means all.

    Raises:
        UsageError: a component is not known, the objects do not match, or `model` is
            chosen and the weights of the checkpoint are external.
        CorruptError: there are checkpoints, and none is valid.
    """
    check_names(objects)
    chosen = chosen_components(components)
    ranks = frameworks.present_ranks() or frameworks.SingleRank()
    for _ in range(_LOOKS):
        checkpoint = find(Path(directory), ranks)
        if checkpoint is None:
            return None
        try:
            return restore(checkpoint, objects, chosen, ranks)
        except AtollError:
            # The saving process may have removed it meanwhile: there is a newer one.
            is_here = checkpoint.path.is_dir()
            if "gone" not in ranks.gather("" if is_here else "gone"):
                raise
    raise CorruptError(
        f"The checkpoints of {directory} are removed faster than they can be read. "
        "Set a higher keep= in the process that saves them."
    )


def restore(
    checkpoint: Found,
    objects: Objects,
    chosen: tuple[str, ...],
    ranks: frameworks.Ranks,
) -> Loaded:
    """Restore the chosen components of a checkpoint into their objects."""
    all_objects = with_random(objects)
    wanted = [name for name in chosen if name in all_objects]
    if MODEL in wanted and checkpoint.weights == "external":
        raise UsageError(
            f"{checkpoint.path} has no weights: they are marked as external. Get them "
            "from the run they belong to, and leave 'model' out of components."
        )
    restored = tuple(name for name in wanted if name in checkpoint.components)
    frameworks.together(
        ranks, lambda: _restore_all(checkpoint, all_objects, restored, ranks)
    )
    return Loaded(
        path=checkpoint.path,
        manifest=checkpoint.manifest,
        passed_over=checkpoint.passed_over,
        restored=restored,
        fresh=tuple(name for name in wanted if name not in checkpoint.components),
    )


def read(checkpoint: Found, component: str, ranks: frameworks.Ranks) -> object:
    """Return the state of a component, as this rank saved it; None if it is absent."""
    if component not in checkpoint.components:
        return None
    manifest = checkpoint.manifest
    parts = ComponentReader(checkpoint.path, manifest, component, rank=ranks.rank)
    if manifest.num_ranks != ranks.size:
        parts.require_alike(ranks.size)
    return decoded(
        parts.tree(), (component,), frameworks.RestoreContext(parts, lambda path: None)
    )


def with_random(objects: Objects) -> dict[str, object]:
    """Return the objects with the random states that every process has."""
    generators = objects.get(RNG)
    process: dict[str, object] = {"process": ProcessRandom()}
    return {
        **objects,
        RNG: process if generators is None else {**process, "given": generators},
    }


def _restore_all(
    checkpoint: Found, objects: Objects, names: tuple[str, ...], ranks: frameworks.Ranks
) -> str:
    for name in names:
        parts = ComponentReader(
            checkpoint.path, checkpoint.manifest, name, rank=ranks.rank
        )
        if checkpoint.manifest.num_ranks != ranks.size:
            parts.require_alike(ranks.size)
        restore_component(objects[name], parts.tree(), (name,), parts, objects)
    return ""


RANK_SPECIFIC = "own"
"""Key in the body of an adapter's tag: the part that differs between the ranks."""


class ComponentReader:
    """One component of a verified checkpoint. Implements `ArraySource`."""

    def __init__(
        self, path: FilePath, manifest: Manifest, component: str, *, rank: int
    ) -> None:
        self._path = path
        self._manifest = manifest
        self._component = component
        self._rank = rank
        self._trees: dict[int, Json] = {}
        self._levels: dict[tuple[int, frameworks.TreePath], dict[object, Json]] = {}
        self._files: dict[int, ArrayFile] = {}

    def tree(self, rank: int | None = None) -> Json:
        """Return the encoded tree of a rank's part, or of this rank's."""
        part = self._manifest.part_of(
            self._component, self._rank if rank is None else rank
        )
        if part not in self._trees:
            path = self._path / tree_name(self._component, part)
            body = parse_json(read_bounded(path), path)
            if not isinstance(body, dict) or body.keys() != {"tree"}:
                raise CorruptError(f"{path} is no tree of a checkpoint.")
            self._trees[part] = cast("Json", body["tree"])
        return self._trees[part]

    def read(self, name: str, rank: int | None = None) -> HostArray:
        return self._file(self._rank if rank is None else rank).read(name)

    def elsewhere(self, path: frameworks.TreePath) -> dict[int, object]:
        return {rank: self._at(rank, path) for rank in self._ranks()}

    def require_alike(self, num_ranks: int) -> None:
        """Return if the component is the same on all ranks: any number can restore it.

        Raises:
            UsageError: the component differs between the ranks that wrote it.
        """
        first, *others = self._ranks()
        rank_specific: set[str] = set()
        tree = _without_rank_specific(self.tree(first), rank_specific)
        for rank in others:
            if _without_rank_specific(self.tree(rank), rank_specific) != tree:
                self._refuse(num_ranks, f"rank {rank} holds another than rank {first}")
            for name in self._names(first) - rank_specific:
                expected, array = self.read(name, first), self.read(name, rank)
                if array.flat().tobytes() != expected.flat().tobytes():
                    self._refuse(num_ranks, f"rank {rank} has another {name}")

    def _refuse(self, num_ranks: int, reason: str) -> None:
        saved = self._manifest.num_ranks
        raise UsageError(
            f"{self._component} was saved by {saved} ranks and is not the same on all "
            f"({reason}), so {num_ranks} cannot restore it. Start {saved} ranks, or "
            f"leave {self._component} out of components."
        )

    def _ranks(self) -> Iterator[int]:
        single = self._manifest.is_replicated(self._component)
        return iter(range(1 if single else self._manifest.num_ranks))

    def _names(self, rank: int) -> set[str]:
        name = arrays_name(self._component, rank)
        return self._file(rank).names() if name in self._manifest.files else set()

    def _at(self, rank: int, path: frameworks.TreePath) -> Json:
        if len(path) == 1:  # the path of the component itself
            return self.tree(rank)
        above = (rank, path[:-1])
        if above not in self._levels:  # cached: it is large, and read once per tensor
            self._levels[above] = children(self._at(*above))
        if path[-1] not in self._levels[above]:
            raise CorruptError(f"Rank {rank} has no {dotted(path)}.")
        return self._levels[above][path[-1]]

    def _file(self, rank: int) -> ArrayFile:
        part = self._manifest.part_of(self._component, rank)
        name = arrays_name(self._component, part)
        if name not in self._manifest.files:
            raise CorruptError(f"{self._path.name} lists no {name}.")
        if part not in self._files:
            self._files[part] = ArrayFile(self._path / name)
        return self._files[part]


def _without_rank_specific(value: Json, arrays: set[str]) -> Json:
    """Return a tree without the rank-specific parts; add their arrays to `arrays`."""
    if isinstance(value, list):
        return [_without_rank_specific(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    body = next(iter(value.values())) if len(value) == 1 else None
    tag = next(iter(value)) if len(value) == 1 else ""
    is_adapters = tag.startswith("!") and "." in tag
    if is_adapters and isinstance(body, dict) and RANK_SPECIFIC in body:
        part = body[RANK_SPECIFIC]
        if isinstance(part, dict) and isinstance(part.get("array"), str):
            arrays.add(str(part["array"]))
        return {tag: {key: item for key, item in body.items() if key != RANK_SPECIFIC}}
    return {key: _without_rank_specific(item, arrays) for key, item in value.items()}
