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

from atoll.checkpoint import frameworks
from atoll.checkpoint.arrays import CheckpointArray, HostArray, NumpyArray, kind_of
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
"""More than any sensible state has, and far below Python's recursion limit."""

MAX_INTEGER_BITS = 4096
"""Random generators have integers of 128 bits; Python parses at most 4300 digits."""

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAPPINGS: dict[str, type] = {
    "!dict": dict,
    "!ordered": OrderedDict,
    "!counter": Counter,
}
_TAG_OF = {kind: tag for tag, kind in _MAPPINGS.items()}


def dotted(path: frameworks.TreePath) -> str:
    """Return a path as text, with dots."""
    return ".".join(str(part) for part in path)


class Encoder:
    """Turns values into JSON, and collects their arrays by name in `arrays`."""

    def __init__(self) -> None:
        self.arrays: dict[str, CheckpointArray] = {}
        self._names: dict[object, str] = {}
        self._path: frameworks.TreePath = ()

    def encode(self, value: object, path: frameworks.TreePath) -> Json:
        """Return a value as JSON.

        Raises:
            UsageError: a value in it cannot be represented; the message has its path.
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
        """Add an array under a name made of the present path, and return the name."""
        earlier_name = self._names.get(array.identity)
        if earlier_name is not None:
            return earlier_name
        name = stem = dotted(self._path[1:])  # the file name has the component
        number = 1
        while name in self.arrays or name == "__metadata__":
            number += 1
            name = f"{stem}#{number}"
        self.arrays[name] = array
        self._names[array.identity] = name
        return name

    def _items(self, values: list[object], path: frameworks.TreePath) -> list[Json]:
        return [self.encode(item, (*path, i)) for i, item in enumerate(values)]

    def _mapping(self, value: dict[object, object], path: frameworks.TreePath) -> Json:
        if type(value) is dict and all(_is_plain_key(key) for key in value):
            return {str(k): self.encode(v, (*path, k)) for k, v in value.items()}
        pairs: list[Json] = []
        for key, item in value.items():
            encoded = self.encode(key, (*path, key)) if _is_key(key) else _bad(path)
            pairs.append([encoded, self.encode(item, (*path, key))])
        return {_TAG_OF[type(value)]: pairs}

    def _leaf(self, value: object, path: frameworks.TreePath) -> Json:
        self._path = path
        if isinstance(value, bytes | bytearray) and type(value) in (bytes, bytearray):
            tag = f"!{type(value).__name__}"
            return {tag: self.keep(NumpyArray(np.frombuffer(value, np.uint8), "U8"))}
        if type(value) is np.ndarray or isinstance(value, np.generic):
            return self._numpy(value, path)
        adapter = frameworks.adapter_of(value)
        try:
            encoded = None if adapter is None else adapter.encode(value, self.keep)
        except UsageError as exc:
            raise UsageError(f"{dotted(path)}: {exc}.") from exc
        if encoded is None:
            raise UsageError(
                f"{dotted(path)} is {_shown(value)}, which cannot be saved: a state "
                "holds numbers, strings, arrays, and dicts, lists and tuples of them. "
                "Leave it out of the state, or convert it to those."
            )
        return {encoded[0]: encoded[1]}  # type: ignore[dict-item]

    def _numpy(self, value: object, path: frameworks.TreePath) -> Json:
        array = np.asarray(value)
        kind = kind_of(array.dtype)
        if kind is None:
            raise UsageError(
                f"{dotted(path)} holds numpy's {array.dtype}, which a checkpoint "
                "cannot. Make it an array of booleans, integers or floats."
            )
        tag = "!scalar" if isinstance(value, np.generic) else "!numpy"
        return {tag: self.keep(NumpyArray(array, kind))}


def decode(
    value: Json, path: frameworks.TreePath, context: frameworks.RestoreContext
) -> object:
    """Return the value of an encoded tree.

    Raises:
        CorruptError: it is no encoded tree.
    """
    if len(path) > MAX_DEPTH + 1:
        raise CorruptError(f"{dotted(path[:8])}... is nested too deep to be a state.")
    if isinstance(value, list):
        return [decode(item, (*path, i), context) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        [(tag, body)] = value.items()
        if tag.startswith("!"):
            return _tagged(tag, body, path, context)
    for key in value:
        if key.startswith("!"):
            raise CorruptError(f"{dotted(path)} has the tag {key!r} among other keys.")
    return {key: decode(item, (*path, key), context) for key, item in value.items()}


def children(value: Json) -> dict[object, Json]:
    """Return one level of an encoded tree, by key or index; empty for a leaf."""
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
    return {key: item for key, item in value.items()}


def _plain_key(pair: Json) -> object:
    if not isinstance(pair, list) or len(pair) != 2:
        raise CorruptError("A dict of the tree is no list of pairs.")
    key = decode(pair[0], ("key",), frameworks.EMPTY_CONTEXT)
    if not _is_key(key):
        raise CorruptError("A dict of the tree has keys of a type that is not allowed.")
    return key


def _tagged(
    tag: str, body: Json, path: frameworks.TreePath, context: frameworks.RestoreContext
) -> object:
    framework = tag[1:].partition(".")[0]
    if tag == "!float" and isinstance(body, str) and body in _SPECIAL:
        return _SPECIAL[body]
    if tag == "!tuple" and isinstance(body, list):
        return tuple(decode(item, (*path, i), context) for i, item in enumerate(body))
    if tag in _MAPPINGS and isinstance(body, list):
        return _MAPPINGS[tag](_pairs(body, path, context))
    if tag in _ARRAYS and isinstance(body, str):
        return _ARRAYS[tag](context.source.read(body), path)
    if "." in tag and framework in frameworks.ADAPTERS:
        return frameworks.adapter_named(framework).decode(tag, body, path, context)
    raise CorruptError(f"{dotted(path)} has the tag {tag[:40]!r}, which is not known.")


def _pairs(
    body: list[Json], path: frameworks.TreePath, context: frameworks.RestoreContext
) -> dict[object, object]:
    entries: dict[object, object] = {}
    for pair in body:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptError(f"{dotted(path)} is no list of pairs.")
        key = decode(pair[0], (*path, "key"), context)
        if not _is_key(key) or key in entries:
            raise CorruptError(f"{dotted(path)} has a key twice, or one {_shown(key)}.")
        entries[key] = decode(pair[1], (*path, key), context)
    return entries


def _numpy(array: HostArray, path: frameworks.TreePath) -> object:
    values = array.numpy()
    if values is None:
        raise CorruptError(f"{dotted(path)} is {array.kind}, which numpy has not.")
    return values


def _scalar(array: HostArray, path: frameworks.TreePath) -> object:
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


def _number(value: int | float, path: frameworks.TreePath) -> Json:
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
        return all(_is_key(part) for part in key)
    return key is None or type(key) in (bool, int, float, str)


def _bad(path: frameworks.TreePath) -> Json:
    raise UsageError(
        f"{dotted(path)} is a dict with keys that are not strings, numbers, None or "
        "tuples of them. Give it such keys."
    )


def _shown(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"of the type {module}{kind.__qualname__}"


class PythonRandom:
    """A generator of Python's `random`. Implements `StateHolder`."""

    is_replicated = False

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def state(self) -> object:
        return self._generator.getstate()

    def restore(self, state: object) -> None:
        self._generator.setstate(cast("tuple[object, ...]", state))

    def like(self, path: frameworks.TreePath) -> object:
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

    def like(self, path: frameworks.TreePath) -> object:
        return None


