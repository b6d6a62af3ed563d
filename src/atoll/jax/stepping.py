"""One inner step of all islands, with what the schedule asks for after it.

`Dispatched` is told the step by the host and calls the programs that are due, so that a
reduction runs beside inner steps. `inside` is the same within a program of the user's:
there the step is known only when it runs, all that may be due is a branch, and a
reduction waits for its landing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from atoll.algorithm.schedule import send_step
from atoll.jax import acts
from atoll.jax.acts import Held, Where
from atoll.jax.pieces import Fragment
from atoll.jax.plan import Plan
from atoll.jax.programs import Program, Programs, flying
from atoll.jax.state import DilocoState
from atoll.jax.timetable import Flight


class Open:
    """A state as lists of leaves, while one inner step is made."""

    def __init__(self, plan: Plan, state: DilocoState) -> None:
        self._plan = plan
        self._state = state
        self.islands = jax.tree.leaves(state.islands)
        self._anchor = jax.tree.leaves(state.anchor)
        self._velocity = [jax.tree.leaves(each) for each in state.velocity]
        self._residual = jax.tree.leaves(state.residual)
        self.flights = list(state.flights)
        self.drift = state.drift

    def held(self, fragment: Fragment) -> Held:
        """Return the leaves that a fragment is part of."""
        own = [piece.leaf for piece in fragment.pieces]
        return Held(
            local=[self.islands[self._plan.lens.indices[leaf]] for leaf in own],
            anchor=[self._anchor[leaf] for leaf in own],
            velocity=tuple([each[leaf] for leaf in own] for each in self._velocity),
            residual=[self._residual[leaf] for leaf in own] if self._residual else None,
        )

    def take(self, fragment: Fragment, held: Held) -> None:
        """Let a fragment's leaves be these."""
        for index, piece in enumerate(fragment.pieces):
            self.islands[self._plan.lens.indices[piece.leaf]] = held.local[index]
            self._anchor[piece.leaf] = held.anchor[index]
            for mine, theirs in zip(self._velocity, held.velocity, strict=True):
                mine[piece.leaf] = theirs[index]
        self.take_residual(fragment, held.residual)

    def take_residual(self, fragment: Fragment, residual: list[Array] | None) -> None:
        """Let what encoding has lost of a fragment be this."""
        for index, piece in enumerate(fragment.pieces):
            if residual is not None:
                self._residual[piece.leaf] = residual[index]

    def closed(self, inner_steps: Any) -> DilocoState:
        """Return the state after the inner step."""
        tree = self._plan.lens.shape
        return replace(
            self._state,
            inner_steps=inner_steps,
            islands=jax.tree.unflatten(self._plan.whole, self.islands),
            anchor=jax.tree.unflatten(tree, self._anchor),
            velocity=tuple(jax.tree.unflatten(tree, each) for each in self._velocity),
            residual=jax.tree.unflatten(tree, self._residual)
            if self._residual
            else None,
            flights=tuple(self.flights),
            drift=self.drift,
        )


class Dispatched:
    """Makes inner steps by the programs that are due at each."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.programs = Programs(plan)

    def step(self, state: DilocoState, batch: Any, rng: Any) -> tuple[DilocoState, Any]:
        """Return the state after one more inner step, and the islands' metrics."""
        number = int(state.inner_steps) + 1
        opened = Open(self.plan, state)
        metrics = self._advance(opened, batch, rng, self.plan.times.in_air(number))
        if self.plan.overlap_steps:
            for flight in self.plan.times.landing(number):
                self._land(opened, flight)
            for flight in self.plan.times.sealing(number):
                self._seal(opened, flight)
        else:
            for flight in self.plan.times.sealing(number):
                self._round(opened, flight)
        return opened.closed(np.int32(number)), metrics

    def arguments(
        self, flights: Sequence[Any], in_air: Sequence[Flight]
    ) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """Return what the inner program is told of the flights beside it."""
        counts = self.plan.times.count(in_air)
        own = flying(counts)
        of_kind = [[each for each in in_air if each.kind == kind] for kind in own]
        return counts, (
            [flights[kind].sealed for kind in own],
            [flights[kind].mean for kind in own],
            [np.array([each.slot for each in some], np.int32) for some in of_kind],
            [np.array([each.age for each in some], np.int32) for some in of_kind],
        )

    def where(self, flight: Flight) -> Where:
        """Return what a program is told of a flight."""
        fragment = self.plan.fragments[flight.fragment]
        return Where(
            fragment=np.int32(flight.fragment),
            round=np.int32(flight.round),
            slot=np.int32(flight.slot),
            at=[piece.at for piece in fragment.pieces],
        )

    def _advance(
        self, opened: Open, batch: Any, rng: Any, in_air: Sequence[Flight]
    ) -> Any:
        counts, rest = self.arguments(opened.flights, in_air)
        opened.islands, metrics, reduced = self._call(
            self.programs.inner, counts, opened.islands, batch, rng, *rest
        )
        for kind, mean in zip(flying(counts), reduced, strict=True):
            opened.flights[kind] = replace(opened.flights[kind], mean=mean)
        return metrics

    def _seal(self, opened: Open, flight: Flight) -> None:
        fragment = self.plan.fragments[flight.fragment]
        held = opened.held(fragment)
        residual, opened.flights[flight.kind] = self._call(
            self.programs.seal[flight.kind],
            held._replace(velocity=(), residual=None),
            held.residual,
            opened.flights[flight.kind],
            self.where(flight),
        )
        opened.take_residual(fragment, residual)

    def _land(self, opened: Open, flight: Flight) -> None:
        fragment = self.plan.fragments[flight.fragment]
        held, opened.drift = self._call(
            self.programs.land[flight.kind],
            opened.held(fragment),
            opened.flights[flight.kind],
            opened.drift,
            self.where(flight),
        )
        opened.take(fragment, held)

    def _round(self, opened: Open, flight: Flight) -> None:
        fragment = self.plan.fragments[flight.fragment]
        held, opened.drift = self._call(
            self.programs.round[flight.kind],
            opened.held(fragment),
            opened.drift,
            self.where(flight),
        )
        opened.take(fragment, held)

    def _call(self, program: Program, *given: Any) -> Any:
        return self.plan.place.wait(program(*given))


