"""A state as JSON and named arrays, and back: the encoding of trees.

Rule 1: None, booleans, integers, finite floats, text and lists are themselves; a dict
        whose keys are text that does not begin with "!" is an object of JSON.
Rule 2: all else is an object with one key, a tag that begins with "!". A tag with a dot
        belongs to the framework adapter that is named before it.
Rule 3: types are exact. A value that would come back as something else (a named tuple,
        an enum) is refused, with its path.
Rule 4: reading trusts nothing: an unknown tag is an error, and so is too much depth.

A component is an object with a state, or dicts and lists of such objects and of plain
values: two optimizers, the stages of a pipeline, a trainer's counters. Objects restore
themselves; plain values are put back into the dict or list that holds them. Random
states are those of generators that a program made, and those of the process.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TypeAlias, cast

import numpy as np

from atoll.checkpoint.arrays import (
    CheckpointArray,
    HostArray,
    NumpyArray,
    kind_of,
)
from atoll.checkpoint.frameworks import (
    ADAPTERS,
    EMPTY_CONTEXT,
    ArraySource,
    RestoreContext,
    Stateful,
    StateHolder,
    TreePath,
    adapter_named,
    adapter_of,
    present_adapters,
)
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


def dotted(path: TreePath) -> str:
    """Return a path as people write it."""
    return ".".join(str(part) for part in path)


class Encoder:
    """Turns values into JSON, and collects their arrays by name in `arrays`."""

    def __init__(self) -> None:
        self.arrays: dict[str, CheckpointArray] = {}
        self._names: dict[object, str] = {}
        self._path: TreePath = ()

    def encode(self, value: object, path: TreePath) -> Json:
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

    def keep(self, array: CheckpointArray) -> str:
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

    def _items(self, values: list[object], path: TreePath) -> list[Json]:
        return [self.encode(each, (*path, at)) for at, each in enumerate(values)]

    def _mapping(self, value: dict[object, object], path: TreePath) -> Json:
        if type(value) is dict and all(_is_plain_key(key) for key in value):
            return {str(k): self.encode(v, (*path, k)) for k, v in value.items()}
        pairs: list[Json] = []
        for key, each in value.items():
            encoded = self.encode(key, (*path, key)) if _is_key(key) else _bad(path)
            pairs.append([encoded, self.encode(each, (*path, key))])
        return {_TAG_OF[type(value)]: pairs}

    def _leaf(self, value: object, path: TreePath) -> Json:
        self._path = path
        if isinstance(value, bytes | bytearray) and type(value) in (bytes, bytearray):
            tag = f"!{type(value).__name__}"
            return {tag: self.keep(NumpyArray(np.frombuffer(value, np.uint8), "U8"))}
        if type(value) is np.ndarray or isinstance(value, np.generic):
            return self._numpy(value, path)
        face = adapter_of(value)
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

    def _numpy(self, value: object, path: TreePath) -> Json:
        array = np.asarray(value)
        kind = kind_of(array.dtype)
        if kind is None:
            raise UsageError(
                f"{dotted(path)} holds numpy's {array.dtype}, which a checkpoint "
                "cannot. Make it an array of booleans, integers or floats."
            )
        tag = "!scalar" if isinstance(value, np.generic) else "!numpy"
        return {tag: self.keep(NumpyArray(array, kind))}


def decode(value: Json, path: TreePath, held: RestoreContext) -> object:
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
    key = decode(pair[0], ("key",), EMPTY_CONTEXT)
    if not _is_key(key):
        raise CorruptError("A dict of the tree has keys that no dict of ours has.")
    return key


def _tagged(tag: str, body: Json, path: TreePath, held: RestoreContext) -> object:
    face = tag[1:].partition(".")[0]
    if tag == "!float" and isinstance(body, str) and body in _SPECIAL:
        return _SPECIAL[body]
    if tag == "!tuple" and isinstance(body, list):
        return tuple(decode(each, (*path, at), held) for at, each in enumerate(body))
    if tag in _MAPPINGS and isinstance(body, list):
        return _MAPPINGS[tag](_pairs(body, path, held))
    if tag in _ARRAYS and isinstance(body, str):
        return _ARRAYS[tag](held.source.read(body), path)
    if "." in tag and face in ADAPTERS:
        return adapter_named(face).decode(tag, body, path, held)
    raise CorruptError(f"{dotted(path)} has the tag {tag[:40]!r}, which means nothing.")


def _pairs(
    body: list[Json], path: TreePath, held: RestoreContext
) -> dict[object, object]:
    found: dict[object, object] = {}
    for pair in body:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptError(f"{dotted(path)} is no list of pairs.")
        key = decode(pair[0], (*path, "key"), held)
        if not _is_key(key) or key in found:
            raise CorruptError(f"{dotted(path)} has a key twice, or one {_shown(key)}.")
        found[key] = decode(pair[1], (*path, key), held)
    return found


def _numpy(array: HostArray, path: TreePath) -> object:
    found = array.numpy()
    if found is None:
        raise CorruptError(f"{dotted(path)} is {array.kind}, which numpy has not.")
    return found


def _scalar(array: HostArray, path: TreePath) -> object:
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


def _number(value: int | float, path: TreePath) -> Json:
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


def _bad(path: TreePath) -> Json:
    raise UsageError(
        f"{dotted(path)} is a dict with keys that are not words, numbers, None or "
        "tuples of them. Give it such keys."
    )


def _shown(value: object) -> str:
    kind = type(value)
    place = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of the type {place}{kind.__qualname__}"


class PythonRandom:
    """A generator of Python's `random`. Implements `StateHolder`."""

    is_replicated = False

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state(self) -> object:
        return self._generator.getstate()

    def restore(self, state: object) -> None:
        self._generator.setstate(cast("tuple[object, ...]", state))

    def like(self, path: TreePath) -> object:
        return None


