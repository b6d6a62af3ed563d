"""What programs are made of: pure functions over the leaves of a fragment.

Which fragment, which layers, slot and age are arguments, so that fragments of one kind
share their programs: see `pieces.kinds`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from atoll.jax.law import Cut
from atoll.jax.pieces import Kind, Piece, put, take
from atoll.jax.plan import Plan
from atoll.jax.state import Drift, Flights

Arrays = list[Array]
At = list[Any]
"""For each piece its layers, or None."""


class Held(NamedTuple):
    """What programs read and write of the leaves that a fragment is part of."""

    local: Arrays
    anchor: Arrays
    velocity: tuple[Arrays, ...]
    residual: Arrays | None


class Where(NamedTuple):
    """Which flight a program is about."""

    fragment: Any
    round: Any
    slot: Any
    at: At


def advance(plan: Plan, islands: Arrays, batch: Any, rng: Any) -> tuple[Arrays, Any]:
    """Return the islands' states and metrics after an inner step of each."""
    place = plan.place
    keys = None if rng is None else jax.random.split(rng, place.num_islands)
    state = jax.tree.unflatten(plan.whole, islands)
    moved, metrics = _over_islands(plan)(state, batch, keys)
    return jax.tree.leaves(moved), metrics


def _over_islands(plan: Plan) -> Any:
    """Return the train step of all islands; none can read what another has.

    On a mesh that is by construction: the islands' axis is one that the compiler does
    not partition along. The other axes are left to it.
    """
    each = jax.vmap(plan.given.train_step)
    place = plan.place
    if place.mesh is None:
        return each
    first = PartitionSpec(place.axis)
    return jax.shard_map(
        each,
        mesh=place.mesh,
        in_specs=first,
        out_specs=first,
        axis_names={place.axis},
        check_vma=False,
    )


def seal(plan: Plan, kind: Kind, held: Held, at: At) -> tuple[Flights, Arrays | None]:
    """Return one slot of flights with the fragment's updates, and the residuals."""
    sealed, at_seal, residuals = [], [], []
    squares = jnp.zeros(plan.place.num_islands)
    for index, piece in enumerate(kind.pieces):
        local = take(held.local[index], piece, at[index], lead=1)
        anchor = take(held.anchor[index], piece, at[index], lead=0)
        before = None if held.residual is None else held.residual[index]
        own = None if before is None else take(before, piece, at[index], lead=1)
        sent, left = plan.law.seal(anchor, local, own, piece.of.dtype)
        sealed.append(tuple(plan.place.apart(each)[None] for each in sent))
        squares += _squares(plan.law.up.decode(sent), lead=1)
        if plan.law.rebases:
            at_seal.append(local[None])
        if before is not None and left is not None:
            residuals.append(put(before, left, piece, at[index], lead=1))
    mean = [jnp.zeros((1, *plan.law.up.folded(p.shape))) for p in kind.pieces]
    flights = Flights(tuple(sealed), tuple(at_seal), tuple(mean), squares[None])
    return flights, None if held.residual is None else residuals


def reduce(
    plan: Plan, kind: Kind, flights: Flights, slot: Array, age: Array
) -> Flights:
    """Return flights of which one has been reduced by the slice of its age."""
    means = list(flights.mean)
    for index, piece in enumerate(kind.pieces):
        part = plan.cut(piece)
        values = _exchange(plan, piece, part, flights.sealed[index], slot, age)
        merged = plan.law.merge(values)
        means[index] = _write(means[index], merged, part, slot, age)
    return replace(flights, mean=tuple(means))


