"""Putting a checkpoint back into the objects of a program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from atoll.checkpoint.components import MODEL, RNG, check_names, chosen_components
from atoll.checkpoint.discovery import Found, find
from atoll.checkpoint.faces import Held, present_ranks
from atoll.checkpoint.parts import Parts
from atoll.checkpoint.random_states import ProcessRandom
from atoll.checkpoint.ranks import Alone, Ranks, together
from atoll.checkpoint.states import Objects, decoded, put_back
from atoll.errors import AtollError, CorruptError, UsageError

_LOOKS = 10


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
    ranks = present_ranks() or Alone()
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
    parts = Parts(found.path, found.manifest, component, rank=ranks.rank)
    if found.manifest.num_ranks != ranks.size:
        parts.require_alike(ranks.size)
    return decoded(parts.tree(), (component,), Held(parts, lambda path: None))


def with_random(objects: Objects) -> dict[str, object]:
    """Return the objects with the random states that every process has."""
    given = objects.get(RNG)
    process: dict[str, object] = {"process": ProcessRandom()}
    return {**objects, RNG: process if given is None else {**process, "given": given}}


def _put_all_back(
    found: Found, objects: Objects, names: tuple[str, ...], ranks: Ranks
) -> str:
    for name in names:
        parts = Parts(found.path, found.manifest, name, rank=ranks.rank)
        if found.manifest.num_ranks != ranks.size:
            parts.require_alike(ranks.size)
        put_back(objects[name], parts.tree(), (name,), parts, objects)
    return ""
