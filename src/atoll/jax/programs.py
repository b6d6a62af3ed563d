"""The compiled programs of a run, and the pure functions that they are made of.

    inner    an inner step of every island, with a slice of the reduction of every
             fragment in flight. Neither half reads the results of the other.
    seal     a fragment's updates are encoded into a slot
    land     the outer step of a fragment, and its adoption by the islands
    round    seal, the whole reduction and land in one program, without overlap

There is one of each for every kind of fragment, and one inner step for every
combination of kinds that is ever in flight. Leaves that a program changes are donated
to it.

The functions work on the leaves of a fragment. Fragment, layers, slot and age are
arguments, so that fragments of one kind share their programs: see `fragments.kinds`.

`collective_bytes` reads the traffic between islands from a compiled program's text. It
counts the bytes that each device receives from others: for an all-gather or all-to-all
the output without the device's own part, for an all-reduce twice a reduce-scatter of
its operand. A collective within one island counts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from atoll.jax.fragments import Kind, Piece, put, take
from atoll.jax.outer_step import Cut
from atoll.jax.plan import DilocoPlan
from atoll.jax.state import Drift, Flights

Arrays = list[Array]
Layers = list[Any]
"""For each piece its layers, or None."""


class FragmentArrays(NamedTuple):
    """The leaves that contain a fragment, as programs read and write them."""

    local: Arrays
    anchor: Arrays
    velocity: tuple[Arrays, ...]
    residual: Arrays | None


class FlightAddress(NamedTuple):
    """The flight that a program works on."""

    fragment: Any
    round: Any
    slot: Any
    layers: Layers


def advance(
    plan: DilocoPlan, islands: Arrays, batch: Any, rng: Any
) -> tuple[Arrays, Any]:
    """Return the islands' states and metrics after an inner step of each."""
    island_mesh = plan.island_mesh
    keys = None if rng is None else jax.random.split(rng, island_mesh.num_islands)
    state = jax.tree.unflatten(plan.structure, islands)
    moved, metrics = _over_islands(plan)(state, batch, keys)
    return jax.tree.leaves(moved), metrics


def _over_islands(plan: DilocoPlan) -> Any:
    """Return the train step of all islands; none can read another's state.

    On a mesh that is by construction: the islands' axis is one that the compiler does
    not partition along. The other axes are left to it.
    """
    all_islands = jax.vmap(plan.options.train_step)
    island_mesh = plan.island_mesh
    if island_mesh.mesh is None:
        return all_islands
    first = PartitionSpec(island_mesh.axis)
    return jax.shard_map(
        all_islands,
        mesh=island_mesh.mesh,
        in_specs=first,
        out_specs=first,
        axis_names={island_mesh.axis},
        check_vma=False,
    )


def seal(
    plan: DilocoPlan, kind: Kind, arrays: FragmentArrays, layers: Layers
) -> tuple[Flights, Arrays | None]:
    """Return one slot of flights with the fragment's updates, and the residuals."""
    sealed, at_seal, residuals = [], [], []
    squares = jnp.zeros(plan.island_mesh.num_islands)
    for index, piece in enumerate(kind.pieces):
        local = take(arrays.local[index], piece, layers[index], lead=1)
        anchor = take(arrays.anchor[index], piece, layers[index], lead=0)
        before = None if arrays.residual is None else arrays.residual[index]
        fed_back = (
            None if before is None else take(before, piece, layers[index], lead=1)
        )
        sent, lost = plan.law.seal(anchor, local, fed_back, piece.leaf_spec.dtype)
        sealed.append(tuple(plan.island_mesh.apart(array)[None] for array in sent))
        squares += _squares(plan.law.up.decode(sent), lead=1)
        if plan.law.rebases:
            at_seal.append(local[None])
        if before is not None and lost is not None:
            residuals.append(put(before, lost, piece, layers[index], lead=1))
    mean = [jnp.zeros((1, *plan.law.up.folded(p.shape))) for p in kind.pieces]
    flights = Flights(tuple(sealed), tuple(at_seal), tuple(mean), squares[None])
    return flights, None if arrays.residual is None else residuals


