"""What a checkpoint says of itself: its files, its components and its weights.

Rule 1: the manifest is written last, so a directory without one was never finished.
Rule 2: every file is listed with its size and digest, and the manifest has its own.
Rule 3: a checkpoint has its weights, or says that they are external. One that has
        neither is not valid: nobody can tell it from one that lost them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from blake3 import blake3

from atoll.checkpoint.components import COMPONENTS, MODEL
from atoll.checkpoint.mistrust import parse_json, read_bounded
from atoll.checkpoint.tree import Json
from atoll.errors import CorruptError

MANIFEST = "manifest.json"
FORMAT = "atoll-checkpoint"
VERSION = 1

MAX_MANIFEST_BYTES = 2**26
MAX_RANKS = 2**16

Weights = Literal["here", "external"]

_FILE = re.compile(rf"({'|'.join(COMPONENTS)})-([0-9]{{5}})\.(json|safetensors)")
_DONE = re.compile(r"done-[0-9]{5}\.json~?")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's own account of itself."""

    num_ranks: int
    """Processes that wrote it together."""

    components: tuple[str, ...]
    """What it holds; a component that the run did not produce is not among them."""

    weights: Weights
    """Whether the weights are in it, or are the run's: the explicit marker."""

    files: Mapping[str, FileEntry]
    """By name: a tree per component and rank, and its arrays if it has any."""

    at: Mapping[str, Json] = field(default_factory=dict)
    """What the writer said of the moment: a round, a number of inner steps."""

    def part_of(self, component: str, rank: int) -> int:
        """Return the rank whose part of a component a rank restores: its own or 0's."""
        own = tree_name(component, rank)
        return rank if own in self.files else 0

    def is_replicated(self, component: str) -> bool:
        """Whether one rank wrote a component for all of them."""
        return self.num_ranks > 1 and tree_name(component, 1) not in self.files


def tree_name(component: str, rank: int) -> str:
    """Return the name of the file with a component's tree of a rank."""
    return f"{component}-{rank:05d}.json"


def arrays_name(component: str, rank: int) -> str:
    """Return the name of the file with a component's arrays of a rank."""
    return f"{component}-{rank:05d}.safetensors"


def done_name(rank: int) -> str:
    """Return the name of the file by which a rank says that its part is written."""
    return f"done-{rank:05d}.json"


def is_our_file(name: str) -> bool:
    """Whether a file of that name may be one that we write into a checkpoint."""
    return name == MANIFEST or bool(_FILE.fullmatch(name) or _DONE.fullmatch(name))


def dump_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as it is written."""
    body: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "num_ranks": manifest.num_ranks,
        "components": list(manifest.components),
        "weights": manifest.weights,
        "at": manifest.at,
        "files": {
            name: {"size_bytes": entry.size_bytes, "digest": entry.digest}
            for name, entry in sorted(manifest.files.items())
        },
    }
    return json.dumps({**body, "digest": _digest(body)}, indent=1).encode() + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CorruptError: there is none, it is torn, or it says what cannot be.
    """
    path = directory / MANIFEST
    body = parse_json(read_bounded(path, limit_bytes=MAX_MANIFEST_BYTES), path)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CorruptError(f"{MANIFEST} is not the manifest of a checkpoint")
    if body.get("version") != VERSION:
        raise CorruptError(
            f"{MANIFEST} has version {str(body.get('version'))[:20]}, not {VERSION}"
        )
    digest = body.pop("digest", None)
    if digest != _digest(body):
        raise CorruptError(f"{MANIFEST} does not have the digest that it states")
    manifest = _parse(body)
    _check_parts(manifest)
    return manifest


def _digest(body: Mapping[str, object]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode()).hexdigest()


def _parse(body: Mapping[str, object]) -> Manifest:
    num_ranks, weights = body.get("num_ranks"), body.get("weights")
    components, at = body.get("components"), body.get("at")
    if type(num_ranks) is not int or not 1 <= num_ranks <= MAX_RANKS:
        raise CorruptError(f"{MANIFEST} speaks of {str(num_ranks)[:20]} ranks")
    if not isinstance(components, list) or any(c not in COMPONENTS for c in components):
        raise CorruptError(f"{MANIFEST} has components that are not known")
    if not isinstance(at, dict):
        raise CorruptError(f"{MANIFEST} does not say at what moment it was written")
    _check_weights(MODEL in components, weights)
    return Manifest(
        num_ranks=num_ranks,
        components=tuple(c for c in COMPONENTS if c in components),
        weights="here" if weights == "here" else "external",
        files=parse_files(body.get("files")),
        at=at,
    )


def _check_weights(has_model: bool, weights: object) -> None:
    if has_model and weights != "here":
        raise CorruptError(f"{MANIFEST} has weights and marks them {str(weights)[:20]}")
    if not has_model and weights != "external":
        raise CorruptError(
            f"{MANIFEST} has no weights and is not marked as one whose weights are "
            "external"
        )


def parse_files(files: object) -> dict[str, FileEntry]:
    """Return the files that a manifest, or a rank, lists."""
    if not isinstance(files, dict):
        raise CorruptError(f"{MANIFEST} lists no files")
    found = {}
    for name, entry in files.items():
        size = entry.get("size_bytes") if isinstance(entry, dict) else None
        digest = entry.get("digest") if isinstance(entry, dict) else None
        is_right = (
            _FILE.fullmatch(name) is not None
            and type(size) is int
            and size >= 0
            and isinstance(digest, str)
            and _DIGEST.fullmatch(digest) is not None
        )
        if not is_right:
            raise CorruptError(f"{MANIFEST} lists {name[:60]!r} as no checkpoint does")
        assert isinstance(size, int)
        found[name] = FileEntry(size, str(digest))
    return found


def _check_parts(manifest: Manifest) -> None:
    """Every component has one part, or one of every rank."""
    expected = set()
    for component in manifest.components:
        is_single = manifest.is_replicated(component)
        ranks = range(1 if is_single else manifest.num_ranks)
        expected |= {tree_name(component, rank) for rank in ranks}
        for name in (tree_name(component, rank) for rank in ranks):
            if name not in manifest.files:
                raise CorruptError(f"{MANIFEST} does not list {name}")
    for name in manifest.files:
        if name.replace(".safetensors", ".json") not in expected:
            raise CorruptError(f"{MANIFEST} lists {name}, of no component that it has")
