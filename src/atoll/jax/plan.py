"""The plan of a run: shapes, kinds, times and layout, before its first inner step.

Everything here is a function of one island's train state, abstract or not, and of the
arguments of `diloco`.

`find` selects the leaves of a train state that are its parameters. `params_of` only
reads: it is called once on a state of tracers, and the leaves that it returns are
recognised by identity. So every selection can be written back, through dataclasses,
dictionaries, modules and filters alike, and a function that computes instead of
selecting is refused.

On a mesh, islands lie along one axis, and everything else as the user laid it out.
Without a mesh no array gets a layout, and the same programs run on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from atoll.errors import ModelError, UsageError
from atoll.jax import fragments as pieces
from atoll.jax.fragments import Kind, Leaf, Piece
from atoll.jax.model import key_name
from atoll.jax.outer_step import Cut, Law, cut
from atoll.jax.state import DilocoState, Drift, Flights, Timetable
from atoll.settings import RunSettings
from atoll.weights.layout import CARRIED_DTYPES

TrainStep = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class DilocoOptions:
    """The arguments of `diloco`."""

    train_step: TrainStep
    params_of: Callable[[Any], Any]
    settings: RunSettings
    law: Law
    island_mesh: IslandMesh
    stacks: Mapping[str, int]


class DilocoPlan:
    """The fragments, schedule and shardings for one shape of train state."""

    def __init__(self, options: DilocoOptions, state: Any) -> None:
        self.options = options
        self.law, self.island_mesh = options.law, options.island_mesh
        self.lens = find(options.params_of, state)
        flat, self.structure = jax.tree.flatten(state)
        self.specs = [self.island_mesh.spec_of(leaf) for leaf in flat]
        self._abstract = [_abstract(leaf) for leaf in flat]
        sync = options.settings.sync
        self.fragments = pieces.lay_out(self._leaves(), options.stacks, sync)
        self.kinds = pieces.kinds(self.fragments)
        self.times = Timetable(
            sync.sync_every, sync.num_fragments, sync.overlap_steps, self.kinds
        )

    def cut(self, piece: Piece) -> Cut:
        """Return how the reduction of a piece is spread over inner steps."""
        shape = self.law.up.folded(piece.shape)
        if self.law.up.block:
            shape = shape[:1]
        return cut(shape, self.folded_spec(piece), into=max(1, self.overlap_steps))

    @property
    def overlap_steps(self) -> int:
        return self.options.settings.sync.overlap_steps

    def outer_spec(self, leaf: Leaf) -> Spec:
        """Return how a leaf of the outer state lies on the mesh."""
        shape = [0 if i == leaf.axis else size for i, size in enumerate(leaf.shape)]
        return self.island_mesh.outer_spec(leaf.spec, shape)

    def folded_spec(self, piece: Piece) -> Spec:
        """Return how the mean of a folded piece lies on the mesh."""
        if self.is_spread(piece):
            return self.outer_spec(piece.leaf_spec)
        return () if self.law.up.block else piece.leaf_spec.spec

    def is_spread(self, piece: Piece) -> bool:
        """Return whether each device merges only a part of a piece.

        That needs a free axis along which the piece can be cut into slices.
        """
        spec = self.outer_spec(piece.leaf_spec)
        if self.law.up.block or spec == piece.leaf_spec.spec:
            return False
        free = [size for size, axis in zip(piece.shape, spec, strict=False) if not axis]
        return self.overlap_steps <= 1 or max(free, default=0) > 1

    def abstract(self) -> DilocoState:
        """Return the shapes, dtypes and shardings of a whole state."""
        leaves = [
            self._of_islands(leaf.shape, leaf.dtype, spec)
            for leaf, spec in zip(self._abstract, self.specs, strict=True)
        ]
        outer = self._tree([self._outer(leaf) for leaf in self._leaves()])
        count = len(self.fragments)
        return DilocoState(
            inner_steps=jax.ShapeDtypeStruct((), jnp.int32),
            islands=jax.tree.unflatten(self.structure, leaves),
            anchor=outer,
            velocity=(outer,) * self.law.num_velocities,
            residual=self._residual(),
            flights=tuple(
                self._flights(kind, slots)
                for kind, slots in zip(self.kinds, self.times.slots, strict=True)
            ),
            drift=Drift(
                norm=self._array((count, self.island_mesh.num_islands), jnp.float32),
                cosine=self._array((count,), jnp.float32),
            ),
        )

    def first(self, state: Any) -> DilocoState:
        """Return the whole state that one island's train state begins."""
        leaves = jax.tree.leaves(state)
        parameters = self.lens.get(leaves)
        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract()
        )
        copies = [
            jnp.broadcast_to(leaf, (self.island_mesh.num_islands, *jnp.shape(leaf)))
            for leaf in leaves
        ]
        # A copy: the state is donated later, and the caller's array must not be.
        anchor = [jnp.array(leaf, jnp.float32, copy=True) for leaf in parameters]
        return DilocoState(
            inner_steps=zeros.inner_steps,
            islands=jax.tree.unflatten(self.structure, copies),
            anchor=self._tree(anchor),
            velocity=zeros.velocity,
            residual=zeros.residual,
            flights=zeros.flights,
            drift=zeros.drift,
        )

    def _flights(self, kind: Kind, slots: int) -> Flights:
        if not slots:
            return Flights((), (), (), self._array((0,), jnp.float32))
        return Flights(
            sealed=tuple(self._sealed(piece, slots) for piece in kind.pieces),
            at_seal=tuple(
                self._of_islands(
                    piece.shape, piece.leaf_spec.dtype, piece.leaf_spec.spec, slots
                )
                for piece in kind.pieces
                if self.law.rebases
            ),
            mean=tuple(
                self._array(
                    (slots, *self.law.up.folded(piece.shape)),
                    jnp.float32,
                    (None, *self.folded_spec(piece)),
                )
                for piece in kind.pieces
            ),
            squares=self._array((slots, self.island_mesh.num_islands), jnp.float32),
        )

    def _sealed(self, piece: Piece, slots: int) -> tuple[Any, ...]:
        shape = (self.island_mesh.num_islands, *piece.shape)
        encoded = jax.eval_shape(
            lambda x: self.law.up.encode(self.law.up.fold(x, lead=1)),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        )
        spec = () if self.law.up.block else piece.leaf_spec.spec
        return tuple(
            self._of_islands(part.shape[1:], part.dtype, spec, slots)
            for part in encoded
        )

    def _residual(self) -> Any:
        if not self.law.feeds_back:
            return None
        return self._tree(
            [
                self._of_islands(leaf.shape, jnp.float32, leaf.spec)
                for leaf in self._leaves()
            ]
        )

    def _leaves(self) -> list[Leaf]:
        arrays = self.lens.get(self._abstract)
        specs = self.lens.get(self.specs)
        return [
            Leaf(name, tuple(array.shape), jnp.dtype(array.dtype).name, spec)
            for name, array, spec in zip(self.lens.names, arrays, specs, strict=True)
        ]

    def _outer(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        stacked = pieces.stacked([leaf], self._stacks_of(leaf))[0]
        return self._array(leaf.shape, jnp.float32, self.outer_spec(stacked))

    def _stacks_of(self, leaf: Leaf) -> dict[str, int]:
        return {
            stack: axis
            for stack, axis in self.options.stacks.items()
            if leaf.name == stack or leaf.name.startswith(f"{stack}.")
        }

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.lens.shape, leaves)

    def _of_islands(
        self, shape: Sequence[int], dtype: Any, spec: Spec, *slots: int
    ) -> jax.ShapeDtypeStruct:
        """Return an array of all islands, or one for each of the slots."""
        mesh = self.island_mesh
        return self._array(
            (*slots, mesh.num_islands, *shape),
            dtype,
            (*[None] * len(slots), mesh.axis, *spec),
        )

    def _array(
        self, shape: Sequence[int], dtype: Any, spec: Spec = ()
    ) -> jax.ShapeDtypeStruct:
        sharding = self.island_mesh.named(*spec)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = jax.typeof(leaf)  # a number of Python's, too, has the dtype JAX gives it
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


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
    leaves, structure = jax.tree.flatten(state)
    lenses: list[Lens] = []

    def look(traced: list[Any]) -> tuple[()]:
        selected = params_of(jax.tree.unflatten(structure, traced))
        lenses.append(_recognise(selected, traced))
        return ()

    jax.eval_shape(look, leaves)
    return lenses[0]


