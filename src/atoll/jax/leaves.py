"""The leaves of a tree by name, and their values on the host.

JAX keeps the host's copy of an array with the array, which can then not be donated any
more. So values are read shard by shard, from arrays that nobody else has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey
from numpy.typing import NDArray

from atoll.errors import UsageError

Tree: TypeAlias = Any
"""What JAX calls a pytree: any nest of containers, with arrays as leaves."""

Host = NDArray[Any]

_WRAPPED = GetAttrKey("value")
"""Where flax's nnx keeps the array of a variable."""


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """Return every leaf with its path, whose keys are joined by dots.

    Raises:
        UsageError: two leaves have the same path so.
    """
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = [(path_name(path), leaf) for path, leaf in found]
    seen: set[str] = set()
    for name, _ in named:
        if name in seen:
            raise UsageError(
                f"Two leaves of the tree are called {name!r}, when the keys that lead "
                "to them are joined by dots. Rename one of the keys."
            )
        seen.add(name)
    return named


def path_name(path: Sequence[Any]) -> str:
    """Return a path of JAX's as one word.

    >>> path_name((DictKey("layers"), SequenceKey(0), GetAttrKey("weight")))
    'layers.0.weight'
    """
    keys = path[:-1] if len(path) > 1 and path[-1] == _WRAPPED else path
    return ".".join(map(_word, keys))


def _word(key: object) -> str:
    match key:
        case DictKey(key=word) | FlattenedIndexKey(key=word):
            return str(word)
        case SequenceKey(idx=index):
            return str(index)
        case GetAttrKey(name=name):
            return str(name)
        case _:
            return str(key)


def is_random_key(leaf: object) -> bool:
    """Return whether a leaf is a key of `jax.random.key`, which has no numbers."""
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def require_here(name: str, leaf: object) -> None:
    """Return when this process can read a leaf.

    Raises:
        UsageError: it was donated, is being traced, or is spread over processes.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise UsageError(
            f"{name!r} is being traced and has no values. "
            "Call the island outside of jit, between two calls of the train step."
        )
    if not isinstance(leaf, jax.Array):
        return
    if leaf.is_deleted():
        raise UsageError(
            f"{name!r} was deleted: it was donated to a function after the island was "
            "given it. Give the island what the train step returned."
        )
    if not leaf.is_fully_addressable:
        raise UsageError(
            f"{name!r} is spread over {len(leaf.sharding.device_set)} devices of "
            "several processes, and an island of JAX is one process. "
            "Use atoll.jax.diloco over a mesh axis, or one island per process."
        )


def copy_out(pairs: Sequence[tuple[Any, Host]]) -> None:
    """Copy each array into host memory of its shape, cast to that memory's dtype.

    Waits for what computes the arrays. All copies are begun before one is waited for.
    """
    pieces = [
        (piece, into[index]) for array, into in pairs for piece, index in _of(array)
    ]
    for piece, _ in pieces:
        if isinstance(piece, jax.Array):
            piece.copy_to_host_async()
    for piece, into in pieces:
        into[...] = np.asarray(piece)


def _of(array: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the pieces that make up an array, each once, with their place in it."""
    if not isinstance(array, jax.Array):
        yield array, ...
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield shard.data, (*shard.index, ...)


def on_host(array: Any) -> Host:
    """Return the values of an array in new memory, in C order."""
    values = np.empty(array.shape, array.dtype)
    copy_out([(array, values)])
    return values


def put_like(values: Host, like: Any) -> jax.Array:
    """Return values as an array with the dtype and the sharding of another one."""
    with np.errstate(over="ignore"):  # an anchor beyond fp16 loads as infinity
        # New memory, as JAX may read it later, or keep it for its own.
        cast = values.astype(like.dtype, order="C", copy=True)
    is_placed = isinstance(like, jax.Array) and like.committed
    put: jax.Array = jax.device_put(cast, like.sharding if is_placed else None)
    return put


def with_leaves(tree: Tree, change: Callable[[str, Any], Any]) -> Tree:
    """Return the tree with what `change` makes of each leaf and its name."""
    names = [name for name, _ in named_leaves(tree)]
    leaves, structure = jax.tree_util.tree_flatten(tree)
    changed = [change(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, changed)
