"""The parts of a checkpoint's component: what each rank wrote, read by one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import cast

from atoll.checkpoint.array_file import ArrayFile
from atoll.checkpoint.arrays import HostArray
from atoll.checkpoint.faces import Path
from atoll.checkpoint.manifest import Manifest, arrays_name, tree_name
from atoll.checkpoint.mistrust import parse_json, read_bounded
from atoll.checkpoint.tree import Json, children, dotted
from atoll.errors import CorruptError, UsageError

OWN = "own"
"""In the body of a face's tag: what differs between ranks that hold one whole."""


class Parts:
    """One component of a verified checkpoint. Implements `Source`."""

    def __init__(
        self, path: FilePath, manifest: Manifest, component: str, *, rank: int
    ) -> None:
        self._path = path
        self._manifest = manifest
        self._component = component
        self._rank = rank
        self._trees: dict[int, Json] = {}
        self._levels: dict[tuple[int, Path], dict[object, Json]] = {}
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

    def elsewhere(self, path: Path) -> dict[int, object]:
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

    def _at(self, rank: int, path: Path) -> Json:
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
