"""The compiled programs of a run.

    inner    an inner step of every island; beside it, a slice of the reduction of
             every fragment in the air. Neither half reads what the other writes.
    seal     a fragment's updates are encoded into a slot
    land     the outer step of a fragment, and what the islands adopt of it
    round    seal, the whole reduction and land at once, where nothing overlaps

There is one of each for every kind of fragment, and one inner step for every
combination of kinds that is ever in the air. Leaves that a program changes are donated
to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from atoll.jax import acts
from atoll.jax.acts import Arrays, Held, Where
from atoll.jax.plan import Plan
from atoll.jax.state import Drift, Flights

Program = Any
"""What `jax.jit` returns: called with arrays, lowered with shapes."""


class Programs:
    """The programs of a plan, compiled when they are first needed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._whole = plan.abstract()
        kinds = range(len(plan.kinds))
        islands = [leaf.sharding for leaf in jax.tree.leaves(self._whole.islands)]
        self.inner = self._jit(
            self._inner, (islands, None, None), donated=(1, 5), static=0
        )
        self.seal = [
            self._jit(
                partial(self._seal, kind),
                (self._held(kind).residual, _places(self._whole.flights[kind])),
                donated=(1, 2),
            )
            for kind in kinds
        ]
        after = [(self._held(kind), _places(self._whole.drift)) for kind in kinds]
        self.land = [
            self._jit(partial(self._land, kind), after[kind], donated=(0,))
            for kind in kinds
        ]
        self.round = [
            self._jit(partial(self._round, kind), after[kind], donated=(0,))
            for kind in kinds
        ]

    def _jit(
        self,
        function: Callable[..., Any],
        places: Any,
        *,
        donated: tuple[int, ...],
        static: int | None = None,
    ) -> Program:
        """Compile with outputs where their inputs were, if there is a mesh."""
        return jax.jit(
            function,
            static_argnums=static,
            donate_argnums=donated,
            out_shardings=None if self._plan.place.mesh is None else places,
        )

    def _held(self, kind: int) -> Held:
        """Return the places of what a fragment of this kind holds."""
        leaves = jax.tree.leaves(self._whole.islands)
        local = self._plan.lens.get(leaves)
        anchor = jax.tree.leaves(self._whole.anchor)
        residual = jax.tree.leaves(self._whole.residual)
        own = [piece.leaf for piece in self._plan.kinds[kind].pieces]
        outer = [anchor[leaf].sharding for leaf in own]
        return Held(
            local=[local[leaf].sharding for leaf in own],
            anchor=outer,
            velocity=tuple(outer for _ in self._whole.velocity),
            residual=[residual[leaf].sharding for leaf in own] if residual else None,
        )

    def _inner(
        self,
        counts: tuple[int, ...],
        islands: Arrays,
        batch: Any,
        rng: Any,
        sealed: Sequence[Any],
        reduced: Sequence[Any],
        slots: Sequence[Array],
        ages: Sequence[Array],
    ) -> tuple[Arrays, Any, tuple[Any, ...]]:
        moved, metrics = acts.advance(self._plan, islands, batch, rng)
        out = []
        for i, kind in enumerate(flying(counts)):
            flights = Flights(sealed[i], (), reduced[i], jnp.zeros(0))
            for j in range(counts[kind]):
                flights = acts.reduce(
                    self._plan, self._plan.kinds[kind], flights, slots[i][j], ages[i][j]
                )
            out.append(flights.mean)
        return moved, metrics, tuple(out)

    def _seal(
        self,
        kind: int,
        held: Held,
        residual: Arrays | None,
        flights: Flights,
        where: Where,
    ) -> tuple[Arrays | None, Flights]:
        held = held._replace(residual=residual)
        one, left = acts.seal(self._plan, self._plan.kinds[kind], held, where.at)
        return left, acts.keep(flights, one, where.slot)

    def _land(
        self, kind: int, held: Held, flights: Flights, drift: Drift, where: Where
    ) -> tuple[Held, Drift]:
        return acts.land(
            self._plan, self._plan.kinds[kind], held, flights, drift, where
        )

    def _round(
        self, kind: int, held: Held, drift: Drift, where: Where
    ) -> tuple[Held, Drift]:
        return acts.whole_round(self._plan, self._plan.kinds[kind], held, drift, where)


def flying(counts: Sequence[int]) -> list[int]:
    """Return the kinds of which something is in the air."""
    return [kind for kind, count in enumerate(counts) if count]


def _places(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
