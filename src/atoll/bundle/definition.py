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
"""What says how the model is made: to `transformers`, or by a factory."""

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
"""Files that are only ever read. Whatever else there is counts as code."""

PLAIN_NAMES = ("LICENSE", "NOTICE", "README")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_IMPLEMENTATION = re.compile(r"implementation|kernel", re.IGNORECASE)
"""Keys of a configuration whose value may name code that transformers fetches."""

PLAIN_IMPLEMENTATIONS = ("", "eager", "sdpa", "flex_attention", "grouped_mm")
"""Values of such keys that only select code of transformers and torch. The names of
flash attention are not among them: without its package they load a kernel of the hub.
"""

_REPOSITORY = re.compile(r"(?:[\w.+-]+[|:])*[\w.-]+/[\w.-]+(?:[@:][^/\s]*)?")
"""What a repository of the hub looks like, with the prefixes that loaders know."""

_ORIGINS = ("_name_or_path", "name_or_path", "base_model_name_or_path")
"""Keys that only tell where a configuration came from."""


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
        """Return the bundle of all that lies in a directory.

        Hidden files and `__pycache__` are left out, and weights if that is asked for.

        Raises:
            UsageError: something cannot be in a bundle: weights, links, odd names; or
                what says how the model is made cannot be read.
        """
        files = dict(_files_in(Path(directory), leaves_weights=leaves_weights))
        bundle = cls(pack(files), files)
        bundle.require_sound()
        return bundle

    @classmethod
    def of_archive(cls, data: bytes, *, digest: str | None) -> Self:
        """Return the bundle of an archive from elsewhere, which has that digest.

        Raises:
            CorruptError: it has another, or is none that Atoll writes.
        """
        if len(data) > MAX_BYTES:
            raise CorruptError(
                f"The bundle has {len(data)} bytes, and at most {MAX_BYTES} are taken."
            )
        bundle = cls(data, {})
        if digest is not None and bundle.digest != digest:
            raise CorruptError(
                f"The bundle that came has digest {bundle.digest[:12]}, and the run's "
                f"is {digest[:12]}: it was altered. Put it back where it is kept."
            )
        return cls(data, unpack(data))

    @cached_property
    def digest(self) -> str:
        """BLAKE3 of the archive, in hex."""
        return str(blake3.blake3(self.data).hexdigest())

    @property
    def code(self) -> list[str]:
        """What of it runs, or has something run, on who loads it; sorted."""
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
        """Return when whoever loads it will find what it speaks of.

        Raises:
            UsageError: the manifest names what is not there, or a configuration has
                code of another repository.
        """
        if self.factory is not None:
            module = self.factory.partition(":")[0].replace(".", "/")
            if not {f"{module}.py", f"{module}/__init__.py"} & self.files.keys():
                raise UsageError(
                    f"{MANIFEST} names {self.factory!r}, and there is no {module}.py "
                    "beside it. Put it there, or name what is."
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
        linked = [each for each in folders if (Path(directory) / each).is_symlink()]
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith(".") and each != "__pycache__"
        )
        yield from (Path(directory) / each for each in linked if each[0] != ".")
        yield from (Path(directory) / e for e in sorted(files) if e[0] != ".")


def _factory_of(content: bytes) -> str | None:
    try:
        said = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise UsageError(f"{MANIFEST} cannot be read: {exc}.") from exc
    unknown = sorted(said.keys() - {"factory"})
    if unknown:
        raise UsageError(f"{MANIFEST} has {unknown[0]!r}, and knows only 'factory'.")
    factory = said.get("factory")
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
        return bool(_named(_json_of(name, content), "auto_map"))
    return _loads_code(_json_of(name, content))


def _loads_code(config: Any) -> bool:
    """Return whether a configuration has code loaded that is not on a list of ours.

    Values are judged wherever they stand, also in tables: a key of an implementation
    by `PLAIN_IMPLEMENTATIONS`, and any other text by not being a repository's name.
    """
    if _named(config, "auto_map"):
        return True
    left = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            inherits = bool(_IMPLEMENTATION.search(key))
            left += [(key if inherits else own, each) for own, each in value.items()]
        elif isinstance(value, list):
            left += [(key, each) for each in value]
        elif key not in _ORIGINS and not _is_plain(key, value):
            return True
    return False


def _is_plain(key: str, value: Any) -> bool:
    if not isinstance(value, str):
        # Sizes of kernels are numbers; `use_kernels` is a switch.
        return not (value is True and _IMPLEMENTATION.search(key))
    if _IMPLEMENTATION.search(key):
        return value in PLAIN_IMPLEMENTATIONS
    return not _REPOSITORY.fullmatch(value)


def _require_own_code(name: str, content: bytes) -> None:
    for found in _named(_json_of(name, content), "auto_map"):
        for each in _texts(found):
            if "--" in each:
                raise UsageError(
                    f"{name} has {each!r} in its auto_map: code of another repository, "
                    "which no digest covers. Copy it into the bundle, and name that."
                )


def _json_of(name: str, content: bytes) -> Any:
    if not name.lower().endswith(".json"):
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None  # whoever reads it says so


def _named(said: Any, key: str) -> list[Any]:
    """Return every value of a key, however deep: configurations hold others."""
    found, left = [], [said]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            found += [each[key]] if each.get(key) is not None else []
            left += each.values()
        elif isinstance(each, list):
            left += each
    return found


def _texts(said: Any) -> Iterator[str]:
    left = [said]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict | list):
            left += each.values() if isinstance(each, dict) else each


def defined_by(bundle: Bundle | None, settings: RunSettings) -> RunSettings:
    """Return settings that name a bundle, if one is given.

    Raises:
        UsageError: they name another.
    """
    if bundle is None:
        return settings
    named = settings.run.bundle
    if named not in (None, bundle.digest):
        raise UsageError(
            f"The run file has run.bundle={named!r}, and the directory that was given "
            f"is bundle {bundle.digest}. Give the other's directory, or leave "
            "run.bundle out."
        )
    return settings.with_values({"run.bundle": bundle.digest})
