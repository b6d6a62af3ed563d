"""The objects of a component: their states as one tree, and the tree put back.

A component is an object with a state, or dicts and lists of such objects and of plain
values: two optimizers, the stages of a pipeline, a trainer's counters. Objects restore
themselves; plain values are put back into the dict or list that holds them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeAlias, cast

import numpy as np

from atoll.checkpoint.faces import Held, Holder, Path, Source, Stateful, face_of
from atoll.checkpoint.random_states import NumpyRandom, PythonRandom
from atoll.checkpoint.tree import Json, children, decode, dotted
from atoll.errors import CorruptError, UsageError

Objects: TypeAlias = Mapping[str, object]


class _Own:
    """An object with a `state_dict` of its own. Implements `Holder`."""

    is_replicated = False

    def __init__(self, value: Stateful) -> None:
        self._value = value
        self._live: object = None

    def state(self) -> object:
        return self._value.state_dict()

    def restore(self, state: object) -> None:
        self._value.load_state_dict(state)

    def like(self, path: Path) -> object:
        if self._live is None:
            self._live = self._value.state_dict()
        found = self._live
        for key in path:
            try:
                found = found[key]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return None
        return found


def holder_of(value: object, objects: Objects) -> Holder | None:
    """Return what saves and restores an object; None if it has no state of its own."""
    face = face_of(value)
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
    value: object, encoded: Json, path: Path, source: Source, objects: Objects
) -> None:
    """Restore a component from its encoded tree.

    Raises:
        UsageError: the objects are not those that were saved.
    """
    holder = holder_of(value, objects)
    if holder is not None:
        held = Held(source, lambda place: holder.like(place[len(path) :]))
        _restore(holder, decoded(encoded, path, held), path)
    elif _has_holder(value, objects):
        _put_parts_back(value, encoded, path, source, objects)
    elif isinstance(value, dict | list):
        _put_values_back(value, decoded(encoded, path, Held(source, _nothing)), path)


def decoded(encoded: Json, path: Path, held: Held) -> object:
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


def _restore(holder: Holder, state: object, path: Path) -> None:
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
    value: object, encoded: Json, path: Path, source: Source, objects: Objects
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
            held = Held(source, _nothing)
            put = cast("dict[object, object]", value)  # a list by index is alike
            put[key] = decoded(saved[key], (*path, key), held)


def _put_values_back(
    value: dict[object, object] | list[object], state: object, path: Path
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


def _nothing(path: Path) -> object:
    return None