class ProcessRandom:
    """The default generators of `random`, numpy and the frameworks.

    Implements `Stateful`.
    """

    def state_dict(self) -> object:
        adapters = frameworks.present_adapters().items()
        holders = {name: adapter.random() for name, adapter in adapters}
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            **{name: holder.state() for name, holder in holders.items() if holder},
        }

    def load_state_dict(self, state: object, /) -> None:
        if not isinstance(state, dict):
            raise UsageError("rng.process is not a dict of random states.")
        states = dict(state)
        random.setstate(states.pop("python"))
        np.random.set_state(states.pop("numpy"))
        for name, framework_state in states.items():
            _random_of(name).restore(framework_state)


def _random_of(name: str) -> frameworks.StateHolder:
    holder = frameworks.adapter_named(name).random()
    if holder is None:
        raise UsageError(f"rng.process has a state of {name}, which has none.")
    return holder


Objects: TypeAlias = Mapping[str, object]


class _StatefulHolder:
    """An object with a `state_dict` method. Implements `StateHolder`."""

    is_replicated = False

    def __init__(self, value: frameworks.Stateful) -> None:
        self._value = value
        self._live: object = None

    def state(self) -> object:
        return self._value.state_dict()

    def restore(self, state: object) -> None:
        self._value.load_state_dict(state)

    def like(self, path: frameworks.TreePath) -> object:
        if self._live is None:
            self._live = self._value.state_dict()
        value = self._live
        for key in path:
            try:
                value = value[key]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return None
        return value


