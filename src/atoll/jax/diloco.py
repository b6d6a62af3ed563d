"""DiLoCo over islands that share a program: `diloco` makes `init` and `step`.

`Dispatcher` gets the step from the host and calls the programs that are due, so that a
reduction runs beside inner steps. `inside` is the same within a program of the user:
its step is a traced value, everything that may be due is a branch, and a reduction runs
when its fragment lands. `lower` returns every program of a schedule ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.algorithm.schedule import send_step
from atoll.errors import UsageError
from atoll.jax.fragments import Fragment
from atoll.jax.outer_step import Law
from atoll.jax.plan import DilocoOptions, DilocoPlan, IslandMesh, TrainStep
from atoll.jax.programs import (
    FlightAddress,
    FragmentArrays,
    Program,
    Programs,
    advance,
    in_flight,
    keep,
    land,
    reduce,
    seal,
    whole_round,
)
from atoll.jax.state import DilocoState, Flight
from atoll.settings import RunSettings


class OpenState:
    """A state as lists of leaves, while one inner step is made."""

    def __init__(self, plan: DilocoPlan, state: DilocoState) -> None:
        self._plan = plan
        self._state = state
        self.islands = jax.tree.leaves(state.islands)
        self._anchor = jax.tree.leaves(state.anchor)
        self._velocity = [jax.tree.leaves(tree) for tree in state.velocity]
        self._residual = jax.tree.leaves(state.residual)
        self.flights = list(state.flights)
        self.drift = state.drift

    def arrays_of(self, fragment: Fragment) -> FragmentArrays:
        """Return the leaves that a fragment is part of."""
        indices = [piece.leaf for piece in fragment.pieces]
        return FragmentArrays(
            local=[self.islands[self._plan.lens.indices[leaf]] for leaf in indices],
            anchor=[self._anchor[leaf] for leaf in indices],
            velocity=tuple(
                [leaves[leaf] for leaf in indices] for leaves in self._velocity
            ),
            residual=[self._residual[leaf] for leaf in indices]
            if self._residual
            else None,
        )

    def take(self, fragment: Fragment, arrays: FragmentArrays) -> None:
        """Replace the leaves of a fragment."""
        for index, piece in enumerate(fragment.pieces):
            self.islands[self._plan.lens.indices[piece.leaf]] = arrays.local[index]
            self._anchor[piece.leaf] = arrays.anchor[index]
            for before, after in zip(self._velocity, arrays.velocity, strict=True):
                before[piece.leaf] = after[index]
        self.take_residual(fragment, arrays.residual)

    def take_residual(self, fragment: Fragment, residual: list[Array] | None) -> None:
        """Replace the residual of a fragment."""
        for index, piece in enumerate(fragment.pieces):
            if residual is not None:
                self._residual[piece.leaf] = residual[index]

    def closed(self, inner_steps: Any) -> DilocoState:
        """Return the state after the inner step."""
        tree = self._plan.lens.shape
        return replace(
            self._state,
            inner_steps=inner_steps,
            islands=jax.tree.unflatten(self._plan.structure, self.islands),
            anchor=jax.tree.unflatten(tree, self._anchor),
            velocity=tuple(
                jax.tree.unflatten(tree, leaves) for leaves in self._velocity
            ),
            residual=jax.tree.unflatten(tree, self._residual)
            if self._residual
            else None,
            flights=tuple(self.flights),
            drift=self.drift,
        )


class Dispatcher:
    """Makes inner steps by the programs that are due at each."""

    def __init__(self, plan: DilocoPlan) -> None:
        self.plan = plan
        self.programs = Programs(plan)

    def step(self, state: DilocoState, batch: Any, rng: Any) -> tuple[DilocoState, Any]:
        """Return the state after one more inner step, and the islands' metrics."""
        number = int(state.inner_steps) + 1
        opened = OpenState(self.plan, state)
        metrics = self._advance(opened, batch, rng, self.plan.times.in_air(number))
        if self.plan.overlap_steps:
            for flight in self.plan.times.landing(number):
                program = self.programs.land[flight.kind]
                self._change(opened, flight, program, opened.flights[flight.kind])
            for flight in self.plan.times.sealing(number):
                self._seal(opened, flight)
        else:
            for flight in self.plan.times.sealing(number):
                self._change(opened, flight, self.programs.round[flight.kind])
        return opened.closed(np.int32(number)), metrics

    def arguments(
        self, flights: Sequence[Any], in_air: Sequence[Flight]
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Return the inner program's arguments for the flights that it reduces."""
        counts = self.plan.times.count(in_air)
        kinds = in_flight(counts)
        by_kind = [
            [flight for flight in in_air if flight.kind == kind] for kind in kinds
        ]
        return counts, (
            [flights[kind].sealed for kind in kinds],
            [flights[kind].mean for kind in kinds],
            [
                np.array([flight.slot for flight in group], np.int32)
                for group in by_kind
            ],
            [np.array([flight.age for flight in group], np.int32) for group in by_kind],
        )

    def address_of(self, flight: Flight) -> FlightAddress:
        """Return the address of a flight, as an argument of a program."""
        fragment = self.plan.fragments[flight.fragment]
        return FlightAddress(
            fragment=np.int32(flight.fragment),
            round=np.int32(flight.round),
            slot=np.int32(flight.slot),
            layers=[piece.layer_indices for piece in fragment.pieces],
        )

    def _advance(
        self, opened: OpenState, batch: Any, rng: Any, in_air: Sequence[Flight]
    ) -> Any:
        counts, rest = self.arguments(opened.flights, in_air)
        opened.islands, metrics, reduced = self._call(
            self.programs.inner, counts, opened.islands, batch, rng, *rest
        )
        for kind, mean in zip(in_flight(counts), reduced, strict=True):
            opened.flights[kind] = replace(opened.flights[kind], mean=mean)
        return metrics

    def _seal(self, opened: OpenState, flight: Flight) -> None:
        fragment = self.plan.fragments[flight.fragment]
        arrays = opened.arrays_of(fragment)
        residual, opened.flights[flight.kind] = self._call(
            self.programs.seal[flight.kind],
            arrays._replace(velocity=(), residual=None),
            arrays.residual,
            opened.flights[flight.kind],
            self.address_of(flight),
        )
        opened.take_residual(fragment, residual)

    def _change(
        self, opened: OpenState, flight: Flight, program: Program, *flights: Any
    ) -> None:
        """Change a fragment's leaves by a program that takes an outer step."""
        fragment = self.plan.fragments[flight.fragment]
        arrays, opened.drift = self._call(
            program,
            opened.arrays_of(fragment),
            *flights,
            opened.drift,
            self.address_of(flight),
        )
        opened.take(fragment, arrays)

    def _call(self, program: Program, *args: Any) -> Any:
        return self.plan.island_mesh.wait(program(*args))


def inside(
    plan: DilocoPlan, state: DilocoState, batch: Any, rng: Any
) -> tuple[DilocoState, Any]:
    """Return the same as `Dispatcher.step`, traced: one program for every step."""
    number = jnp.asarray(state.inner_steps, jnp.int32) + 1
    opened = OpenState(plan, state)
    opened.islands, metrics = advance(plan, opened.islands, batch, rng)
    for fragment in plan.fragments:
        if plan.overlap_steps:
            _maybe_land(plan, opened, fragment, number - plan.overlap_steps)
        else:
            _maybe_round(plan, opened, fragment, number)
    if plan.overlap_steps:
        for fragment in plan.fragments:
            _maybe_seal(plan, opened, fragment, number)
    return opened.closed(number), metrics


def _due(
    plan: DilocoPlan, fragment: Fragment, sent: Array
) -> tuple[Array, FlightAddress, int]:
    """Return whether a fragment was sent after a step, as which flight of its kind."""
    times = plan.times
    first = send_step(
        fragment.number,
        0,
        sync_every=times.sync_every,
        num_fragments=times.num_fragments,
    )
    is_due = (sent >= first) & ((sent - first) % times.sync_every == 0)
    kind, number = times.kind_of[fragment.number]
    round_ = (sent - first) // times.sync_every
    sends = round_ * len(plan.kinds[kind].fragments) + number
    layers = [piece.layer_indices for piece in fragment.pieces]
    slot = sends % max(1, times.slots[kind])
    return is_due, FlightAddress(jnp.int32(fragment.number), round_, slot, layers), kind


def _maybe_round(
    plan: DilocoPlan, opened: OpenState, fragment: Fragment, sent: Array
) -> None:
    is_due, address, kind = _due(plan, fragment, sent)
    before = opened.arrays_of(fragment), opened.drift
    arrays, opened.drift = lax.cond(
        is_due,
        lambda arrays, drift: whole_round(
            plan, plan.kinds[kind], arrays, drift, address
        ),
        lambda arrays, drift: (arrays, drift),
        *before,
    )
    opened.take(fragment, arrays)


def _maybe_seal(
    plan: DilocoPlan, opened: OpenState, fragment: Fragment, sent: Array
) -> None:
    is_due, address, kind = _due(plan, fragment, sent)
    arrays = opened.arrays_of(fragment)

    def seal_due(residual: Any, flights: Any) -> tuple[Any, Any]:
        now = arrays._replace(residual=residual)
        sealed, new_residual = seal(plan, plan.kinds[kind], now, address.layers)
        return new_residual, keep(flights, sealed, address.slot)

    residual, opened.flights[kind] = lax.cond(
        is_due, seal_due, lambda *same: same, arrays.residual, opened.flights[kind]
    )
    opened.take_residual(fragment, residual)


def _maybe_land(
    plan: DilocoPlan, opened: OpenState, fragment: Fragment, sent: Array
) -> None:
    is_due, address, kind = _due(plan, fragment, sent)
    flights = opened.flights[kind]

    def land_due(arrays: FragmentArrays, drift: Any) -> tuple[FragmentArrays, Any]:
        ages = jnp.arange(plan.overlap_steps)
        reduced, _ = lax.scan(
            lambda carry, age: (
                reduce(plan, plan.kinds[kind], carry, address.slot, age),
                None,
            ),
            flights,
            ages,
        )
        return land(plan, plan.kinds[kind], arrays, reduced, drift, address)

    arrays, opened.drift = lax.cond(
        is_due, land_due, lambda *same: same, opened.arrays_of(fragment), opened.drift
    )
    opened.take(fragment, arrays)


def lower(
    dispatcher: Dispatcher, state: DilocoState, batch: Any, rng: Any
) -> dict[str, Any]:
    """Return the programs by name, lowered for arguments like these."""
    programs = dict(_inner(dispatcher, state, batch, rng))
    opened = OpenState(dispatcher.plan, state)
    for kind, members in enumerate(dispatcher.plan.kinds):
        fragment = members.fragments[0]
        arrays = opened.arrays_of(fragment)
        address = dispatcher.address_of(Flight(kind, fragment.number, 0, 0))
        flights = opened.flights[kind]
        if not dispatcher.plan.overlap_steps:
            programs[f"round {kind}"] = dispatcher.programs.round[kind].lower(
                arrays, opened.drift, address
            )
            continue
        programs[f"seal {kind}"] = dispatcher.programs.seal[kind].lower(
            arrays._replace(velocity=(), residual=None),
            arrays.residual,
            flights,
            address,
        )
        programs[f"land {kind}"] = dispatcher.programs.land[kind].lower(
            arrays, flights, opened.drift, address
        )
    return programs


def _inner(
    dispatcher: Dispatcher, state: DilocoState, batch: Any, rng: Any
) -> Iterator[tuple[str, Any]]:
    """Yield the inner step beside every combination of flights there is."""
    islands = OpenState(dispatcher.plan, state).islands
    for in_air in dispatcher.plan.times.airs.values():
        counts, rest = dispatcher.arguments(state.flights, in_air)
        lowered = dispatcher.programs.inner.lower(counts, islands, batch, rng, *rest)
        yield (
            " ".join(["inner", *map(str, counts)]) if any(counts) else "inner",
            lowered,
        )


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
) -> tuple[Init, DilocoStep]:
    """Return `init` and `step`: the first state, and one inner step of all islands.

    Args:
        train_step: a pure `(state, batch, rng) -> (state, metrics)` of one island, with
            any optimizer inside.
        params_of: selects the parameters of one island's state: leaves of it, as any
            tree. Selected leaves are
            synchronised; all others stay the island's own.
        mesh: its axis `axis` has the islands, or several per position; the other
            axes are the train step's. None puts all islands on one device.
        stacks: the path of each subtree whose leaves hold the layers of a scanned
            model, and along which of their axes: `{"decoder.layers": 0}`.
        spread_outer: lay anchor and velocity along the islands' axis as well.

    Raises:
        UsageError: a setting is not supported in a program, or the mesh does not fit
            the islands.
    """
    if num_islands < 1:
        raise UsageError(f"num_islands={num_islands} must be at least 1.")
    island_mesh = IslandMesh(mesh, axis, num_islands, spread_outer)
    law = Law(settings)
    options = DilocoOptions(
        train_step, params_of, settings, law, island_mesh, dict(stacks or {})
    )
    return Init(options), DilocoStep(options)


