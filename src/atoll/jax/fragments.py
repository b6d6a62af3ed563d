"""Fragments of a parameter tree, with layers that are leaves or that are stacked.

A *stack* is a subtree whose leaves hold all layers of a scanned model along one axis.
Each of its layers has the name that a separate leaf would have: leaf `h.w` of
the stack `h` has `h.0.w`, `h.1.w` and so on. So the split is that of
`algorithm.fragments`, and a stacked tree is split as its unstacked twin is.

Fragments whose pieces have equal shapes are of one *kind*, and share their programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from atoll.algorithm import fragments
from atoll.errors import UsageError
from atoll.settings import SyncSection

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Leaf:
    """One parameter, without an axis for islands."""

    name: str
    shape: Shape
    dtype: str
    spec: tuple[object, ...] = ()
    """How its axes lie on the mesh."""

    stack: str | None = None
    axis: int | None = None
    """Where its layers are, if it is stacked."""


@dataclass(frozen=True)
class Piece:
    """The part of one leaf that belongs to one fragment."""

    leaf: int
    leaf_spec: Leaf
    layers: tuple[int, ...] | None
    """Which layers along the leaf's axis, in order; None is the whole leaf."""

    @property
    def shape(self) -> Shape:
        shape, axis = self.leaf_spec.shape, self.leaf_spec.axis
        if self.layers is None or axis is None:
            return shape
        return (*shape[:axis], len(self.layers), *shape[axis + 1 :])

    @property
    def layer_indices(self) -> NDArray[np.int32] | None:
        return None if self.layers is None else np.array(self.layers, np.int32)


