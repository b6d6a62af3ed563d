"""The live weights of an island of JAX: the tree that the loop gave it last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from atoll.jax.leaves import Host, Tree, copy_out, put_like, require_here
from atoll.jax.model import JaxModel, Leaf
from atoll.weights import FragmentLayout, Layout
from atoll.weights.layout import F32


class JaxView:
    """A tree that changes only here, between inner steps. Implements `ParameterView`.

    A tree that is given is looked at when a fragment is due, and not before: so an
    inner step that synchronises nothing costs nothing.
    """

    def __init__(self, model: JaxModel, params: Tree) -> None:
        self._model, self._tree = model, params
        self._leaves: list[Any] | None = None
        self._is_changed = False
        self._layout: Layout = ()

    @property
    def tree(self) -> Tree:
        """The live weights: what was given, unless an outcome has changed it."""
        if self._is_changed:
            structure = self._model.structure
            self._tree = jax.tree_util.tree_unflatten(structure, self._live())
            self._is_changed = False
        return self._tree

    @property
    def was_donated(self) -> bool:
        """Whether an array that was given is there no more, so it cannot be read."""
        leaves = jax.tree_util.tree_leaves(self.tree)
        return any(isinstance(it, jax.Array) and it.is_deleted() for it in leaves)

    def give(self, params: Tree) -> None:
        """Let these be the live weights."""
        self._tree, self._leaves, self._is_changed = params, None, False

    def require_same(self) -> None:
        """Return when what was given is the tree of joining, trained."""
        self._live()

    def lay_out(self, layout: Layout) -> None:
        self._layout = layout

    def read(self, fragment: int, out: F32) -> None:
        leaves, layout = self._live(), self._layout[fragment]
        parts = by_name(layout, out)
        pairs = [(leaves[self._at(name).index], part) for name, part in parts.items()]
        for name, (leaf, _) in zip(parts, pairs, strict=True):
            require_here(name, leaf)  # it may have been donated since it was looked at
        copy_out(pairs)

    def write(self, fragment: int, values: F32) -> None:
        leaves = self._live()
        for name, part in by_name(self._layout[fragment], values).items():
            index = self._at(name).index
            leaves[index] = put_like(part, leaves[index])
        self._is_changed = True

    def tree_of(self, fragments: Sequence[F32]) -> Tree:
        """Return the tree with these values of all fragments; the live one stays."""
        leaves = jax.tree_util.tree_leaves(self.tree)
        for layout, flat in zip(self._layout, fragments, strict=True):
            for name, part in by_name(layout, flat).items():
                index = self._at(name).index
                leaves[index] = put_like(part, leaves[index])
        return jax.tree_util.tree_unflatten(self._model.structure, leaves)

    def _at(self, name: str) -> Leaf:
        return self._model.carried[name]

    def _live(self) -> list[Any]:
        if self._leaves is None:
            self._leaves = self._model.leaves_of(self._tree)
        return self._leaves


def by_name(layout: FragmentLayout, flat: F32) -> Mapping[str, Host]:
    """Return the arrays of a fragment's flat vector, which they share."""
    parts = np.split(flat, layout.offsets[1:-1])
    return {
        tensor.name: part.reshape(tensor.shape)
        for tensor, part in zip(layout.tensors, parts, strict=True)
    }
