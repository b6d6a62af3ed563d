"""A tree of parameters as the run sees it: what is carried, compared, or each one's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from atoll.errors import ModelError, UsageError
from atoll.exchange.constants import in_parts
from atoll.jax.leaves import Tree, is_random_key, named_leaves, on_host, require_here
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.messages import Role
from atoll.weights.layout import CARRIED_DTYPES
from atoll.wire import blake3_digest

Names = Mapping[str, str] | Sequence[str]


@dataclass(frozen=True)
class Leaf:
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
    carried: Mapping[str, Leaf]
    """By the run's names."""

    constants: Mapping[str, Leaf]
    """Likewise."""

    structure: Any
    """What JAX calls a treedef."""

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
        roles = _roles(paths, _words("frozen", frozen), _words("buffers", buffers))
        specs: dict[str, tuple[Leaf, TensorSpec]] = {}
        for index, name in _in_order(paths, names):
            path, leaf = leaves[index]
            _require_array(path, leaf)
            spec = _spec(name, path, leaf, roles.get(path))
            if spec is not None:
                place = Leaf(index, path, leaf.shape, np.dtype(leaf.dtype))
                specs[name] = (place, spec)
        carried = {n: at for n, (at, spec) in specs.items() if spec.role != "constant"}
        others = {n: at for n, (at, _) in specs.items() if n not in carried}
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
        self._places = model.constants
        self._leaves = jax.tree_util.tree_leaves(params)

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[memoryview]:
        leaf = self._leaves[self._places[constant.name].index]
        return in_parts(_raw_bytes(leaf), first)


def _in_order(paths: list[str], names: Names) -> list[tuple[int, str]]:
    """Return the leaves as the run lists them: what is named first, in that order."""
    named = names if isinstance(names, Mapping) else {name: name for name in names}
    places = {key: place for place, key in enumerate(named)}
    used: set[str] = set()
    found: dict[str, tuple[int, int, str]] = {}
    for index, path in enumerate(paths):
        key = _key_of(path, named)
        place, name = len(named), path
        if key is not None:
            used.add(key)
            place, name = places[key], named[key] + path.removeprefix(key)
        if name in found:
            raise UsageError(
                f"{path!r} and {paths[found[name][1]]!r} are both called {name!r}. "
                "Give each leaf a name of its own in names=."
            )
        found[name] = (place, index, name)
    _require_known("names", set(named) - used, paths)
    return [(index, name) for _, index, name in sorted(found.values())]


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
    asked: list[tuple[str, tuple[str, ...], Role]] = [
        ("frozen", frozen, "constant"),
        ("buffers", buffers, "buffer"),
    ]
    for what, keys, role in asked:
        found = {path: key for path in paths if (key := _key_of(path, keys))}
        _require_known(what, set(keys) - set(found.values()), paths)
        for path in found:
            if roles.setdefault(path, role) != role:
                raise UsageError(
                    f"{path!r} is in frozen= and in buffers=. Leave it out of one."
                )
    return roles


def _words(what: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise UsageError(f"{what}={given!r} is a word. Write {what}=[{given!r}].")
    return tuple(given)


def _require_known(what: str, unknown: set[str], paths: list[str]) -> None:
    for key in sorted(unknown):
        raise UsageError(
            f"{what}= has {key!r}, and the tree has no such leaf. "
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
    """Return the specs in torch's order: what is averaged, or a table, comes last."""
    first = [each for each in specs if _is_parameter(each)]
    return first + [each for each in specs if not _is_parameter(each)]


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
