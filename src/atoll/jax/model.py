"""A tree of parameters: its carried and constant leaves, and their values.

`JaxModel` divides the leaves into those that rounds carry, those that are compared, and
those that each island has for itself. `JaxView` is the tree that the loop passed last.

JAX caches the host's copy of an array with the array, which can then no longer be
donated. So values are read shard by shard, from arrays that have no other user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey
from numpy.typing import NDArray

from atoll.errors import ModelError, UsageError
from atoll.exchange.base import in_parts
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.model import Role
from atoll.weights import FragmentLayout, Layout
from atoll.weights.layout import CARRIED_DTYPES, F32
from atoll.wire import blake3_digest

Names = Mapping[str, str] | Sequence[str]


@dataclass(frozen=True)
class ParamLeaf:
    """One leaf that the run knows, and where it is in the tree."""

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def require_same(self, leaf: Any) -> None:
        """Return when a leaf has the shape and dtype of this one, and values."""
        require_here(self.path, leaf)
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ModelError(
                f"{self.path!r} was an array when the island joined, and is of the "
                f"type {type(leaf).__name__} now. Give the island the whole tree."
            )
        if leaf.shape != self.shape or leaf.dtype != self.dtype:
            raise ModelError(
                f"{self.path!r} was {self.dtype} of shape {self.shape} when the island "
                f"joined, and is {leaf.dtype} of shape {leaf.shape} now. "
                "Give the island the parameters that it joined with, trained."
            )


@dataclass(frozen=True)
class JaxModel:
    """The leaves of a tree by the names that all islands share.

    Integers without dimensions and random keys belong to each island, and appear
    nowhere.
    """

    spec: ModelSpec
    carried: Mapping[str, ParamLeaf]
    """By the run's names."""

    constants: Mapping[str, ParamLeaf]
    """Likewise."""

    structure: Any
    """The treedef of JAX."""

    @classmethod
    def of(
        cls,
        params: Tree,
        *,
        names: Names = (),
        frozen: Iterable[str] = (),
        buffers: Iterable[str] = (),
    ) -> JaxModel:
        """Return the model of a tree; see `join` for the arguments.

        Raises:
            UsageError: a leaf is no array, a path is not in the tree, or nothing is
                trained.
            ModelError: a leaf has a dtype that cannot be carried.
        """
        leaves = named_leaves(params)
        paths = [path for path, _ in leaves]
        roles = _roles(
            paths, _paths_in("frozen", frozen), _paths_in("buffers", buffers)
        )
        specs: dict[str, tuple[ParamLeaf, TensorSpec]] = {}
        for index, name in _in_order(paths, names):
            path, leaf = leaves[index]
            _require_array(path, leaf)
            spec = _spec(name, path, leaf, roles.get(path))
            if spec is not None:
                carried_leaf = ParamLeaf(index, path, leaf.shape, np.dtype(leaf.dtype))
                specs[name] = (carried_leaf, spec)
        carried = {
            n: leaf for n, (leaf, spec) in specs.items() if spec.role != "constant"
        }
        others = {n: leaf for n, (leaf, _) in specs.items() if n not in carried}
        listed = _parameters_first([spec for _, spec in specs.values()])
        if not any(spec.role == "parameter" for spec in listed):
            raise UsageError(
                "The tree has no floating array that is trained: there is nothing to "
                "train. Leave one of them out of frozen= and buffers=."
            )
        structure = jax.tree_util.tree_structure(params)
        return cls(ModelSpec(tuple(listed)), carried, others, structure)

    def leaves_of(self, params: Tree) -> list[Any]:
        """Return the leaves of a tree that is the one of joining, trained.

        Raises:
            UsageError: an array was donated.
            ModelError: it is another tree, or another array is in it.
        """
        leaves, structure = jax.tree_util.tree_flatten(params)
        if structure != self.structure:
            raise ModelError(
                f"The tree is {_short(structure)} now, and was "
                f"{_short(self.structure)} when the island joined. "
                "Give the island the parameters that it joined with, trained."
            )
        for leaf in self.carried.values():
            leaf.require_same(leaves[leaf.index])
        return leaves


class JaxConstants:
    """The constants of a tree in this process. Implements `Constants`."""

    def __init__(self, model: JaxModel, params: Tree) -> None:
        self._constants = model.constants
        self._leaves = jax.tree_util.tree_leaves(params)

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[memoryview]:
        leaf = self._leaves[self._constants[constant.name].index]
        return in_parts(_raw_bytes(leaf), first)


def _in_order(paths: list[str], names: Names) -> list[tuple[int, str]]:
    """Return the leaves in the run's order: leaves in `names` first, in its order."""
    named = names if isinstance(names, Mapping) else {name: name for name in names}
    rank_of = {key: rank for rank, key in enumerate(named)}
    used: set[str] = set()
    entries: dict[str, tuple[int, int, str]] = {}
    for index, path in enumerate(paths):
        key = _key_of(path, named)
        rank, name = len(named), path
        if key is not None:
            used.add(key)
            rank, name = rank_of[key], named[key] + path.removeprefix(key)
        if name in entries:
            raise UsageError(
                f"{path!r} and {paths[entries[name][1]]!r} are both called {name!r}. "
                "Give each leaf a separate name in names=."
            )
        entries[name] = (rank, index, name)
    _require_known("names", set(named) - used, paths)
    return [(index, name) for _, index, name in sorted(entries.values())]


def _key_of(path: str, named: Iterable[str]) -> str | None:
    """Return the longest key that stands for a path: itself, or its beginning."""
    keys = [
        key
        for key in named
        if path == key or (key[-1:] == "." and path.startswith(key))
    ]
    return max(keys, key=len, default=None)


