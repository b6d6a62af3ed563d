"""Finds the newest whole checkpoint, and loads it into the objects of a program.

Rule 1: nothing is used before every file of it has its size and its digest.
Rule 2: a run never starts afresh in silence: where there are checkpoints and none is
        valid, that is an error which names each with its reason.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pathlib import Path as FilePath
from typing import cast

from atoll.checkpoint.arrays import (
    ArrayFile,
    HostArray,
    digest_of,
    parse_json,
    read_bounded,
)
from atoll.checkpoint.frameworks import (
    LEADER,
    Ranks,
    RestoreContext,
    SingleRank,
    TreePath,
    present_ranks,
    together,
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
    put_back,
)
from atoll.errors import AtollError, AtollWarning, CorruptError, NoSuchFile, UsageError

_GONE = "it is gone"
"""Said of a checkpoint that was removed after it was listed: a newer one is there."""

_LOOKS = 10


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint whose files have all been verified."""

    path: Path
    manifest: Manifest
    passed_over: tuple[tuple[Path, str], ...] = field(default=())
    """Newer ones that are not valid, each with the reason."""

    @property
    def number(self) -> int:
        """Which checkpoint of its directory this is; a higher one is newer."""
        return number_of(self.path) or 0

    @property
    def components(self) -> tuple[str, ...]:
        """What it holds."""
        return self.manifest.components

    @property
    def weights(self) -> Weights:
        """Whether the weights are here, or external: those of the run."""
        return self.manifest.weights

    @property
    def metadata(self) -> Mapping[str, Json]:
        """The values that `save(metadata=...)` was given."""
        return self.manifest.metadata


def newest(directory: str | Path) -> Found | None:
    """Return the newest valid checkpoint of a directory; None if it has none at all.

    `directory` may also be one checkpoint of it. Warns of what it passes over. Only
    this process looks: ranks that load together use `load`.

    Raises:
        CorruptError: there are checkpoints, and none is valid.
    """
    return find(Path(directory), SingleRank())


def find(directory: Path, ranks: Ranks) -> Found | None:
    """Do what `newest` does on all ranks, each of which verifies its share."""
    for _ in range(_LOOKS):
        listed = together(ranks, lambda: _listed(directory) if _leads(ranks) else "")
        names = json.loads(listed[LEADER])
        passed: list[tuple[Path, str]] = []
        for name in names:
            path = Path(name)
            reasons = [why for why in ranks.gather(_reason(path, ranks)) if why]
            if not reasons:
                _warn(passed, ranks)
                manifest = read_manifest(path)
                return Found(path=path, manifest=manifest, passed_over=tuple(passed))
            if _GONE not in reasons:
                passed.append((path, reasons[0]))
        if passed:
            raise CorruptError(
                f"None of the checkpoints is valid: {_told(passed)}. Repair one, or "
                "move them away to start afresh."
            )
        if not names:
            return None
    raise CorruptError(
        f"The checkpoints of {directory} are removed faster than they can be read. "
        "Have whoever saves there keep more of them."
    )


