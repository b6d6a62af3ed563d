"""Which leaves of a train state are its parameters, and how to write them back.

`params_of` is only ever a reading: it is called once on a state of tracers, and the
leaves that it returns are recognised by identity. So every selection can be written
back, through dataclasses, dictionaries, modules and filters alike, and a function that
computes instead of selecting is found out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from atoll.errors import ModelError, UsageError

CARRIED_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Lens:
    """The parameters among the leaves of a train state."""

    indices: tuple[int, ...]
    """Which leaves of the state they are, in the order of the parameter tree."""

    names: tuple[str, ...]
    """Their paths, joined by dots as PyTorch joins names."""

    shape: Any
    """The structure of the parameter tree."""

    def get(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the parameters among the leaves of a state."""
        return [leaves[index] for index in self.indices]

    def put(self, leaves: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
        """Return the leaves of a state with other parameters."""
        changed = list(leaves)
        for index, value in zip(self.indices, parameters, strict=True):
            changed[index] = value
        return changed


def find(params_of: Callable[[Any], Any], state: Any) -> Lens:
    """Return where `params_of` looks in a state like this one.

    Raises:
        UsageError: it selects nothing, one leaf twice, or something that is no leaf.
        ModelError: a parameter has a dtype that cannot be carried.
    """
    leaves, whole = jax.tree.flatten(state)
    found: list[Lens] = []

    def look(traced: list[Any]) -> tuple[()]:
        selected = params_of(jax.tree.unflatten(whole, traced))
        found.append(_recognise(selected, traced))
        return ()

    jax.eval_shape(look, leaves)
    return found[0]


def name_of(path: Sequence[Any]) -> str:
    """Return a path of a tree as a name: `layers.3.w`."""
    return ".".join(_step(key) for key in path)


def _step(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):  # JAX has one class of key for each kind of tree
            return str(getattr(key, attribute))
    return str(key)


def _recognise(selected: Any, traced: Sequence[Any]) -> Lens:
    place = {id(leaf): index for index, leaf in enumerate(traced)}
    paths, shape = jax.tree_util.tree_flatten_with_path(selected)
    names = tuple(name_of(path) for path, _ in paths)
    if not paths:
        raise UsageError("params_of selects nothing. Return the parameters to train.")
    indices: list[int] = []
    for name, (_, leaf) in zip(names, paths, strict=True):
        _require_leaf(name, id(leaf) in place)
        _require_dtype(name, leaf)
        indices.append(place[id(leaf)])
    for index, times in Counter(indices).items():
        if times > 1:
            raise UsageError(
                f"params_of selects {names[indices.index(index)]!r} {times} times. "
                "Select each parameter once, a tied one under its first name."
            )
    return Lens(tuple(indices), names, shape)


def _require_leaf(name: str, is_leaf: bool) -> None:
    if not is_leaf:
        raise UsageError(
            f"params_of returns something for {name!r} that is no leaf of the state, "
            "so that it could not be written back. Select leaves; compute nothing."
        )


def _require_dtype(name: str, leaf: Any) -> None:
    if jnp.dtype(leaf.dtype).name not in CARRIED_DTYPES:
        raise ModelError(
            f"{name!r} has dtype {leaf.dtype}, and only {', '.join(CARRIED_DTYPES)} "
            "can be carried. Let params_of leave it out, or cast it."
        )
