"""DiLoCo over islands that share a program: `diloco` makes `init` and `step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.errors import UsageError
from atoll.jax.law import Law
from atoll.jax.lowering import lower
from atoll.jax.placing import Place
from atoll.jax.plan import Given, Plan, TrainStep
from atoll.jax.state import DilocoState
from atoll.jax.stepping import Dispatched, inside
from atoll.settings import RunSettings


def diloco(
    train_step: TrainStep,
    params_of: Callable[[Any], Any],
    settings: RunSettings,
    *,
    num_islands: int,
    mesh: Mesh | None = None,
    axis: str = "island",
    stacks: Mapping[str, int] | None = None,
    spread_outer: bool = False,
) -> tuple[Init, Step]:
    """Return how islands begin, and how all of them make one inner step.

    Args:
        train_step: a pure `(state, batch, rng) -> (state, metrics)` of one island, with
            any optimizer inside.
        params_of: selects the parameters of one island's state: leaves of it, as any
            tree. What it selects is carried; all else stays the island's own.
        mesh: its axis `axis` has the islands, or as many of them as it has places; the
            other axes are the train step's. Without one, all are on one device.
        stacks: the path of each subtree whose leaves hold the layers of a scanned
            model, and along which of their axes: `{"decoder.layers": 0}`.
        spread_outer: lay anchor and velocity along the islands' axis as well.

    Raises:
        UsageError: the settings ask for what a program cannot do, or the mesh has no
            room for the islands.
    """
    if num_islands < 1:
        raise UsageError(f"num_islands={num_islands} must be at least 1.")
    place = Place(mesh, axis, num_islands, spread_outer)
    law = Law(settings)
    given = Given(train_step, params_of, settings, law, place, dict(stacks or {}))
    return Init(given), Step(given)


class Init:
    """Makes the first state of a run from one island's train state."""

    def __init__(self, given: Given) -> None:
        self._given = given

    def __call__(self, state: Any) -> DilocoState:
        """Return a state in which all islands have this train state.

        Its arrays lie along the mesh as they did, the islands first. `state` stays.
        """
        plan = Plan(self._given, state)
        if _is_traced(state):
            return plan.first(state)
        places = jax.tree.map(lambda leaf: leaf.sharding, plan.abstract())
        is_placed = self._given.place.mesh is not None
        first = jax.jit(plan.first, out_shardings=places if is_placed else None)(state)
        first = self._given.place.wait(first)
        return replace(first, inner_steps=np.int32(0))

    def abstract(self, state: Any) -> DilocoState:
        """Return the shapes, dtypes and places of such a state, which may be abstract.

        For lowering without memory, and for what restores a checkpoint.
        """
        return Plan(self._given, state).abstract()


class Step:
    """Makes one inner step of all islands, and what the schedule asks for after it."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._made: dict[Any, Dispatched] = {}

    def __call__(
        self, state: DilocoState, batch: Any, rng: Any = None
    ) -> tuple[DilocoState, dict[str, Any]]:
        """Return the next state and metrics; `state` is consumed.

        Args:
            batch: a tree whose arrays have the islands as their first axis.
            rng: one key, from which each island gets its own; None gives them None.

        Returns:
            `metrics["islands"]` is what the train step measured, islands first;
            `pseudo_norm` (fragment, island) and `cosine` (fragment) are those of each
            fragment's last round.
        """
        if _is_traced((state, batch, rng)):
            state, metrics = inside(self._plan(state), state, batch, rng)
        else:
            state, metrics = self._dispatched(state).step(state, batch, rng)
        told = {"islands": metrics, "pseudo_norm": state.drift.norm}
        return state, told | {"cosine": state.drift.cosine}

    def lower(self, state: DilocoState, batch: Any, rng: Any = None) -> dict[str, Any]:
        """Return every program of the schedule, lowered for arguments like these.

        They may be abstract. The names are `inner`, followed by how many flights of
        each kind are beside it, and `seal`, `land` or `round` with their kind.
        """
        made = Dispatched(self._plan(state))
        return lower(made, state, batch, rng)

    def _dispatched(self, state: DilocoState) -> Dispatched:
        leaves, tree = jax.tree.flatten(state.islands)
        key = tree, tuple(leaf.shape for leaf in leaves)
        if key not in self._made:
            self._made[key] = Dispatched(self._plan(state))
        return self._made[key]

    def _plan(self, state: DilocoState) -> Plan:
        return Plan(self._given, jax.tree.map(self._one_island, state.islands))

    def _one_island(self, leaf: Any) -> jax.ShapeDtypeStruct:
        if leaf.shape[:1] != (self._given.place.num_islands,):
            raise UsageError(
                f"an array of shape {leaf.shape} has not the "
                f"{self._given.place.num_islands} islands as its first axis. "
                "Begin with what `init` returns."
            )
        sharding = getattr(leaf, "sharding", None)  # a tracer may have none
        if isinstance(sharding, NamedSharding) and self._given.place.mesh is not None:
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        else:
            sharding = None
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
