"""All that is known of a run before its first inner step: shapes, kinds, times, places.

Everything here is a function of one island's train state, abstract or not, and of what
`diloco` was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from atoll.jax import lens as lenses
from atoll.jax import pieces
from atoll.jax.law import Cut, Law, cut
from atoll.jax.pieces import Kind, Leaf, Piece
from atoll.jax.placing import Place, Spec
from atoll.jax.state import DilocoState, Drift, Flights
from atoll.jax.timetable import Timetable
from atoll.settings import RunSettings

TrainStep = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Given:
    """What `diloco` was given."""

    train_step: TrainStep
    params_of: Callable[[Any], Any]
    settings: RunSettings
    law: Law
    place: Place
    stacks: Mapping[str, int]


class Plan:
    """How one shape of train state is synchronised."""

    def __init__(self, given: Given, state: Any) -> None:
        self.given = given
        self.law, self.place = given.law, given.place
        self.lens = lenses.find(given.params_of, state)
        flat, self.whole = jax.tree.flatten(state)
        self.specs = [self.place.spec_of(leaf) for leaf in flat]
        self._abstract = [_abstract(leaf) for leaf in flat]
        sync = given.settings.sync
        found = pieces.lay_out(self._leaves(), given.stacks, sync)
        self.kinds = pieces.kinds(found)
        self.fragments = found
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
        return self.given.settings.sync.overlap_steps

    def outer_spec(self, leaf: Leaf) -> Spec:
        """Return how a leaf of the outer state lies on the mesh."""
        shape = [0 if i == leaf.axis else size for i, size in enumerate(leaf.shape)]
        return self.place.outer_spec(leaf.spec, shape)

    def folded_spec(self, piece: Piece) -> Spec:
        """Return how the mean of a folded piece lies on the mesh."""
        if self.is_spread(piece):
            return self.outer_spec(piece.of)
        return () if self.law.up.block else piece.of.spec

    def is_spread(self, piece: Piece) -> bool:
        """Return whether each place merges a part of a piece, and not all of it.

        Only where an axis is left along which it can be cut into slices.
        """
        spec = self.outer_spec(piece.of)
        if self.law.up.block or spec == piece.of.spec:
            return False
        free = [size for size, axis in zip(piece.shape, spec, strict=False) if not axis]
        return self.overlap_steps <= 1 or max(free, default=0) > 1

    def abstract(self) -> DilocoState:
        """Return the shapes, dtypes and places of a whole state."""
        islands = self.given.place.num_islands
        leaves = [
            self._array((islands, *leaf.shape), leaf.dtype, (self.place.axis, *spec))
            for leaf, spec in zip(self._abstract, self.specs, strict=True)
        ]
        outer = self._tree([self._outer(leaf) for leaf in self._leaves()])
        count = len(self.fragments)
        return DilocoState(
            inner_steps=jax.ShapeDtypeStruct((), jnp.int32),
            islands=jax.tree.unflatten(self.whole, leaves),
            anchor=outer,
            velocity=(outer,) * self.law.num_velocities,
            residual=self._residual(),
            flights=tuple(
                self._flights(kind, slots)
                for kind, slots in zip(self.kinds, self.times.slots, strict=True)
            ),
            drift=Drift(
                norm=self._array((count, islands), jnp.float32),
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
            jnp.broadcast_to(leaf, (self.place.num_islands, *jnp.shape(leaf)))
            for leaf in leaves
        ]
        # A copy: what is returned will be consumed, and the caller's array must not be.
        anchor = [jnp.array(leaf, jnp.float32, copy=True) for leaf in parameters]
        return DilocoState(
            inner_steps=zeros.inner_steps,
            islands=jax.tree.unflatten(self.whole, copies),
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
                self._array(
                    (slots, self.place.num_islands, *piece.shape),
                    piece.of.dtype,
                    (None, self.place.axis, *piece.of.spec),
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
            squares=self._array((slots, self.place.num_islands), jnp.float32),
        )

    def _sealed(self, piece: Piece, slots: int) -> tuple[Any, ...]:
        islands = self.place.num_islands
        shape = (islands, *piece.shape)
        encoded = jax.eval_shape(
            lambda x: self.law.up.encode(self.law.up.fold(x, lead=1)),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        )
        spec = () if self.law.up.block else piece.of.spec
        return tuple(
            self._array(
                (slots, *each.shape), each.dtype, (None, self.place.axis, *spec)
            )
            for each in encoded
        )

    def _residual(self) -> Any:
        if not self.law.feeds_back:
            return None
        return self._tree(
            [
                self._array(
                    (self.place.num_islands, *leaf.shape),
                    jnp.float32,
                    (self.place.axis, *leaf.spec),
                )
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
            for stack, axis in self.given.stacks.items()
            if leaf.name == stack or leaf.name.startswith(f"{stack}.")
        }

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.lens.shape, leaves)

    def _array(
        self, shape: Sequence[int], dtype: Any, spec: Spec = ()
    ) -> jax.ShapeDtypeStruct:
        place = self.place.named(*spec)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=place)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        leaf = jax.typeof(leaf)  # a number of Python's, too, has the dtype JAX gives it
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
