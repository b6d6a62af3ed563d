"""A run's model definition: its files, its name in the settings, and its code."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import blake3

from atoll.bundle.archive import MAX_BYTES, MAX_FILES, WEIGHTS, pack, unpack
from atoll.errors import CorruptError, UsageError
from atoll.settings import RunSettings

CONFIG, MANIFEST = "config.json", "bundle.toml"
"""Files that define the model: for `transformers`, or by a factory."""

INERT = (
    ".json",
    ".jinja",
    ".md",
    ".model",
    ".tiktoken",
    ".toml",
    ".txt",
    ".vocab",
    ".yaml",
    ".yml",
)
"""Suffixes of files that are only read. All other files count as code."""

PLAIN_NAMES = ("LICENSE", "NOTICE", "README")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_IMPLEMENTATION = re.compile(r"implementation|kernel", re.IGNORECASE)
"""Keys of a configuration whose value may name code that transformers fetches."""

PLAIN_IMPLEMENTATIONS = ("", "eager", "sdpa", "flex_attention", "grouped_mm")
"""Values of such keys that only select code of transformers and torch. The names of
flash attention are not among them: without its package they load a kernel of the hub.
"""

_REPOSITORY = re.compile(r"(?:[\w.+-]+[|:])*[\w.-]+/[\w.-]+(?:[@:][^/\s]*)?")
"""The name of a repository of the hub, with the prefixes that loaders accept."""

_ORIGINS = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys that only record the origin of a configuration."""