class NumpyRandom:
    """A generator of numpy, of either kind. Implements `StateHolder`."""

    is_replicated = False

    def __init__(self, generator: np.random.Generator | np.random.RandomState) -> None:
        self._generator = generator

    def state(self) -> object:
        if isinstance(self._generator, np.random.RandomState):
            return self._generator.get_state(legacy=False)
        return self._generator.bit_generator.state

    def restore(self, state: object) -> None:
        if isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(cast("dict[str, object]", state))
        else:
            self._generator.bit_generator.state = cast("dict[str, object]", state)

    def like(self, path: TreePath) -> object:
        return None


class ProcessRandom:
    """What `random`, numpy and the frameworks draw from by default.

    Implements `Stateful`.
    """

    def state_dict(self) -> object:
        frameworks = {name: face.random() for name, face in present_adapters().items()}
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            **{name: each.state() for name, each in frameworks.items() if each},
        }

    def load_state_dict(self, state: object, /) -> None:
        if not isinstance(state, dict):
            raise UsageError("rng.process is not a dict of random states.")
        held = dict(state)
        random.setstate(held.pop("python"))
        np.random.set_state(held.pop("numpy"))
        for name, each in held.items():
            _random_of(name).restore(each)


def _random_of(name: str) -> StateHolder:
    holder = adapter_named(name).random()
    if holder is None:
        raise UsageError(f"rng.process has a state of {name}, which has none.")
    return holder


Objects: TypeAlias = Mapping[str, object]


class _Own:
    """An object with a `state_dict` of its own. Implements `StateHolder`."""

    is_replicated = False

    def __init__(self, value: Stateful) -> None:
        self._value = value
        self._live: object = None

    def state(self) -> object:
        return self._value.state_dict()

    def restore(self, state: object) -> None:
        self._value.load_state_dict(state)

    def like(self, path: TreePath) -> object:
        if self._live is None:
            self._live = self._value.state_dict()
        found = self._live
        for key in path:
            try:
                found = found[key]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return None
        return found


def holder_of(value: object, objects: Objects) -> StateHolder | None:
    """Return what saves and restores an object; None if it has no state of its own."""
    face = adapter_of(value)
    holder = None if face is None else face.holder(value, objects)
    if holder is not None:
        return holder
    if isinstance(value, random.Random):
        return PythonRandom(value)
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return NumpyRandom(value)
    if isinstance(value, Stateful) and not isinstance(value, type):
        return _Own(value)
    return None


