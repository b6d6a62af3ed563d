"""Finding the newest checkpoint that is whole, and saying why others were passed over.

Rule 1: nothing is used before every file of it has its size and its digest.
Rule 2: a run never starts afresh in silence: where there are checkpoints and none is
        valid, that is an error which names each with its reason.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from atoll.checkpoint.directory import finished, missing_from, number_of
from atoll.checkpoint.manifest import Manifest, Weights, read_manifest
from atoll.checkpoint.mistrust import digest_of
from atoll.checkpoint.ranks import LEADER, Alone, Ranks, together
from atoll.checkpoint.tree import Json
from atoll.errors import AtollWarning, CorruptError, NoSuchFile

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
    def at(self) -> Mapping[str, Json]:
        """What was said of the moment when it was saved."""
        return self.manifest.at


def newest(directory: str | Path) -> Found | None:
    """Return the newest valid checkpoint of a directory; None if it has none at all.

    `directory` may also be one checkpoint of it. Warns of what it passes over. Only
    this process looks: ranks that load together use `load`.

    Raises:
        CorruptError: there are checkpoints, and none is valid.
    """
    return find(Path(directory), Alone())


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
