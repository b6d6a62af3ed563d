"""Which fragments are in the air at an inner step, which land, and in which slot.

A fragment that is sealed after inner step s is in the air during the overlap_steps
inner steps after it, and lands after the last of them. Sends keep their order within a
kind, so that its flights are numbered and take slots in turn.

The air before inner step 1 is that of any later round: slots that nobody has filled
hold zeros, which are reduced and never land. So the first programs of a run are those
of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from atoll.algorithm.schedule import due_fragments, send_step
from atoll.jax.pieces import Kind


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
    """What happens at each inner step."""

    sync_every: int
    num_fragments: int
    overlap_steps: int
    kinds: Sequence[Kind]

    def in_air(self, inner_step: int) -> tuple[Flight, ...]:
        """Return what is reduced beside an inner step, those of a kind together."""
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
        return tuple(self._flight(each, inner_step) for each in self._due(inner_step))

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """How many flights of each kind are in the air at once, at most."""
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
        kind, number = self.places[fragment]
        round_number = (sent - 1) // self.sync_every
        sends = round_number * len(self.kinds[kind].fragments) + number
        slot = sends % self.slots[kind] if self.slots[kind] else 0
        return Flight(kind, fragment, round_number, slot, age)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        return {
            fragment.number: (kind, number)
            for kind, each in enumerate(self.kinds)
            for number, fragment in enumerate(each.fragments)
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