def name_of(path: Sequence[Any]) -> str:
    """Return a path of a tree as a name: `layers.3.w`."""
    return ".".join(map(key_name, path))


def _recognise(selected: Any, traced: Sequence[Any]) -> Lens:
    index_of = {id(leaf): index for index, leaf in enumerate(traced)}
    paths, shape = jax.tree_util.tree_flatten_with_path(selected)
    names = tuple(name_of(path) for path, _ in paths)
    if not paths:
        raise UsageError("params_of selects nothing. Return the parameters to train.")
    indices: list[int] = []
    for name, (_, leaf) in zip(names, paths, strict=True):
        _require_leaf(name, id(leaf) in index_of)
        _require_dtype(name, leaf)
        indices.append(index_of[id(leaf)])
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


Spec = tuple[Any, ...]
"""One entry per axis of an array: an axis of the mesh, several of them, or None."""


@dataclass(frozen=True)
class IslandMesh:
    """The mesh of a run, and the axis of it along which its islands lie."""

    mesh: Mesh | None
    axis: str
    num_islands: int
    spread_outer: bool = False
    """Whether anchor and velocity lie along the islands' axis as well."""

    def __post_init__(self) -> None:
        if self.mesh is None:
            if self.spread_outer:
                raise UsageError(
                    "spread_outer=True needs a mesh to spread the outer state over. "
                    "Give one, or leave it out."
                )
            return
        if self.axis not in self.mesh.axis_names:
            raise UsageError(
                f"axis={self.axis!r} is none of the mesh's axes "
                f"{self.mesh.axis_names}. Name the one that islands lie along."
            )
        if any(kind != AxisType.Auto for kind in self.mesh.axis_types):
            raise UsageError(
                f"the mesh's axes are {self.mesh.axis_types}, and programs leave it to "
                "the compiler where things lie. Make it with "
                "axis_types=(jax.sharding.AxisType.Auto,) * number of axes."
            )
        if self.num_islands % self.width:
            raise UsageError(
                f"num_islands={self.num_islands} must be a multiple of the "
                f"{self.width} places along the mesh's axis {self.axis!r}."
            )

    @property
    def width(self) -> int:
        """Places along the islands' axis."""
        return 1 if self.mesh is None else int(self.mesh.shape[self.axis])

    def wait(self, results: Any) -> Any:
        """Return a program's results; on several host devices, after they are ready.

        XLA has one thread per host device. Queued programs can occupy all threads while
        they wait for each other's results: a deadlock without an error.
        """
        if self.mesh is None or self.mesh.size == 1:
            return results
        is_host = self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(results) if is_host else results

    def spec_of(self, leaf: Any) -> Spec:
        """Return the partition spec of one island's array on the mesh.

        Raises:
            UsageError: it already lies along the islands' axis.
        """
        sharding = getattr(leaf, "sharding", None)  # numpy arrays and tracers have none
        if self.mesh is None or not isinstance(sharding, NamedSharding):
            return ()
        if sharding.mesh.axis_names != self.mesh.axis_names:
            return ()
        spec = tuple(sharding.spec)
        if self.axis in _axes(spec):
            raise UsageError(
                f"an array of one island lies along the islands' own axis "
                f"{self.axis!r}: {sharding.spec}. Give each island's state whole."
            )
        return spec

    def outer_spec(self, spec: Spec, shape: Sequence[int]) -> Spec:
        """Return how a leaf of the outer state lies: as the parameter, or spread."""
        if not self.spread_outer:
            return spec
        padded = [*spec, *[None] * (len(shape) - len(spec))]
        free = [
            axis
            for axis, size in enumerate(shape)
            if padded[axis] is None and size and size % self.width == 0
        ]
        if not free:
            return spec
        padded[max(free, key=lambda axis: shape[axis])] = self.axis
        return tuple(padded)

    def named(self, *spec: Any) -> NamedSharding | None:
        """Return the sharding of an array with these axes."""
        return (
            None
            if self.mesh is None
            else NamedSharding(self.mesh, PartitionSpec(*spec))
        )

    def apart(self, x: Array) -> Array:
        """Return `x`, whose first axis is the islands', sharded along that axis."""
        return self._pin(x, self.axis)

    def together(self, x: Array, spec: Spec | None = None) -> Array:
        """Return `x`, whose first axis is the islands', replicated along that axis.

        With `spec`, the other axes are sharded by it.
        """
        return self._pin(x, None, spec)

    def _pin(self, x: Array, first: str | None, spec: Spec | None = None) -> Array:
        if self.mesh is None:
            return x
        # The other axes are left to the compiler, which keeps them where they are.
        free: Spec = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
        full_spec = PartitionSpec(first, *(free if spec is None else spec))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, full_spec))


def _axes(spec: Spec) -> set[Any]:
    names: set[Any] = set()
    for axes in spec:
        names |= set(axes) if isinstance(axes, tuple) else {axes}
    return names