def land(
    plan: Plan, kind: Kind, held: Held, flights: Flights, drift: Drift, where: Where
) -> tuple[Held, Drift]:
    """Return what a fragment's leaves are after its outer step, and the drift."""
    local, anchor = list(held.local), list(held.anchor)
    velocity = [list(each) for each in held.velocity]
    length = jnp.float32(0.0)
    for index, piece in enumerate(kind.pieces):
        at = where.at[index]
        mean = plan.law.up.unfold(flights.mean[index][where.slot], piece.shape, lead=0)
        length += _squares(mean, lead=0)
        before = tuple(take(each[index], piece, at, lead=0) for each in velocity)
        now, after = plan.law.step(
            take(anchor[index], piece, at, lead=0), mean, before, where.round
        )
        sealed = flights.at_seal[index][where.slot] if plan.law.rebases else None
        mine = plan.law.adopt(now, take(local[index], piece, at, lead=1), sealed)
        anchor[index] = put(anchor[index], now, piece, at, lead=0)
        local[index] = put(local[index], mine, piece, at, lead=1)
        for each, value in zip(velocity, after, strict=True):
            each[index] = put(each[index], value, piece, at, lead=0)
    moved = Held(local, anchor, tuple(velocity), held.residual)
    squares = flights.squares[where.slot]
    return moved, _apart(plan, drift, squares, length, where.fragment)


def whole_round(
    plan: Plan, kind: Kind, held: Held, drift: Drift, where: Where
) -> tuple[Held, Drift]:
    """Return what a fragment's leaves are after a round without overlap."""
    flights, residual = seal(plan, kind, held, where.at)
    first = jnp.int32(0)
    flights = reduce(plan, kind, flights, first, first)
    held = held._replace(residual=residual)
    return land(plan, kind, held, flights, drift, where._replace(slot=first))


def keep(flights: Flights, one: Flights, slot: Array) -> Flights:
    """Return flights with one of them in its slot."""
    return jax.tree.map(
        lambda all_slots, new: lax.dynamic_update_index_in_dim(
            all_slots, new[0], slot, 0
        ),
        flights,
        one,
    )


def _exchange(
    plan: Plan,
    piece: Piece,
    part: Cut,
    sealed: tuple[Array, ...],
    slot: Array,
    age: Array,
) -> Array:
    """Return a slice of all islands' updates, decoded where they are to be merged.

    What travels is what is encoded: the islands' axis is gathered before decoding.
    """
    spec = plan.folded_spec(piece) if plan.is_spread(piece) else None
    slices = []
    for each in sealed:
        starts: list[Any] = [slot, *[0] * (each.ndim - 1)]
        starts[part.axis + 2] = part.start(age)
        sizes = [1, *each.shape[1:]]
        sizes[part.axis + 2] = part.size
        mine = plan.place.apart(lax.dynamic_slice(each, starts, sizes)[0])
        slices.append(plan.place.together(mine, spec))
    return plan.law.up.decode(tuple(slices))


def _write(mean: Array, merged: Array, part: Cut, slot: Array, age: Array) -> Array:
    starts = [slot, *[jnp.int32(0)] * merged.ndim]
    starts[part.axis + 1] = part.start(age)
    return lax.dynamic_update_slice(mean, merged[None], starts)


def _squares(x: Array, *, lead: int) -> Array:
    return jnp.sum(jnp.square(x), axis=tuple(range(lead, x.ndim)))


def _apart(
    plan: Plan, drift: Drift, squares: Array, mean_square: Array, fragment: Array
) -> Drift:
    """Return the drift with this round's norms and cosine of its fragment.

    From the norms of the updates and of their mean, which need no more exchange:
    |sum_i D_i|^2 = sum_i |D_i|^2 + sum_(i != j) <D_i, D_j>.
    """
    number, total = len(squares), jnp.sum(squares)
    crossed = number * number * mean_square - total
    cosine = jnp.where(total > 0, crossed / (max(1, number - 1) * total), 0.0)
    if plan.law.outer.merge != "mean":
        cosine = jnp.full((), jnp.nan)
    return Drift(
        norm=drift.norm.at[fragment].set(jnp.sqrt(squares)),
        cosine=drift.cosine.at[fragment].set(cosine),
    )