@dataclass(frozen=True)
class Fragment:
    """A part of the tree that synchronises together."""

    number: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Kind:
    """Fragments that share their programs, in the order in which they are sent."""

    fragments: tuple[Fragment, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of any of them: shapes, dtypes and axes are those of all."""
        return self.fragments[0].pieces


def lay_out(
    leaves: Sequence[Leaf], stacks: Mapping[str, int], sync: SyncSection
) -> tuple[Fragment, ...]:
    """Return the fragments of a tree; every element of it is in exactly one.

    Raises:
        UsageError: `stacks` does not describe the tree, or the tree cannot be split
            as the settings ask.
    """
    leaves = stacked(leaves, stacks)
    homes = {name: (leaf, layer) for name, leaf, layer in _tensors(leaves)}
    parts = fragments.split(
        [(name, _shape(leaves[leaf], layer)) for name, leaf, layer in _tensors(leaves)],
        num_fragments=sync.num_fragments,
        order=sync.fragment_order,
        rest=sync.rest,
    )
    laid_out = tuple(
        Fragment(number, tuple(_pieces(leaves, [homes[name] for name in part])))
        for number, part in enumerate(parts)
    )
    require_coverage(leaves, laid_out)
    return laid_out


def kinds(parts: Sequence[Fragment]) -> tuple[Kind, ...]:
    """Return the fragments by the shapes of their pieces."""
    by_shape: dict[object, list[Fragment]] = {}
    for part in parts:
        by_shape.setdefault(_signature(part), []).append(part)
    return tuple(Kind(tuple(members)) for members in by_shape.values())


def take(x: jax.Array, piece: Piece, layers: Any, *, lead: int) -> jax.Array:
    """Return a piece of a leaf that has `lead` axes before its own."""
    if layers is None or piece.leaf_spec.axis is None:
        return x
    return jnp.take(
        x,
        layers,
        axis=piece.leaf_spec.axis + lead,
        mode="clip",
        unique_indices=True,
        indices_are_sorted=True,
    )


def put(
    x: jax.Array, value: jax.Array, piece: Piece, layers: Any, *, lead: int
) -> jax.Array:
    """Return a leaf with another value for one of its pieces."""
    if layers is None or piece.leaf_spec.axis is None:
        return value
    index = (*[slice(None)] * (piece.leaf_spec.axis + lead), layers)
    return x.at[index].set(
        value,
        mode="promise_in_bounds",
        unique_indices=True,
        indices_are_sorted=True,
    )


def stacked(leaves: Sequence[Leaf], stacks: Mapping[str, int]) -> list[Leaf]:
    """Return the leaves with their layer axes; each of `stacks` is a path and an axis.

    Raises:
        UsageError: naming the path of a leaf without that axis, or with another depth.
    """
    result = list(leaves)
    for stack, axis in stacks.items():
        inside = [i for i, leaf in enumerate(leaves) if _is_under(leaf.name, stack)]
        if not inside:
            raise UsageError(
                f"stacks names {stack!r}, and no parameter's path begins so. "
                f"There are: {', '.join(leaf.name for leaf in leaves[:8])}."
            )
        depth = _depth(leaves[inside[0]], stack, axis)
        for index in inside:
            leaf = result[index]
            if _depth(leaf, stack, axis) != depth:
                raise UsageError(
                    f"{leaf.name!r} has {leaf.shape[axis]} layers along axis {axis}, "
                    f"and {leaves[inside[0]].name!r} of the same stack has {depth}. "
                    "Name each stack by its own path."
                )
            if leaf.stack is not None:
                raise UsageError(
                    f"{leaf.name!r} lies in two stacks, {leaf.stack!r} and {stack!r}. "
                    "Name one of them."
                )
            result[index] = replace(leaf, stack=stack, axis=axis)
    return result


def require_coverage(leaves: Sequence[Leaf], parts: Sequence[Fragment]) -> None:
    """Raise unless every layer of every leaf is in exactly one fragment."""
    for index, leaf in enumerate(leaves):
        seen = [
            layer
            for part in parts
            for piece in part.pieces
            if piece.leaf == index
            for layer in (piece.layers or (0,))
        ]
        depth = 1 if leaf.axis is None else leaf.shape[leaf.axis]
        if sorted(seen) != list(range(depth)):
            raise UsageError(
                f"{leaf.name!r} is not covered exactly once: of its {depth} layers "
                f"the fragments have {sorted(seen)}."
            )


def _tensors(leaves: Sequence[Leaf]) -> Iterator[tuple[str, int, int | None]]:
    """Yield name, leaf and layer of every tensor, the layers of a stack in order."""
    seen: set[str] = set()
    for index, leaf in enumerate(leaves):
        if leaf.stack is None or leaf.axis is None:
            yield leaf.name, index, None
        elif leaf.stack not in seen:
            seen.add(leaf.stack)
            inside = [i for i, other in enumerate(leaves) if other.stack == leaf.stack]
            for layer in range(leaf.shape[leaf.axis]):
                for i in inside:
                    rest = leaves[i].name[len(leaf.stack) :] or ".stacked"
                    yield f"{leaf.stack}.{layer}{rest}", i, layer


def _shape(leaf: Leaf, layer: int | None) -> Shape:
    if layer is None or leaf.axis is None:
        return leaf.shape
    return leaf.shape[: leaf.axis] + leaf.shape[leaf.axis + 1 :]


def _pieces(
    leaves: Sequence[Leaf], tensors: Sequence[tuple[int, int | None]]
) -> Iterator[Piece]:
    layers: dict[int, list[int]] = {}
    for leaf, layer in tensors:
        layers.setdefault(leaf, []).extend([] if layer is None else [layer])
    for leaf, numbers in sorted(layers.items()):
        is_full = leaves[leaf].axis is None
        yield Piece(leaf, leaves[leaf], None if is_full else tuple(sorted(numbers)))


def _signature(part: Fragment) -> object:
    return tuple(
        (
            piece.shape,
            piece.leaf_spec.shape,
            piece.leaf_spec.axis,
            piece.leaf_spec.dtype,
            piece.leaf_spec.spec,
        )
        for piece in part.pieces
    )


def _is_under(name: str, stack: str) -> bool:
    return name == stack or name.startswith(f"{stack}.")


def _depth(leaf: Leaf, stack: str, axis: int) -> int:
    if not 0 <= axis < len(leaf.shape):
        raise UsageError(
            f"{leaf.name!r} of the stack {stack!r} has shape {leaf.shape}, without an "
            f"axis {axis} for its layers. Name a path whose leaves all have one."
        )
    return leaf.shape[axis]
