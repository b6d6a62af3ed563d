"""Whole states on disk through orbax: everything that a program of JAX goes on from.

    DIRECTORY/step-120/state     the tree, as orbax writes any
    DIRECTORY/step-120/atoll     what it is of: settings, each leaf's shape and dtype

Rule 1: a step is there whole or not at all: orbax renames it when it is complete.
Rule 2: a step that is there is never written again.
Rule 3: what is restored is what was saved: another tree, or other settings, are refused
        with the name of what differs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from atoll.errors import CorruptError, UsageError
from atoll.jax.leaves import Tree, named_leaves, require_here
from atoll.settings import EPOCH_KEYS, RunSettings

T = TypeVar("T")

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_STATE, _ABOUT = "state", "atoll"
_VERSION = 1


class Restored(NamedTuple, Generic[T]):
    """A state, and the step that it was saved under."""

    state: T
    step: int


def save(
    directory: str | Path, state: Tree, *, step: int, settings: RunSettings
) -> Path:
    """Save a state whole, and return its directory when it is durable.

    Waits for what computes the state, which may be donated afterwards.

    Raises:
        UsageError: the step is there already, or an array was donated.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step={step!r} must be a whole number of at least 0.")
    place = Path(directory).absolute() / f"step-{step}"
    if place.exists():
        raise UsageError(
            f"{place} is there already, and a step is never written again. "
            "Choose another directory, or go on from what `restore` returns."
        )
    leaves = named_leaves(state)
    for name, leaf in leaves:
        require_here(name, leaf)
    about = {
        "version": _VERSION,
        "settings": settings.to_dict(),
        "leaves": {name: _kind(leaf) for name, leaf in leaves},
    }
    ocp = _orbax()
    given = {
        _STATE: ocp.args.StandardSave(_arrays(state)),
        _ABOUT: ocp.args.JsonSave(about),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        orbax.save(place, args=ocp.args.Composite(**given))
    return place


def restore(
    directory: str | Path,
    like: T,
    *,
    settings: RunSettings,
    step: int | None = None,
) -> Restored[T]:
    """Return the state of a step, None being the last; its arrays lie as in `like`.

    Args:
        like: a state of the same kind, or its shapes, dtypes and shardings. It is not
            changed.

    Raises:
        UsageError: there is no such step, or it is of another tree or other settings.
        CorruptError: it cannot be read.
    """
    step = _last_step(Path(directory)) if step is None else step
    place = Path(directory).absolute() / f"step-{step}"
    if not place.is_dir():
        raise UsageError(f"{place} is not there. There are {_listed(Path(directory))}.")
    about = _read(place, _ABOUT, _orbax().args.JsonRestore())
    if not isinstance(about, dict) or about.get("version") != _VERSION:
        raise CorruptError(f"{place} says nothing of what it is of, or in another way.")
    _require_settings(place, about.get("settings"), settings)
    _require_leaves(place, about.get("leaves"), like)
    read = _read(place, _STATE, _orbax().args.StandardRestore(_arrays(like)))
    state: T = jax.tree.map(_as_in, like, read)
    return Restored(state, step)


def _arrays(tree: Tree) -> Tree:
    """Return a tree whose numbers of numpy's are arrays: orbax knows no others."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, tree
    )


def _as_in(like: Any, read: Any) -> Any:
    return read[()] if isinstance(like, np.generic) else read


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]
    except ImportError as exc:
        raise UsageError(
            "States are saved through orbax, which is not installed. "
            "Run: pip install 'atoll[jax-checkpoint]'"
        ) from exc
    return ocp


def _read(place: Path, part: str, how: Any) -> Any:
    ocp = _orbax()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
            return orbax.restore(place, args=ocp.args.Composite(**{part: how}))[part]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        # The tree was compared before, so that it is the files that do not fit.
        raise CorruptError(
            f"{place / part} cannot be read: {type(exc).__name__}: {str(exc)[:200]}"
        ) from exc


def _last_step(directory: Path) -> int:
    steps = _steps(directory)
    if not steps:
        raise UsageError(f"{directory} holds no state that was saved whole.")
    return steps[-1]


def _steps(directory: Path) -> list[int]:
    """Return the steps that are whole: what orbax has not finished has a suffix."""
    found = [_STEP.fullmatch(path.name) for path in directory.glob("step-*")]
    return sorted(int(each[1]) for each in found if each)


def _listed(directory: Path) -> str:
    return ", ".join(f"step-{step}" for step in _steps(directory)) or "none"


def _require_settings(place: Path, saved: object, settings: RunSettings) -> None:
    if not isinstance(saved, dict):
        raise CorruptError(f"{place} has no settings.")
    was = RunSettings.from_dict(saved)
    if was.fingerprint == settings.fingerprint:
        return
    before, now = _dotted(was), _dotted(settings)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and key not in EPOCH_KEYS:
            raise UsageError(
                f"{key} is {now.get(key)!r} here, and was {before.get(key)!r} when "
                f"{place} was saved. Go on with the settings of the state."
            )


def _dotted(settings: RunSettings) -> dict[str, Any]:
    return {
        f"{table}.{key}": value
        for table, values in settings.to_dict().items()
        for key, value in values.items()
    }


def _require_leaves(place: Path, saved: object, like: Tree) -> None:
    if not isinstance(saved, Mapping):
        raise CorruptError(f"{place} does not list its leaves.")
    here = {name: _kind(leaf) for name, leaf in named_leaves(like)}
    for name in sorted(here.keys() | saved.keys()):
        if here.get(name) != saved.get(name):
            raise UsageError(
                f"{name!r} is {here.get(name, 'absent')} here, and "
                f"{saved.get(name, 'absent')} in {place}. "
                "Give a state of the same kind, from the same model and settings."
            )


def _kind(leaf: Any) -> str:
    """Return the dtype and shape of an array or of a number."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return f"{leaf.dtype} of shape {tuple(leaf.shape)}"
    return f"a {type(leaf).__name__}"
