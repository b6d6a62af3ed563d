"""A state as JSON and named arrays, and back: the encoding of trees.

Rule 1: None, booleans, integers, finite floats, words and lists are themselves; a dict
        whose keys are words that do not begin with "!" is an object of JSON.
Rule 2: all else is an object with one key, a tag that begins with "!". A tag with a dot
        belongs to the face that is named before it.
Rule 3: types are exact. What would come back as something else (a named tuple, an enum)
        is refused, with the path that leads to it.
Rule 4: reading believes nothing: a tag that is not known is an error, and so is depth.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from atoll.checkpoint.arrays import Array, HostArray, NumpyArray, kind_of
from atoll.checkpoint.faces import FACES, NOTHING_HELD, Held, Path, face_named, face_of
from atoll.errors import CorruptError, UsageError

Json: TypeAlias = (
    bool
    | int
    | float
    | str
    | list["Json"]
    | dict[str, "Json"]
    | Mapping[str, "Json"]
    | None
)

MAX_DEPTH = 100
"""Deeper than any state that is not a mistake, and far from Python's own limit."""

MAX_INTEGER_BITS = 4096
"""Random generators have integers of 128 bits; Python reads none of 4300 digits."""

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAPPINGS: dict[str, type] = {
    "!dict": dict,
    "!ordered": OrderedDict,
    "!counter": Counter,
}
_TAG_OF = {kind: tag for tag, kind in _MAPPINGS.items()}


def dotted(path: Path) -> str:
    """Return a path as people write it."""
    return ".".join(str(part) for part in path)