def inside(
    plan: Plan, state: DilocoState, batch: Any, rng: Any
) -> tuple[DilocoState, Any]:
    """Return the same as `Dispatched.step`, traced: one program for every step."""
    number = jnp.asarray(state.inner_steps, jnp.int32) + 1
    opened = Open(plan, state)
    opened.islands, metrics = acts.advance(plan, opened.islands, batch, rng)
    for fragment in plan.fragments:
        if plan.overlap_steps:
            _maybe_land(plan, opened, fragment, number - plan.overlap_steps)
        else:
            _maybe_round(plan, opened, fragment, number)
    if plan.overlap_steps:
        for fragment in plan.fragments:
            _maybe_seal(plan, opened, fragment, number)
    return opened.closed(number), metrics


def _due(plan: Plan, fragment: Fragment, sent: Array) -> tuple[Array, Where, int]:
    """Return whether a fragment was sent after a step, as which flight of its kind."""
    times = plan.times
    first = send_step(
        fragment.number,
        0,
        sync_every=times.sync_every,
        num_fragments=times.num_fragments,
    )
    is_due = (sent >= first) & ((sent - first) % times.sync_every == 0)
    kind, number = times.places[fragment.number]
    round_ = (sent - first) // times.sync_every
    sends = round_ * len(plan.kinds[kind].fragments) + number
    at = [piece.at for piece in fragment.pieces]
    slot = sends % max(1, times.slots[kind])
    return is_due, Where(jnp.int32(fragment.number), round_, slot, at), kind


def _maybe_round(plan: Plan, opened: Open, fragment: Fragment, sent: Array) -> None:
    is_due, where, kind = _due(plan, fragment, sent)
    before = opened.held(fragment), opened.drift
    held, opened.drift = lax.cond(
        is_due,
        lambda held, drift: acts.whole_round(
            plan, plan.kinds[kind], held, drift, where
        ),
        lambda held, drift: (held, drift),
        *before,
    )
    opened.take(fragment, held)


def _maybe_seal(plan: Plan, opened: Open, fragment: Fragment, sent: Array) -> None:
    is_due, where, kind = _due(plan, fragment, sent)
    held = opened.held(fragment)

    def seal(residual: Any, flights: Any) -> tuple[Any, Any]:
        now = held._replace(residual=residual)
        one, left = acts.seal(plan, plan.kinds[kind], now, where.at)
        return left, acts.keep(flights, one, where.slot)

    residual, opened.flights[kind] = lax.cond(
        is_due, seal, lambda *same: same, held.residual, opened.flights[kind]
    )
    opened.take_residual(fragment, residual)


def _maybe_land(plan: Plan, opened: Open, fragment: Fragment, sent: Array) -> None:
    is_due, where, kind = _due(plan, fragment, sent)
    flights = opened.flights[kind]

    def land(held: Held, drift: Any) -> tuple[Held, Any]:
        ages = jnp.arange(plan.overlap_steps)
        reduced, _ = lax.scan(
            lambda all_of, age: (
                acts.reduce(plan, plan.kinds[kind], all_of, where.slot, age),
                None,
            ),
            flights,
            ages,
        )
        return acts.land(plan, plan.kinds[kind], held, reduced, drift, where)

    held, opened.drift = lax.cond(
        is_due, land, lambda *same: same, opened.held(fragment), opened.drift
    )
    opened.take(fragment, held)
