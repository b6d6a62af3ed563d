"""Every program that a schedule will ever call, ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atoll.jax.state import DilocoState
from atoll.jax.stepping import Dispatched, Open
from atoll.jax.timetable import Flight


def lower(made: Dispatched, state: DilocoState, batch: Any, rng: Any) -> dict[str, Any]:
    """Return the programs by name, lowered for arguments like these."""
    programs = dict(_inner(made, state, batch, rng))
    opened = Open(made.plan, state)
    for kind, members in enumerate(made.plan.kinds):
        fragment = members.fragments[0]
        held = opened.held(fragment)
        where = made.where(Flight(kind, fragment.number, 0, 0))
        flights = opened.flights[kind]
        if not made.plan.overlap_steps:
            programs[f"round {kind}"] = made.programs.round[kind].lower(
                held, opened.drift, where
            )
            continue
        programs[f"seal {kind}"] = made.programs.seal[kind].lower(
            held._replace(velocity=(), residual=None), held.residual, flights, where
        )
        programs[f"land {kind}"] = made.programs.land[kind].lower(
            held, flights, opened.drift, where
        )
    return programs


def _inner(
    made: Dispatched, state: DilocoState, batch: Any, rng: Any
) -> Iterator[tuple[str, Any]]:
    """Yield the inner step beside every combination of flights there is."""
    islands = Open(made.plan, state).islands
    for in_air in made.plan.times.airs.values():
        counts, rest = made.arguments(state.flights, in_air)
        lowered = made.programs.inner.lower(counts, islands, batch, rng, *rest)
        yield (
            " ".join(["inner", *map(str, counts)]) if any(counts) else "inner",
            lowered,
        )