@dataclass(frozen=True)
class Bundle:
    """Files without weights; the digest of their archive names them."""

    data: bytes
    """The archive."""

    files: Mapping[str, bytes]

    @classmethod
    def of_directory(
        cls, directory: str | Path, *, leaves_weights: bool = False
    ) -> Self:
        """Return the bundle of all files in a directory.

        Hidden files and `__pycache__` are omitted; so are weights if `leaves_weights`.

        Raises:
            UsageError: a file cannot be in a bundle: weights, links, odd names; or
                the definition of the model cannot be read.
        """
        files = dict(_files_in(Path(directory), leaves_weights=leaves_weights))
        bundle = cls(pack(files), files)
        bundle.require_sound()
        return bundle

    @classmethod
    def of_archive(cls, data: bytes, *, digest: str | None) -> Self:
        """Return the bundle of a received archive that must have this digest.

        Raises:
            CorruptError: it has another digest, or is no archive of Atoll.
        """
        if len(data) > MAX_BYTES:
            raise CorruptError(
                f"The bundle has {len(data)} bytes, and at most {MAX_BYTES} are taken."
            )
        bundle = cls(data, {})
        if digest is not None and bundle.digest != digest:
            raise CorruptError(
                f"The received bundle has digest {bundle.digest[:12]}, and the run's "
                f"is {digest[:12]}: it was altered. Restore it where it is stored."
            )
        return cls(data, unpack(data))

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of the archive, in hex."""
        return str(blake3.blake3(self.data).hexdigest())

    @property
    def code(self) -> list[str]:
        """The sorted files that run, or load, code on the machine of the reader."""
        return sorted(
            name for name, content in self.files.items() if _runs(name, content)
        )

    @property
    def factory(self) -> str | None:
        """MODULE:FUNCTION that makes the model, if the manifest names one.

        Raises:
            UsageError: the manifest cannot be read.
        """
        content = self.files.get(MANIFEST)
        return None if content is None else _factory_of(content)

    def require_sound(self) -> None:
        """Return if all code that the bundle refers to is in it.

        Raises:
            UsageError: the manifest names a missing file, or a configuration has code
                of another repository.
        """
        if self.factory is not None:
            module = self.factory.partition(":")[0].replace(".", "/")
            if not {f"{module}.py", f"{module}/__init__.py"} & self.files.keys():
                raise UsageError(
                    f"{MANIFEST} names {self.factory!r}, and there is no {module}.py "
                    "beside it. Put it there, or name an existing one."
                )
        for name, content in self.files.items():
            _require_own_code(name, content)


def _files_in(root: Path, *, leaves_weights: bool) -> Iterator[tuple[str, bytes]]:
    if not root.is_dir():
        raise UsageError(f"{root} is no directory. Give one that defines the model.")
    size_bytes = count = 0
    for path in _walked(root):
        name = path.relative_to(root).as_posix()
        if leaves_weights and name.lower().endswith(WEIGHTS):
            continue
        if path.is_symlink() or not path.is_file():
            raise UsageError(
                f"{path} is a link or no plain file, and a bundle has only those. Put "
                "the file itself there, or move it out."
            )
        size_bytes, count = size_bytes + path.stat().st_size, count + 1
        if size_bytes > MAX_BYTES or count > MAX_FILES:
            raise UsageError(
                f"{root} has more than {MAX_BYTES} bytes or {MAX_FILES} files, and a "
                f"bundle at most that; {name!r} was the last one looked at. Leave "
                "weights, data and environments out."
            )
        yield name, path.read_bytes()


def _walked(root: Path) -> Iterator[Path]:
    for directory, folders, files in os.walk(root):
        linked = [name for name in folders if (Path(directory) / name).is_symlink()]
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__"
        )
        yield from (Path(directory) / name for name in linked if name[0] != ".")
        yield from (Path(directory) / name for name in sorted(files) if name[0] != ".")


def _factory_of(content: bytes) -> str | None:
    try:
        manifest = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise UsageError(f"{MANIFEST} cannot be read: {exc}.") from exc
    unknown = sorted(manifest.keys() - {"factory"})
    if unknown:
        raise UsageError(f"{MANIFEST} has {unknown[0]!r}, and knows only 'factory'.")
    factory = manifest.get("factory")
    if factory is None:
        return None
    if not isinstance(factory, str) or not _FACTORY.fullmatch(factory):
        raise UsageError(
            f"factory={factory!r} in {MANIFEST} is not MODULE:FUNCTION, such as "
            "'model:make_model'."
        )
    return factory


def _runs(name: str, content: bytes) -> bool:
    stem, dot, _ = name.rpartition("/")[2].partition(".")
    is_inert = name.lower().endswith(INERT) or (not dot and stem in PLAIN_NAMES)
    if not is_inert:
        return True
    if not name.lower().endswith("config.json"):
        return bool(_auto_maps(_json_of(name, content)))
    return _loads_code(_json_of(name, content))


def _loads_code(config: Any) -> bool:
    """Return whether a configuration may load code that is not known as harmless.

    Values are checked at any depth: those of an implementation's key must be in
    `PLAIN_IMPLEMENTATIONS`, and no other text may be the name of a repository.
    """
    return bool(_auto_maps(config)) or any(
        key not in _ORIGINS and not _is_plain(key, value)
        for key, value in _nodes(config)
        if not isinstance(value, dict | list)
    )


def _is_plain(key: str, value: Any) -> bool:
    if not isinstance(value, str):
        # Sizes of kernels are numbers; `use_kernels` is a switch.
        return not (value is True and _IMPLEMENTATION.search(key))
    if _IMPLEMENTATION.search(key):
        return value in PLAIN_IMPLEMENTATIONS
    return not _REPOSITORY.fullmatch(value)


def _require_own_code(name: str, content: bytes) -> None:
    for auto_map in _auto_maps(_json_of(name, content)):
        for _, reference in _nodes(auto_map):
            if isinstance(reference, str) and "--" in reference:
                raise UsageError(
                    f"{name} has {reference!r} in its auto_map: code of another "
                    "repository, which no digest covers. Copy it into the bundle, and "
                    "name that."
                )


def _json_of(name: str, content: bytes) -> Any:
    if not name.lower().endswith(".json"):
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None  # the loader of the model reports the error


def _auto_maps(config: Any) -> list[Any]:
    """Return the mappings to classes at any depth: configurations contain others."""
    tables = (node for _, node in _nodes(config) if isinstance(node, dict))
    return [table["auto_map"] for table in tables if table.get("auto_map") is not None]


def _nodes(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value at any depth, with its key.

    Values below the key of an implementation have that key.
    """
    stack = [("", config)]
    while stack:
        key, value = stack.pop()
        yield key, value
        if isinstance(value, dict):
            inherits = bool(_IMPLEMENTATION.search(key))
            stack += [
                (key if inherits else inner_key, inner)
                for inner_key, inner in value.items()
            ]
        elif isinstance(value, list):
            stack += [(key, item) for item in value]


def defined_by(bundle: Bundle | None, settings: RunSettings) -> RunSettings:
    """Return settings that name a bundle, if one is given.

    Raises:
        UsageError: they name another bundle.
    """
    if bundle is None:
        return settings
    named = settings.run.bundle
    if named not in (None, bundle.digest):
        raise UsageError(
            f"The run file has run.bundle={named!r}, and the given directory is bundle "
            f"{bundle.digest}. Give the directory of the other bundle, or omit "
            "run.bundle."
        )
    return settings.with_values({"run.bundle": bundle.digest})
