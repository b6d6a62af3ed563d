"""Whole states on disk through orbax: everything from which a program of JAX resumes.

    DIRECTORY/step-120/state     the tree, as orbax writes any
    DIRECTORY/step-120/atoll     its settings, and each leaf's shape and dtype

Rule 1: a step is complete or absent: orbax renames its directory when it is complete.
Rule 2: an existing step is never written again.
Rule 3: another tree, or other settings, are refused with the name of the difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from atoll.errors import CorruptError, UsageError
from atoll.jax.model import Tree, named_leaves, require_here
from atoll.settings import EPOCH_KEYS, RunSettings

T = TypeVar("T")

_STEP = re.compile(r"step-(0|[1-9]\d*)")
_STATE, _METADATA = "state", "atoll"
_VERSION = 1


class Restored(NamedTuple, Generic[T]):
    """A state, and the step that it was saved under."""

    state: T
    step: int


def save(
    directory: str | Path, state: Tree, *, step: int, settings: RunSettings
) -> Path:
    """Save a state whole, and return its directory when it is durable.

    Waits until the state is computed; it may be donated afterwards.

    Raises:
        UsageError: the step exists already, or an array was donated.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step={step!r} must be a whole number of at least 0.")
    path = Path(directory).absolute() / f"step-{step}"
    if path.exists():
        raise UsageError(
            f"{path} exists already, and a step is never written again. "
            "Choose another directory, or resume from the state that `restore` returns."
        )
    leaves = named_leaves(state)
    for name, leaf in leaves:
        require_here(name, leaf)
    metadata = {
        "version": _VERSION,
        "settings": settings.to_dict(),
        "leaves": {name: _kind(leaf) for name, leaf in leaves},
    }
    ocp = _orbax()
    items = {
        _STATE: ocp.args.StandardSave(_arrays(state)),
        _METADATA: ocp.args.JsonSave(metadata),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
        orbax.save(path, args=ocp.args.Composite(**items))
    return path


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
    path = Path(directory).absolute() / f"step-{step}"
    if not path.is_dir():
        raise UsageError(
            f"{path} does not exist. There are {_listed(Path(directory))}."
        )
    metadata = _read(path, _METADATA, _orbax().args.JsonRestore())
    if not isinstance(metadata, dict) or metadata.get("version") != _VERSION:
        raise CorruptError(f"{path} has no metadata of a known version.")
    _require_settings(path, metadata.get("settings"), settings)
    _require_leaves(path, metadata.get("leaves"), like)
    read = _read(path, _STATE, _orbax().args.StandardRestore(_arrays(like)))
    state: T = jax.tree.map(_as_in, like, read)
    return Restored(state, step)


def _arrays(tree: Tree) -> Tree:
    """Return a tree whose numbers of numpy's are arrays: orbax knows no others."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, np.generic) else leaf, tree
    )


def _as_in(template: Any, read: Any) -> Any:
    return read[()] if isinstance(template, np.generic) else read


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]
    except ImportError as exc:
        raise UsageError(
            "States are saved through orbax, which is not installed. "
            "Run: pip install 'atoll[jax-checkpoint]'"
        ) from exc
    return ocp


def _read(path: Path, part: str, item_args: Any) -> Any:
    ocp = _orbax()
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as orbax:
            return orbax.restore(path, args=ocp.args.Composite(**{part: item_args}))[
                part
            ]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        # The tree was compared before, so that it is the files that do not fit.
        raise CorruptError(
            f"{path / part} cannot be read: {type(exc).__name__}: {str(exc)[:200]}"
        ) from exc


def _last_step(directory: Path) -> int:
    steps = _steps(directory)
    if not steps:
        raise UsageError(f"{directory} holds no state that was saved whole.")
    return steps[-1]


def _steps(directory: Path) -> list[int]:
    """Return the steps that are whole: what orbax has not finished has a suffix."""
    matches = [_STEP.fullmatch(path.name) for path in directory.glob("step-*")]
    return sorted(int(match[1]) for match in matches if match)


def _listed(directory: Path) -> str:
    return ", ".join(f"step-{step}" for step in _steps(directory)) or "none"


def _require_settings(path: Path, saved: object, settings: RunSettings) -> None:
    if not isinstance(saved, dict):
        raise CorruptError(f"{path} has no settings.")
    was = RunSettings.from_dict(saved)
    if was.fingerprint == settings.fingerprint:
        return
    before, now = _dotted(was), _dotted(settings)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key) and key not in EPOCH_KEYS:
            raise UsageError(
                f"{key} is {now.get(key)!r} here, and was {before.get(key)!r} when "
                f"{path} was saved. Resume with the settings of the state."
            )


def _dotted(settings: RunSettings) -> dict[str, Any]:
    return {
        f"{table}.{key}": value
        for table, values in settings.to_dict().items()
        for key, value in values.items()
    }


def _require_leaves(path: Path, saved: object, template: Tree) -> None:
    if not isinstance(saved, Mapping):
        raise CorruptError(f"{path} does not list its leaves.")
    live = {name: _kind(leaf) for name, leaf in named_leaves(template)}
    for name in sorted(live.keys() | saved.keys()):
        if live.get(name) != saved.get(name):
            raise UsageError(
                f"{name!r} is {live.get(name, 'absent')} here, and "
                f"{saved.get(name, 'absent')} in {path}. "
                "Give a state of the same kind, from the same model and settings."
            )


def _kind(leaf: Any) -> str:
    """Return the dtype and shape of an array or of a number."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return f"{leaf.dtype} of shape {tuple(leaf.shape)}"
    return f"a {type(leaf).__name__}"