def reduce(
    plan: DilocoPlan, kind: Kind, flights: Flights, slot: Array, age: Array
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
    plan: DilocoPlan,
    kind: Kind,
    arrays: FragmentArrays,
    flights: Flights,
    drift: Drift,
    address: FlightAddress,
) -> tuple[FragmentArrays, Drift]:
    """Return a fragment's leaves after its outer step, and the drift."""
    local, anchor = list(arrays.local), list(arrays.anchor)
    velocity = [list(arrays) for arrays in arrays.velocity]
    length = jnp.float32(0.0)
    for index, piece in enumerate(kind.pieces):
        layers = address.layers[index]
        mean = plan.law.up.unfold(
            flights.mean[index][address.slot], piece.shape, lead=0
        )
        length += _squares(mean, lead=0)
        before = tuple(
            take(leaves[index], piece, layers, lead=0) for leaves in velocity
        )
        now, after = plan.law.step(
            take(anchor[index], piece, layers, lead=0), mean, before, address.round
        )
        sealed = flights.at_seal[index][address.slot] if plan.law.rebases else None
        adopted = plan.law.adopt(now, take(local[index], piece, layers, lead=1), sealed)
        anchor[index] = put(anchor[index], now, piece, layers, lead=0)
        local[index] = put(local[index], adopted, piece, layers, lead=1)
        for leaves, value in zip(velocity, after, strict=True):
            leaves[index] = put(leaves[index], value, piece, layers, lead=0)
    moved = FragmentArrays(local, anchor, tuple(velocity), arrays.residual)
    squares = flights.squares[address.slot]
    return moved, _apart(plan, drift, squares, length, address.fragment)


def whole_round(
    plan: DilocoPlan,
    kind: Kind,
    arrays: FragmentArrays,
    drift: Drift,
    address: FlightAddress,
) -> tuple[FragmentArrays, Drift]:
    """Return a fragment's leaves after a round without overlap."""
    flights, residual = seal(plan, kind, arrays, address.layers)
    first = jnp.int32(0)
    flights = reduce(plan, kind, flights, first, first)
    arrays = arrays._replace(residual=residual)
    return land(plan, kind, arrays, flights, drift, address._replace(slot=first))


def keep(flights: Flights, sealed: Flights, slot: Array) -> Flights:
    """Return flights with one of them in its slot."""
    return jax.tree.map(
        lambda all_slots, new: lax.dynamic_update_index_in_dim(
            all_slots, new[0], slot, 0
        ),
        flights,
        sealed,
    )


def _exchange(
    plan: DilocoPlan,
    piece: Piece,
    part: Cut,
    sealed: tuple[Array, ...],
    slot: Array,
    age: Array,
) -> Array:
    """Return a slice of all islands' updates, decoded where they are to be merged.

    Encoded updates are transferred: the islands' axis is gathered before decoding.
    """
    spec = plan.folded_spec(piece) if plan.is_spread(piece) else None
    slices = []
    for array in sealed:
        starts: list[Any] = [slot, *[0] * (array.ndim - 1)]
        starts[part.axis + 2] = part.start(age)
        sizes = [1, *array.shape[1:]]
        sizes[part.axis + 2] = part.size
        own_slice = plan.island_mesh.apart(lax.dynamic_slice(array, starts, sizes)[0])
        slices.append(plan.island_mesh.together(own_slice, spec))
    return plan.law.up.decode(tuple(slices))


def _write(mean: Array, merged: Array, part: Cut, slot: Array, age: Array) -> Array:
    starts = [slot, *[jnp.int32(0)] * merged.ndim]
    starts[part.axis + 1] = part.start(age)
    return lax.dynamic_update_slice(mean, merged[None], starts)


def _squares(x: Array, *, lead: int) -> Array:
    return jnp.sum(jnp.square(x), axis=tuple(range(lead, x.ndim)))