def verify(path: Path, *, rank: int = LEADER, size: int = 1) -> Manifest:
    """Return the manifest of a checkpoint after its files have been verified.

    Of several ranks each reads its share; sizes are seen by all.

    Raises:
        CorruptError: it is not whole, and why.
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


def _reason(path: Path, ranks: Ranks) -> str:
    try:
        verify(path, rank=ranks.rank, size=ranks.size)
    except CorruptError as exc:
        return str(exc) if path.is_dir() else _GONE
    return ""


def _listed(directory: Path) -> str:
    if number_of(directory) is not None:
        if not directory.is_dir():
            raise NoSuchFile(f"{directory} is not there. Name another checkpoint.")
        return json.dumps([str(directory)])
    return json.dumps([str(path) for path in finished(directory)])


def _leads(ranks: Ranks) -> bool:
    return ranks.rank == LEADER


def _warn(passed: list[tuple[Path, str]], ranks: Ranks) -> None:
    if passed and _leads(ranks):
        text = f"Passed over, not valid: {_told(passed)}."
        warnings.warn(text, AtollWarning, stacklevel=4)


def _told(passed: list[tuple[Path, str]]) -> str:
    return "; ".join(f"{path}: {why}" for path, why in passed)


@dataclass(frozen=True, kw_only=True)
class Loaded(Found):
    """A checkpoint that has been put back."""

    restored: tuple[str, ...] = ()
    """The components whose objects have its state now."""

    fresh: tuple[str, ...] = ()
    """Components that were given and chosen, and that it does not hold."""


def load(
    directory: str | Path,
    objects: Objects,
    *,
    components: Iterable[str] | None = None,
) -> Loaded | None:
    """Restore the newest valid checkpoint into `objects`; None if there is none at all.

    In a distributed world every rank calls it. On an error objects may be restored in
    part: load again, or build them anew.

    Args:
        directory: where checkpoints are saved, or one checkpoint of it.
        objects: by component, what was given to `save`.
        components: what to restore; None means all that is there.

    Raises:
        UsageError: a component is not known, the objects do not fit, or weights are
            asked of a checkpoint whose weights are external.
        CorruptError: there are checkpoints, and none is valid.
    """
    check_names(objects)
    chosen = chosen_components(components)
    ranks = present_ranks() or SingleRank()
    for _ in range(_LOOKS):
        found = find(Path(directory), ranks)
        if found is None:
            return None
        try:
            return restore(found, objects, chosen, ranks)
        except AtollError:
            # Whoever saves there may have removed it meanwhile: there is a newer one.
            is_here = found.path.is_dir()
            if "gone" not in ranks.gather("" if is_here else "gone"):
                raise
    raise CorruptError(
        f"The checkpoints of {directory} are removed faster than they can be read. "
        "Have whoever saves there keep more of them."
    )


def restore(
    found: Found, objects: Objects, chosen: tuple[str, ...], ranks: Ranks
) -> Loaded:
    """Put the chosen components of a checkpoint into their objects."""
    given = with_random(objects)
    wanted = [name for name in chosen if name in given]
    if MODEL in wanted and found.weights == "external":
        raise UsageError(
            f"{found.path} has no weights: they are marked as external. Get them from "
            "the run they belong to, and leave 'model' out of components."
        )
    restored = tuple(name for name in wanted if name in found.components)
    together(ranks, lambda: _put_all_back(found, given, restored, ranks))
    return Loaded(
        path=found.path,
        manifest=found.manifest,
        passed_over=found.passed_over,
        restored=restored,
        fresh=tuple(name for name in wanted if name not in found.components),
    )


def read(found: Found, component: str, ranks: Ranks) -> object:
    """Return the state of a component, as this rank saved it; None if it is absent."""
    if component not in found.components:
        return None
    parts = ComponentReader(found.path, found.manifest, component, rank=ranks.rank)
    if found.manifest.num_ranks != ranks.size:
        parts.require_alike(ranks.size)
    return decoded(parts.tree(), (component,), RestoreContext(parts, lambda path: None))


def with_random(objects: Objects) -> dict[str, object]:
    """Return the objects with the random states that every process has."""
    given = objects.get(RNG)
    process: dict[str, object] = {"process": ProcessRandom()}
    return {**objects, RNG: process if given is None else {**process, "given": given}}


def _put_all_back(
    found: Found, objects: Objects, names: tuple[str, ...], ranks: Ranks
) -> str:
    for name in names:
        parts = ComponentReader(found.path, found.manifest, name, rank=ranks.rank)
        if found.manifest.num_ranks != ranks.size:
            parts.require_alike(ranks.size)
        put_back(objects[name], parts.tree(), (name,), parts, objects)
    return ""


OWN = "own"
"""In the body of a face's tag: what differs between ranks that hold one whole."""


class ComponentReader:
    """One component of a verified checkpoint. Implements `Source`."""

    def __init__(
        self, path: FilePath, manifest: Manifest, component: str, *, rank: int
    ) -> None:
        self._path = path
        self._manifest = manifest
        self._component = component
        self._rank = rank
        self._trees: dict[int, Json] = {}
        self._levels: dict[tuple[int, TreePath], dict[object, Json]] = {}
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

    def elsewhere(self, path: TreePath) -> dict[int, object]:
        return {rank: self._at(rank, path) for rank in self._ranks()}

    def require_alike(self, num_ranks: int) -> None:
        """Return if any number of ranks can restore what is the same on all of these.

        Raises:
            UsageError: the component differs between the ranks that wrote it.
        """
        first, *others = self._ranks()
        own: set[str] = set()
        tree = _without_own(self.tree(first), own)
        for rank in others:
            if _without_own(self.tree(rank), own) != tree:
                self._refuse(num_ranks, f"rank {rank} holds another than rank {first}")
            for name in self._names(first) - own:
                ours, theirs = self.read(name, first), self.read(name, rank)
                if ours.flat().tobytes() != theirs.flat().tobytes():
                    self._refuse(num_ranks, f"rank {rank} has another {name}")

    def _refuse(self, num_ranks: int, why: str) -> None:
        saved = self._manifest.num_ranks
        raise UsageError(
            f"{self._component} was saved by {saved} ranks and is not the same on all "
            f"({why}), so {num_ranks} cannot restore it. Start {saved} ranks, or leave "
            f"{self._component} out of components."
        )

    def _ranks(self) -> Iterator[int]:
        single = self._manifest.is_replicated(self._component)
        return iter(range(1 if single else self._manifest.num_ranks))

    def _names(self, rank: int) -> set[str]:
        name = arrays_name(self._component, rank)
        return self._file(rank).names() if name in self._manifest.files else set()

    def _at(self, rank: int, path: TreePath) -> Json:
        if len(path) == 1:  # it names the component
            return self.tree(rank)
        above = (rank, path[:-1])
        if above not in self._levels:  # asked for once per tensor, and large
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


def _without_own(value: Json, own: set[str]) -> Json:
    """Return a tree without what differs by rank; add the arrays of that to `own`."""
    if isinstance(value, list):
        return [_without_own(each, own) for each in value]
    if not isinstance(value, dict):
        return value
    body = next(iter(value.values())) if len(value) == 1 else None
    tag = next(iter(value)) if len(value) == 1 else ""
    if tag.startswith("!") and "." in tag and isinstance(body, dict) and OWN in body:
        mine = body[OWN]
        if isinstance(mine, dict) and isinstance(mine.get("array"), str):
            own.add(str(mine["array"]))
        return {tag: {key: each for key, each in body.items() if key != OWN}}
    return {key: _without_own(each, own) for key, each in value.items()}