class Encoder:
    """Turns values into JSON, and collects their arrays by name in `arrays`."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self._names: dict[object, str] = {}
        self._path: Path = ()

    def encode(self, value: object, path: Path) -> Json:
        """Return a value as JSON.

        Raises:
            UsageError: something in it cannot be represented; it says where.
        """
        if len(path) > MAX_DEPTH:
            raise UsageError(
                f"{dotted(path[:8])}... is nested more than {MAX_DEPTH} deep; "
                "a state that contains itself cannot be saved."
            )
        kind = type(value)
        if value is None or kind in (bool, str):
            return value  # type: ignore[return-value]
        if kind is int or kind is float:
            return _number(value, path)  # type: ignore[arg-type]
        if kind is list:
            return self._items(value, path)  # type: ignore[arg-type]
        if kind is tuple:
            return {"!tuple": self._items(value, path)}  # type: ignore[arg-type]
        if kind in _TAG_OF:
            return self._mapping(value, path)  # type: ignore[arg-type]
        return self._leaf(value, path)

    def keep(self, array: Array) -> str:
        """Have an array written under a name made of the present path."""
        known = self._names.get(array.identity)
        if known is not None:
            return known
        name = stem = dotted(self._path[1:])  # the file names the component
        number = 1
        while name in self.arrays or name == "__metadata__":
            number += 1
            name = f"{stem}#{number}"
        self.arrays[name] = array
        self._names[array.identity] = name
        return name

    def _items(self, values: list[object], path: Path) -> list[Json]:
        return [self.encode(each, (*path, at)) for at, each in enumerate(values)]

    def _mapping(self, value: dict[object, object], path: Path) -> Json:
        if type(value) is dict and all(_is_plain_key(key) for key in value):
            return {str(k): self.encode(v, (*path, k)) for k, v in value.items()}
        pairs: list[Json] = []
        for key, each in value.items():
            encoded = self.encode(key, (*path, key)) if _is_key(key) else _bad(path)
            pairs.append([encoded, self.encode(each, (*path, key))])
        return {_TAG_OF[type(value)]: pairs}

    def _leaf(self, value: object, path: Path) -> Json:
        self._path = path
        if isinstance(value, bytes | bytearray) and type(value) in (bytes, bytearray):
            tag = f"!{type(value).__name__}"
            return {tag: self.keep(NumpyArray(np.frombuffer(value, np.uint8), "U8"))}
        if type(value) is np.ndarray or isinstance(value, np.generic):
            return self._numpy(value, path)
        face = face_of(value)
        try:
            found = None if face is None else face.encode(value, self.keep)
        except UsageError as exc:
            raise UsageError(f"{dotted(path)}: {exc}.") from exc
        if found is None:
            raise UsageError(
                f"{dotted(path)} is {_shown(value)}, which cannot be saved: a state "
                "holds numbers, words, arrays, and dicts, lists and tuples of them. "
                "Leave it out of the state, or make it of those."
            )
        return {found[0]: found[1]}  # type: ignore[dict-item]

    def _numpy(self, value: object, path: Path) -> Json:
        array = np.asarray(value)
        kind = kind_of(array.dtype)
        if kind is None:
            raise UsageError(
                f"{dotted(path)} holds numpy's {array.dtype}, which a checkpoint "
                "cannot. Make it an array of booleans, integers or floats."
            )
        tag = "!scalar" if isinstance(value, np.generic) else "!numpy"
        return {tag: self.keep(NumpyArray(array, kind))}


def decode(value: Json, path: Path, held: Held) -> object:
    """Return what was encoded.

    Raises:
        CorruptError: it is no encoding of anything.
    """
    if len(path) > MAX_DEPTH + 1:
        raise CorruptError(f"{dotted(path[:8])}... is nested too deep to be a state.")
    if isinstance(value, list):
        return [decode(each, (*path, at), held) for at, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(tag, body)] = value.items()
        if tag.startswith("!"):
            return _tagged(tag, body, path, held)
    for key in value:
        if key.startswith("!"):
            raise CorruptError(f"{dotted(path)} has the tag {key!r} among other keys.")
    return {key: decode(each, (*path, key), held) for key, each in value.items()}


def children(value: Json) -> dict[object, Json]:
    """Return one level of an encoded tree, by key or index; nothing under a leaf."""
    if isinstance(value, list):
        return dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    if len(value) == 1:
        [(tag, body)] = value.items()
        if tag == "!tuple":
            return children(body)
        if tag in _MAPPINGS and isinstance(body, list):
            return {_plain_key(pair): pair[1] for pair in body}  # type: ignore[index]
        if tag.startswith("!"):
            return {}
    return {key: each for key, each in value.items()}


def _plain_key(pair: Json) -> object:
    if not isinstance(pair, list) or len(pair) != 2:
        raise CorruptError("A dict of the tree is no list of pairs.")
    key = decode(pair[0], ("key",), NOTHING_HELD)
    if not _is_key(key):
        raise CorruptError("A dict of the tree has keys that no dict of ours has.")
    return key


def _tagged(tag: str, body: Json, path: Path, held: Held) -> object:
    face = tag[1:].partition(".")[0]
    if tag == "!float" and isinstance(body, str) and body in _SPECIAL:
        return _SPECIAL[body]
    if tag == "!tuple" and isinstance(body, list):
        return tuple(decode(each, (*path, at), held) for at, each in enumerate(body))
    if tag in _MAPPINGS and isinstance(body, list):
        return _MAPPINGS[tag](_pairs(body, path, held))
    if tag in _ARRAYS and isinstance(body, str):
        return _ARRAYS[tag](held.source.read(body), path)
    if "." in tag and face in FACES:
        return face_named(face).decode(tag, body, path, held)
    raise CorruptError(f"{dotted(path)} has the tag {tag[:40]!r}, which means nothing.")


def _pairs(body: list[Json], path: Path, held: Held) -> dict[object, object]:
    found: dict[object, object] = {}
    for pair in body:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptError(f"{dotted(path)} is no list of pairs.")
        key = decode(pair[0], (*path, "key"), held)
        if not _is_key(key) or key in found:
            raise CorruptError(f"{dotted(path)} has a key twice, or one {_shown(key)}.")
        found[key] = decode(pair[1], (*path, key), held)
    return found


def _numpy(array: HostArray, path: Path) -> object:
    found = array.numpy()
    if found is None:
        raise CorruptError(f"{dotted(path)} is {array.kind}, which numpy has not.")
    return found


def _scalar(array: HostArray, path: Path) -> object:
    if array.shape != ():
        raise CorruptError(
            f"{dotted(path)} has the shape {array.shape}, not one value."
        )
    return _numpy(array, path)[()]  # type: ignore[index]


_ARRAYS = {
    "!bytes": lambda array, path: array.flat().tobytes(),
    "!bytearray": lambda array, path: bytearray(array.flat().tobytes()),
    "!numpy": _numpy,
    "!scalar": _scalar,
}


def _number(value: int | float, path: Path) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        return {"!float": repr(value)}
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise UsageError(
            f"{dotted(path)} is an integer of {value.bit_length()} bits; a checkpoint "
            f"holds at most {MAX_INTEGER_BITS}."
        )
    return value


def _is_plain_key(key: object) -> bool:
    return type(key) is str and not key.startswith("!")


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_key(each) for each in key)
    return key is None or type(key) in (bool, int, float, str)


def _bad(path: Path) -> Json:
    raise UsageError(
        f"{dotted(path)} is a dict with keys that are not words, numbers, None or "
        "tuples of them. Give it such keys."
    )


def _shown(value: object) -> str:
    kind = type(value)
    place = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of the type {place}{kind.__qualname__}"