class Init:
    """Makes the first state of a run from one island's train state."""

    def __init__(self, options: DilocoOptions) -> None:
        self._options = options

    def __call__(self, state: Any) -> DilocoState:
        """Return a state in which all islands have this train state.

        Its arrays keep their sharding, with the islands first. `state` is not changed.
        """
        plan = DilocoPlan(self._options, state)
        if _is_traced(state):
            return plan.first(state)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, plan.abstract())
        is_placed = self._options.island_mesh.mesh is not None
        first = jax.jit(plan.first, out_shardings=shardings if is_placed else None)(
            state
        )
        first = self._options.island_mesh.wait(first)
        return replace(first, inner_steps=np.int32(0))

    def abstract(self, state: Any) -> DilocoState:
        """Return the shapes, dtypes and shardings of such a state, abstract or not.

        For lowering without memory, and for restoring a checkpoint.
        """
        return DilocoPlan(self._options, state).abstract()


class DilocoStep:
    """Makes one inner step of all islands, and the outer steps due after it."""

    def __init__(self, options: DilocoOptions) -> None:
        self._options = options
        self._dispatchers: dict[Any, Dispatcher] = {}

    def __call__(
        self, state: DilocoState, batch: Any, rng: Any = None
    ) -> tuple[DilocoState, dict[str, Any]]:
        """Return the next state and metrics; `state` is consumed.

        Args:
            batch: a tree whose arrays have the islands as their first axis.
            rng: one key, from which each island gets its own; None gives them None.

        Returns:
            `metrics["islands"]` has the metrics of the train step, islands first;
            `pseudo_norm` (fragment, island) and `cosine` (fragment) are those of each
            fragment's last round.
        """
        if _is_traced((state, batch, rng)):
            state, metrics = inside(self._plan(state), state, batch, rng)
        else:
            state, metrics = self._dispatched(state).step(state, batch, rng)
        results = {"islands": metrics, "pseudo_norm": state.drift.norm}
        return state, results | {"cosine": state.drift.cosine}

    def lower(self, state: DilocoState, batch: Any, rng: Any = None) -> dict[str, Any]:
        """Return every program of the schedule, lowered for arguments like these.

        They may be abstract. The names are `inner`, followed by how many flights of
        each kind are beside it, and `seal`, `land` or `round` with their kind.
        """
        dispatcher = Dispatcher(self._plan(state))
        return lower(dispatcher, state, batch, rng)

    def _dispatched(self, state: DilocoState) -> Dispatcher:
        leaves, tree = jax.tree.flatten(state.islands)
        key = tree, tuple(leaf.shape for leaf in leaves)
        if key not in self._dispatchers:
            self._dispatchers[key] = Dispatcher(self._plan(state))
        return self._dispatchers[key]

    def _plan(self, state: DilocoState) -> DilocoPlan:
        return DilocoPlan(self._options, jax.tree.map(self._one_island, state.islands))

    def _one_island(self, leaf: Any) -> jax.ShapeDtypeStruct:
        if leaf.shape[:1] != (self._options.island_mesh.num_islands,):
            raise UsageError(
                f"an array of shape {leaf.shape} has not the "
                f"{self._options.island_mesh.num_islands} islands as its first axis. "
                "Start from a state that `init` returned."
            )
        sharding = getattr(leaf, "sharding", None)  # a tracer may have none
        if (
            isinstance(sharding, NamedSharding)
            and self._options.island_mesh.mesh is not None
        ):
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
        else:
            sharding = None
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _is_traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