def _apart(
    plan: DilocoPlan, drift: Drift, squares: Array, mean_square: Array, fragment: Array
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


Program = Any
"""The result of `jax.jit`: called with arrays, lowered with shapes."""


class Programs:
    """The programs of a plan, compiled when they are first needed."""

    def __init__(self, plan: DilocoPlan) -> None:
        self._plan = plan
        self._abstract = plan.abstract()
        kinds = range(len(plan.kinds))
        islands = [leaf.sharding for leaf in jax.tree.leaves(self._abstract.islands)]
        self.inner = self._jit(
            self._inner, (islands, None, None), donated=(1, 5), static=0
        )
        self.seal = [
            self._jit(
                partial(self._seal, kind),
                (
                    self._arrays_of(kind).residual,
                    _shardings(self._abstract.flights[kind]),
                ),
                donated=(1, 2),
            )
            for kind in kinds
        ]
        after = [
            (self._arrays_of(kind), _shardings(self._abstract.drift)) for kind in kinds
        ]
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
        shardings: Any,
        *,
        donated: tuple[int, ...],
        static: int | None = None,
    ) -> Program:
        """Compile with outputs where their inputs were, if there is a mesh."""
        return jax.jit(
            function,
            static_argnums=static,
            donate_argnums=donated,
            out_shardings=None if self._plan.island_mesh.mesh is None else shardings,
        )

    def _arrays_of(self, kind: int) -> FragmentArrays:
        """Return the shardings of the leaves that contain a fragment of this kind."""
        leaves = jax.tree.leaves(self._abstract.islands)
        local = self._plan.lens.get(leaves)
        anchor = jax.tree.leaves(self._abstract.anchor)
        residual = jax.tree.leaves(self._abstract.residual)
        indices = [piece.leaf for piece in self._plan.kinds[kind].pieces]
        outer = [anchor[leaf].sharding for leaf in indices]
        return FragmentArrays(
            local=[local[leaf].sharding for leaf in indices],
            anchor=outer,
            velocity=tuple(outer for _ in self._abstract.velocity),
            residual=[residual[leaf].sharding for leaf in indices]
            if residual
            else None,
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
        moved, metrics = advance(self._plan, islands, batch, rng)
        out = []
        for i, kind in enumerate(in_flight(counts)):
            flights = Flights(sealed[i], (), reduced[i], jnp.zeros(0))
            for j in range(counts[kind]):
                flights = reduce(
                    self._plan, self._plan.kinds[kind], flights, slots[i][j], ages[i][j]
                )
            out.append(flights.mean)
        return moved, metrics, tuple(out)

    def _seal(
        self,
        kind: int,
        arrays: FragmentArrays,
        residual: Arrays | None,
        flights: Flights,
        address: FlightAddress,
    ) -> tuple[Arrays | None, Flights]:
        arrays = arrays._replace(residual=residual)
        sealed, lost = seal(self._plan, self._plan.kinds[kind], arrays, address.layers)
        return lost, keep(flights, sealed, address.slot)

    def _land(
        self,
        kind: int,
        arrays: FragmentArrays,
        flights: Flights,
        drift: Drift,
        address: FlightAddress,
    ) -> tuple[FragmentArrays, Drift]:
        return land(self._plan, self._plan.kinds[kind], arrays, flights, drift, address)

    def _round(
        self, kind: int, arrays: FragmentArrays, drift: Drift, address: FlightAddress
    ) -> tuple[FragmentArrays, Drift]:
        return whole_round(self._plan, self._plan.kinds[kind], arrays, drift, address)


def in_flight(counts: Sequence[int]) -> list[int]:
    """Return the kinds of fragment with a flight."""
    return [kind for kind, count in enumerate(counts) if count]


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}
_COLLECTIVE = re.compile(
    r"= (?P<shape>.*?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|"
    r"collective-permute)(?P<start>-start)?\((?P<rest>.*)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


def collective_bytes(text: str, *, island_of: Sequence[int]) -> int:
    """Return the bytes that a device receives from other islands in one call.

    Args:
        text: of a compiled program, `compiled.as_text()`.
        island_of: for each device, in the order of the mesh, which island's it is.
    """
    return sum(size for _, size in collectives(text, island_of=island_of))


def collectives(text: str, *, island_of: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield kind and bytes of every collective between islands in a program."""
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        groups = _groups(line)
        width = max((len(group) for group in groups), default=len(island_of))
        if groups and not any(_crosses(group, island_of) for group in groups):
            continue
        sizes = [_size(*array) for array in _ARRAY.findall(match["shape"])]
        # A started collective has its operands before its outputs.
        size = sum(sizes) if not match["start"] else max(sizes)
        yield match["kind"], _received_bytes(match["kind"], size, width)


def _received_bytes(kind: str, size: int, width: int) -> int:
    share = size * (width - 1) // width
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter":
        return size * (width - 1)
    return 2 * share if kind == "all-reduce" else share


def _size(dtype: str, shape: str) -> int:
    return _BYTES.get(dtype, 0) * prod(int(n) for n in shape.split(",") if n)


def _groups(line: str) -> list[list[int]]:
    if listed := _LISTED.search(line) or _PAIRS.search(line):
        return [
            [int(n) for n in group.split(",") if n]
            for group in re.findall(r"\{([\d,]*)\}", listed[1])
        ]
    if iota := _IOTA.search(line):
        return _iota_groups(*[_numbers(field) for field in iota.groups()])
    if mesh := _MESH.search(line):
        return _mesh_groups(mesh[1], mesh[2])
    return []


def _mesh_groups(axes: str, along: str) -> list[list[int]]:
    """Return the groups of XLA's form by axes: those along which devices talk."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    named = re.findall(r"'(\w+)'", along)
    order = [i for i, name in enumerate(sizes) if name not in named]
    order += [i for i, name in enumerate(sizes) if name in named]
    width = prod(sizes[name] for name in named)
    return _iota_groups([-1, width], list(sizes.values()), order)


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in text.split(",")] if text else []


def _iota_groups(
    shape: list[int], dims: list[int], order: list[int]
) -> list[list[int]]:
    """Return the groups of XLA's short form: an arange, transposed and cut to rows."""
    order = order or list(range(len(dims)))
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    numbers = [0]
    for axis in order:
        numbers = [n + strides[axis] * i for n in numbers for i in range(dims[axis])]
    width = prod(shape[1:])
    return [numbers[i : i + width] for i in range(0, len(numbers), width)]


def _crosses(group: Sequence[int], island_of: Sequence[int]) -> bool:
    return len({island_of[device] for device in group}) > 1