def holder_of(value: object, objects: Objects) -> frameworks.StateHolder | None:
    """Return the holder of an object's state; None if it has no state."""
    adapter = frameworks.adapter_of(value)
    holder = None if adapter is None else adapter.holder(value, objects)
    if holder is not None:
        return holder
    if isinstance(value, random.Random):
        return PythonRandom(value)
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return NumpyRandom(value)
    if isinstance(value, frameworks.Stateful) and not isinstance(value, type):
        return _StatefulHolder(value)
    return None


def check_component(name: str, value: object, objects: Objects) -> None:
    """Raise UsageError unless a component's state can be saved and restored."""
    if holder_of(value, objects) is None and not isinstance(value, dict | list | tuple):
        raise UsageError(
            f"{name} is of the type {type(value).__qualname__}, which has no "
            "state_dict() and load_state_dict(). Give an object that has them, or a "
            "dict or list of such objects and of plain values."
        )


def is_replicated(value: object, objects: Objects) -> bool:
    """Return whether all of a component is the same on every rank."""
    holder = holder_of(value, objects)
    if holder is not None:
        return holder.is_replicated
    parts = list(_parts(value).values())
    return bool(parts) and all(is_replicated(part, objects) for part in parts)


def state_of(value: object, objects: Objects) -> object:
    """Return a component as a tree."""
    holder = holder_of(value, objects)
    if holder is not None:
        return holder.state()
    if type(value) is dict:
        return {key: state_of(part, objects) for key, part in value.items()}
    if type(value) in (list, tuple):
        states = [state_of(part, objects) for part in _parts(value).values()]
        return states if type(value) is list else tuple(states)
    return value


def restore_component(
    value: object,
    encoded: Json,
    path: frameworks.TreePath,
    source: frameworks.ArraySource,
    objects: Objects,
) -> None:
    """Restore a component from its encoded tree.

    Raises:
        UsageError: the objects are not those that were saved.
    """
    holder = holder_of(value, objects)
    if holder is not None:
        context = frameworks.RestoreContext(
            source, lambda full: holder.like(full[len(path) :])
        )
        _restore(holder, decoded(encoded, path, context), path)
    elif _has_holder(value, objects):
        _restore_parts(value, encoded, path, source, objects)
    elif isinstance(value, dict | list):
        _restore_values(
            value,
            decoded(encoded, path, frameworks.RestoreContext(source, _no_template)),
            path,
        )


def decoded(
    encoded: Json, path: frameworks.TreePath, context: frameworks.RestoreContext
) -> object:
    """Return the value of an encoded tree from a file.

    Raises:
        CorruptError: the tree was not written by this package.
    """
    try:
        return decode(encoded, path, context)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as exc:
        # The digests are right, so the files were written by other software.
        raise CorruptError(
            f"{dotted(path)} of the checkpoint cannot be read: "
            f"{type(exc).__name__}: {str(exc)[:200]}"
        ) from exc


def _restore(
    holder: frameworks.StateHolder, state: object, path: frameworks.TreePath
) -> None:
    try:
        holder.restore(state)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as exc:
        # A framework raises any of these for a state that does not match. It is a
        # usage error: the objects are not those that were saved.
        raise UsageError(
            f"{dotted(path)} does not take the state of the checkpoint: "
            f"{type(exc).__name__}: {exc}"
        ) from exc


def _restore_parts(
    value: object,
    encoded: Json,
    path: frameworks.TreePath,
    source: frameworks.ArraySource,
    objects: Objects,
) -> None:
    live, saved = _parts(value), children(encoded)
    for key in live.keys() ^ saved.keys():
        side = "checkpoint" if key in live else "program"
        raise UsageError(
            f"{dotted((*path, key))} is not in the {side}: it holds "
            f"{sorted(map(str, saved if key in live else live))}. "
            "Give the objects that were saved, under the same names."
        )
    for key, part in live.items():
        if _has_holder(part, objects):
            restore_component(part, saved[key], (*path, key), source, objects)
        elif isinstance(value, dict | list):
            context = frameworks.RestoreContext(source, _no_template)
            container = cast("dict[object, object]", value)  # or a list, by index
            container[key] = decoded(saved[key], (*path, key), context)


def _restore_values(
    value: dict[object, object] | list[object], state: object, path: frameworks.TreePath
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
    return any(_has_holder(part, objects) for part in _parts(value).values())


def _no_template(path: frameworks.TreePath) -> object:
    return None
