"""The state of a `diloco` run between two inner steps, and its fragments in flight.

A fragment that is sealed after inner step s is in flight during the overlap_steps inner
steps after it, and lands after the last of them. Fragments of a kind land in the order
in which they were sealed, so their flights are numbered and take slots in turn.

Inner step 1 has as many flights as any later one: empty slots hold zeros, which are
reduced and never land. So the first programs of a run are those of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from atoll.algorithm.schedule import due_fragments, send_step
from atoll.jax.fragments import Kind

Array = Any
"""An array; or, where a state is abstract, its shape, dtype and place."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Flights:
    """The slots of one kind of fragment, as the first axis of every array."""

    sealed: tuple[tuple[Array, ...], ...]
    """For each piece its encoded update: slot, island, then the codec's own axes."""

    at_seal: tuple[Array, ...]
    """For each piece the local weights at the seal, if they are to be rebased."""

    mean: tuple[Array, ...]
    """For each piece the merged update, as far as it has been reduced."""

    squares: Array
    """For each slot and island the squared norm of its update."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drift:
    """How far islands are apart, as of each fragment's last round."""

    norm: Array
    """Norm of each island's update: fragment, island."""

    cosine: Array
    """Cosine between the updates of two islands, for each fragment.

    sum_(i != j) <D_i, D_j> / ((N - 1) sum_i |D_i|^2): the mean over pairs where norms
    are equal. NaN with a trimmed mean, which does not show it.
    """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DilocoState:
    """All that `step` takes and returns; it donates its argument."""

    inner_steps: Any
    """Inner steps made: a host's number, so that asking for it waits for no device."""

    islands: Any
    """The train state, with the islands as a first axis of every array."""

    anchor: Any
    """The agreed parameters in fp32, as the tree that `params_of` selects."""

    velocity: tuple[Any, ...]
    """Trees like the anchor: none with sgd, two with adam, else one."""

    residual: Any
    """The loss of encoding: a tree like the islands' parameters, or None."""

    flights: tuple[Flights, ...]
    """Updates that are in the air, for each kind of fragment."""

    drift: Drift


@dataclass(frozen=True)
class Flight:
    """One send of a fragment."""

    kind: int
    fragment: int
    round: int
    """Which outer step of the fragment it is, from 0."""

    slot: int
    age: int = 0
    """Inner steps since its seal."""


@dataclass(frozen=True)
class Timetable:
    """The schedule: seals, reductions and landings of each inner step."""

    sync_every: int
    num_fragments: int
    overlap_steps: int
    kinds: Sequence[Kind]

    def in_air(self, inner_step: int) -> tuple[Flight, ...]:
        """Return the flights reduced beside an inner step, sorted by kind."""
        flights = [
            self._flight(fragment, inner_step - 1 - age, age)
            for age, phase in self._ages(inner_step)
            for fragment in self._due(phase)
        ]
        return tuple(sorted(flights, key=lambda flight: (flight.kind, flight.age)))

    def landing(self, inner_step: int) -> tuple[Flight, ...]:
        """Return the flights that end after an inner step."""
        sent = inner_step - self.overlap_steps
        return self.sealing(sent)

    def sealing(self, inner_step: int) -> tuple[Flight, ...]:
        """Return the flights that begin after an inner step."""
        if inner_step < 1:
            return ()
        return tuple(
            self._flight(fragment, inner_step) for fragment in self._due(inner_step)
        )

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """The largest number of flights of each kind at the same time."""
        return tuple(
            max(
                sum(
                    (later - sent) % self.sync_every < self.overlap_steps
                    for sent in sends
                )
                for later in sends
            )
            for sends in (self._sends(kind) for kind in self.kinds)
        )

    @cached_property
    def airs(self) -> dict[tuple[int, ...], tuple[Flight, ...]]:
        """For all numbers of flights of each kind that are ever together, an example.

        There is an inner program for each.
        """
        steps = range(1, self.sync_every + 1)
        return {self.count(flights): flights for flights in map(self.in_air, steps)}

    def count(self, flights: Sequence[Flight]) -> tuple[int, ...]:
        """Return how many flights there are of each kind."""
        return tuple(
            sum(flight.kind == kind for flight in flights)
            for kind in range(len(self.kinds))
        )

    def _ages(self, inner_step: int) -> list[tuple[int, int]]:
        return [(age, inner_step - 1 - age) for age in range(self.overlap_steps)]

    def _due(self, inner_step: int) -> tuple[int, ...]:
        return due_fragments(
            (inner_step - 1) % self.sync_every + 1,
            sync_every=self.sync_every,
            num_fragments=self.num_fragments,
        )

    def _flight(self, fragment: int, sent: int, age: int = 0) -> Flight:
        kind, number = self.kind_of[fragment]
        round_number = (sent - 1) // self.sync_every
        sends = round_number * len(self.kinds[kind].fragments) + number
        slot = sends % self.slots[kind] if self.slots[kind] else 0
        return Flight(kind, fragment, round_number, slot, age)

    @cached_property
    def kind_of(self) -> dict[int, tuple[int, int]]:
        return {
            fragment.number: (kind, number)
            for kind, members in enumerate(self.kinds)
            for number, fragment in enumerate(members.fragments)
        }

    def _sends(self, kind: Kind) -> list[int]:
        return [
            send_step(
                fragment.number,
                0,
                sync_every=self.sync_every,
                num_fragments=self.num_fragments,
            )
            for fragment in kind.fragments
        ]