def _roles(
    paths: list[str], frozen: tuple[str, ...], buffers: tuple[str, ...]
) -> dict[str, Role]:
    roles: dict[str, Role] = {}
    requests: list[tuple[str, tuple[str, ...], Role]] = [
        ("frozen", frozen, "constant"),
        ("buffers", buffers, "buffer"),
    ]
    for keyword, keys, role in requests:
        matches = {path: key for path in paths if (key := _key_of(path, keys))}
        _require_known(keyword, set(keys) - set(matches.values()), paths)
        for path in matches:
            if roles.setdefault(path, role) != role:
                raise UsageError(
                    f"{path!r} is in frozen= and in buffers=. Leave it out of one."
                )
    return roles


def _paths_in(keyword: str, paths: Iterable[str]) -> tuple[str, ...]:
    if isinstance(paths, str):
        raise UsageError(
            f"{keyword}={paths!r} is a string. Write {keyword}=[{paths!r}]."
        )
    return tuple(paths)


def _require_known(keyword: str, unknown: set[str], paths: list[str]) -> None:
    for key in sorted(unknown):
        raise UsageError(
            f"{keyword}= has {key!r}, and the tree has no such leaf. "
            f"It has {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}."
        )


def _require_array(path: str, leaf: object) -> None:
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise UsageError(
            f"{path!r} is of the type {type(leaf).__name__}, and only arrays can be "
            "trained. Give the arrays of the model alone, as equinox.partition(model, "
            "equinox.is_array) and flax.nnx.split do."
        )
    require_here(path, leaf)


def _spec(name: str, path: str, leaf: Any, role: Role | None) -> TensorSpec | None:
    """Return how the run knows a leaf; None if it does not."""
    if is_random_key(leaf):
        return None
    is_inexact = jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    if not is_inexact and not leaf.ndim:
        return None
    role = role or ("parameter" if is_inexact else "constant")
    dtype = np.dtype(leaf.dtype).name
    if role != "constant" and dtype not in CARRIED_DTYPES:
        raise ModelError(
            f"{path!r} has dtype {dtype}, and only {', '.join(CARRIED_DTYPES)} can be "
            "carried. Cast it, or list it in frozen=."
        )
    digest = _digest(leaf) if role == "constant" else ""
    return TensorSpec(
        name=name, shape=leaf.shape, dtype=dtype, role=role, digest=digest
    )


def _parameters_first(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Return the specs in torch's order: averaged leaves and tables come last."""
    first = [spec for spec in specs if _is_parameter(spec)]
    return first + [spec for spec in specs if not _is_parameter(spec)]


def _is_parameter(spec: TensorSpec) -> bool:
    is_float = spec.dtype.startswith(("float", "bfloat"))
    return spec.role == "parameter" or (spec.role == "constant" and is_float)


def _digest(leaf: Any) -> str:
    return blake3_digest(_raw_bytes(leaf)).hex()


def _raw_bytes(leaf: Any) -> memoryview:
    """Return the values as they lie in memory, end to end."""
    return on_host(leaf).reshape(-1).view(np.uint8).data


def _short(structure: object) -> str:
    text = str(structure)
    return text if len(text) <= 120 else f"{text[:117]}..."


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
        """The live weights: the tree of the loop, with later outcomes."""
        if self._is_changed:
            structure = self._model.structure
            self._tree = jax.tree_util.tree_unflatten(structure, self._live())
            self._is_changed = False
        return self._tree

    @property
    def was_donated(self) -> bool:
        """Whether an array of the loop was donated, so that it cannot be read."""
        leaves = jax.tree_util.tree_leaves(self.tree)
        return any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves)

    def give(self, params: Tree) -> None:
        """Replace the live weights."""
        self._tree, self._leaves, self._is_changed = params, None, False

    def require_same(self) -> None:
        """Raise unless the live tree has the leaves of the tree at joining."""
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

    def _at(self, name: str) -> ParamLeaf:
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


Tree: TypeAlias = Any
"""A pytree of JAX: any nest of containers, with arrays as leaves."""

Host = NDArray[Any]

_WRAPPED = GetAttrKey("value")
"""Where flax's nnx keeps the array of a variable."""


def named_leaves(tree: Tree) -> list[tuple[str, Any]]:
    """Return every leaf with its path, whose keys are joined by dots.

    Raises:
        UsageError: two leaves have the same path so.
    """
    entries = jax.tree_util.tree_flatten_with_path(tree)[0]
    named = [(path_name(path), leaf) for path, leaf in entries]
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
    return ".".join(map(key_name, keys))


def key_name(key: object) -> str:
    """Return one key of a path as a name."""
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
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

    Waits until the arrays are computed. All copies are begun before one is waited for.
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


def put_like(values: Host, template: Any) -> jax.Array:
    """Return values as an array with the dtype and the sharding of another one."""
    with np.errstate(over="ignore"):  # an anchor beyond fp16 loads as infinity
        # New memory, as JAX may read it later, or keep it for its own.
        cast = values.astype(template.dtype, order="C", copy=True)
    is_placed = isinstance(template, jax.Array) and template.committed
    put: jax.Array = jax.device_put(cast, template.sharding if is_placed else None)
    return put


def with_leaves(tree: Tree, change: Callable[[str, Any], Any]) -> Tree:
    """Return the tree with `change(name, leaf)` in place of each leaf."""
    names = [name for name, _ in named_leaves(tree)]
    leaves, structure = jax.tree_util.tree_flatten(tree)
    changed = [change(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, changed)