def check_component(name: str, value: object, objects: Objects) -> None:
    """Raise UsageError unless a component can be restored from what is saved of it."""
    if holder_of(value, objects) is None and not isinstance(value, dict | list | tuple):
        raise UsageError(
            f"{name} is of the type {type(value).__qualname__}, which has no "
            "state_dict() and load_state_dict(). Give an object that has them, or a "
            "dict or list of such objects and of plain values."
        )


def is_replicated(value: object, objects: Objects) -> bool:
    """Whether all of a component is the same on every rank."""
    holder = holder_of(value, objects)
    if holder is not None:
        return holder.is_replicated
    parts = list(_parts(value).values())
    return bool(parts) and all(is_replicated(each, objects) for each in parts)


def state_of(value: object, objects: Objects) -> object:
    """Return a component as a tree."""
    holder = holder_of(value, objects)
    if holder is not None:
        return holder.state()
    if type(value) is dict:
        return {key: state_of(each, objects) for key, each in value.items()}
    if type(value) in (list, tuple):
        states = [state_of(each, objects) for each in _parts(value).values()]
        return states if type(value) is list else tuple(states)
    return value


def put_back(
    value: object, encoded: Json, path: TreePath, source: ArraySource, objects: Objects
) -> None:
    """Restore a component from its encoded tree.

    Raises:
        UsageError: the objects are not those that were saved.
    """
    holder = holder_of(value, objects)
    if holder is not None:
        held = RestoreContext(source, lambda place: holder.like(place[len(path) :]))
        _restore(holder, decoded(encoded, path, held), path)
    elif _has_holder(value, objects):
        _put_parts_back(value, encoded, path, source, objects)
    elif isinstance(value, dict | list):
        _put_values_back(
            value, decoded(encoded, path, RestoreContext(source, _nothing)), path
        )


def decoded(encoded: Json, path: TreePath, held: RestoreContext) -> object:
    """Return what was encoded.

    Raises:
        CorruptError: nothing of ours has written it.
    """
    try:
        return decode(encoded, path, held)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as exc:
        # The files are as they were written, so that somebody else has written them.
        raise CorruptError(
            f"{dotted(path)} of the checkpoint cannot be read: "
            f"{type(exc).__name__}: {str(exc)[:200]}"
        ) from exc


def _restore(holder: StateHolder, state: object, path: TreePath) -> None:
    try:
        holder.restore(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as exc:
        # Whatever a framework says of a state that does not fit, it is the user's to
        # settle: the objects are not the ones that were saved.
        raise UsageError(
            f"{dotted(path)} does not take the state of the checkpoint: "
            f"{type(exc).__name__}: {exc}"
        ) from exc


def _put_parts_back(
    value: object, encoded: Json, path: TreePath, source: ArraySource, objects: Objects
) -> None:
    live, saved = _parts(value), children(encoded)
    for key in live.keys() ^ saved.keys():
        where = "checkpoint" if key in live else "program"
        raise UsageError(
            f"{dotted((*path, key))} is not in the {where}: it holds "
            f"{sorted(map(str, saved if key in live else live))}. "
            "Give the objects that were saved, under the same names."
        )
    for key, each in live.items():
        if _has_holder(each, objects):
            put_back(each, saved[key], (*path, key), source, objects)
        elif isinstance(value, dict | list):
            held = RestoreContext(source, _nothing)
            put = cast("dict[object, object]", value)  # a list by index is alike
            put[key] = decoded(saved[key], (*path, key), held)


def _put_values_back(
    value: dict[object, object] | list[object], state: object, path: TreePath
) -> None:
    if isinstance(value, dict) and isinstance(state, dict):
        value.clear()
        value.update(state)
    elif isinstance(value, list) and isinstance(state, list):
        value[:] = state
    else:
        raise UsageError(
            f"{dotted(path)} is a {type(value).__name__} here, and a "
            f"{type(state).__name__} in the checkpoint."
        )


def _parts(value: object) -> dict[object, object]:
    if type(value) is dict:
        return dict(value)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return dict(enumerate(value))
    return {}


def _has_holder(value: object, objects: Objects) -> bool:
    if holder_of(value, objects) is not None:
        return True
    return any(_has_holder(each, objects) for each in _parts(value).values())


def _nothing(path: TreePath) -> object:
    return None
