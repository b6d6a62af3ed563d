"""Identities of the family on trees, for any period and any number of fragments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import RunSettings
from atoll.algorithm.schedule import due_fragments
from atoll.jax import diloco
from atoll.jax.fragments import Leaf, kinds, lay_out
from atoll.jax.state import Timetable
from atoll.settings import SyncSection
from tests.jax import trees

pytestmark = [pytest.mark.jax, pytest.mark.timeout(600)]

EXACT = {"up": "fp32", "down": "fp32"}
AVERAGE = {"optimizer": "sgd", "lr": 1.0}


def made(outer: dict[str, Any], **sync: Any) -> RunSettings:
    """Return settings without rounding on the wire."""
    return RunSettings.from_dict({"sync": sync, "wire": EXACT, "outer": outer})


def test_one_island_that_averages_is_plain_training() -> None:
    """With one island, lr 1 and no momentum, a sync changes nothing, Adam included."""
    optimizer = optax.adam(0.125)

    def train(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        change, kept = optimizer.update(batch, state[1])
        return (optax.apply_updates(state[0], change), kept), ()

    chosen = made(AVERAGE, sync_every=3, num_fragments=2, overlap_steps=1)
    init, step = diloco(train, lambda s: s[0], chosen, num_islands=1, stacks={"h": 0})
    params = {"e": jnp.ones(4), "h": {"w": jnp.ones((2, 3))}}
    plain = params, optimizer.init(params)
    state = init(plain)
    for i in range(7):
        slope = jax.tree.map(lambda p, i=i: jnp.sin(p * (i + 1)), params)
        plain, _ = train(plain, slope, None)
        state, _ = step(state, jax.tree.map(lambda x: x[None], slope))

    for ours, theirs in zip(
        jax.tree.leaves(state.islands), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_allclose(ours[0], theirs, rtol=0, atol=3e-7)


def test_averaging_gives_the_mean_of_the_islands() -> None:
    """With lr 1, no momentum and one fragment the anchor is the mean of the locals."""
    chosen = made(AVERAGE, sync_every=4, num_fragments=1)
    state = trees.run(chosen, steps=4, num_islands=4, stacked=True)

    anchor = trees.flat(state.anchor)
    for name, first in trees.tensors().items():
        ends = [
            first + sum(trees.moves(island, step)[name] for step in range(1, 5))
            for island in range(4)
        ]
        np.testing.assert_array_equal(anchor[name], sum(ends) / np.float32(4))


def test_equal_islands_are_one_island() -> None:
    """Islands that do the same move the anchor as one of them would."""

    def train(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        return state - batch, ()

    chosen = made({}, sync_every=2, num_fragments=1, overlap_steps=1)
    ends = []
    for number in (1, 4):
        init, step = diloco(train, lambda s: s, chosen, num_islands=number)
        state = init(jnp.zeros(3))
        for i in range(6):
            state, metrics = step(state, jnp.full((number, 3), float(i)))
        ends.append(np.asarray(state.anchor))

    np.testing.assert_array_equal(ends[0], ends[1])
    assert metrics["cosine"].tolist() == [1.0]


@settings(max_examples=60)
@given(
    sync_every=st.integers(1, 40),
    num_fragments=st.integers(1, 12),
    overlap=st.integers(0, 39),
    stacked=st.booleans(),
)
def test_every_flight_is_reduced_whole_and_lands_once(
    sync_every: int, num_fragments: int, overlap: int, stacked: bool
) -> None:
    """For any period, fragments and overlap: its own slot, every age, once."""
    overlap %= sync_every
    sync = SyncSection(
        sync_every=sync_every, num_fragments=num_fragments, overlap_steps=overlap
    )
    names = ["h.w"] if stacked else [f"h.{i}.w" for i in range(12)]
    leaves = [Leaf(name, (12, 2), "float32") for name in names]
    found = lay_out(leaves, {"h": 0} if stacked else {}, sync)
    times = Timetable(sync_every, num_fragments, overlap, kinds(found))
    held: dict[tuple[int, int], list[int]] = {}
    for step in range(1, 4 * sync_every + 1):
        for flight in times.in_air(step):
            if flight.round >= 0:
                held[flight.kind, flight.slot].append(flight.age)
        for flight in times.landing(step) if overlap else ():
            assert held.pop((flight.kind, flight.slot)) == list(range(overlap))
        sent = times.sealing(step)
        due = due_fragments(step, sync_every=sync_every, num_fragments=num_fragments)
        assert tuple(flight.fragment for flight in sent) == due
        for flight in sent if overlap else ():
            assert held.setdefault((flight.kind, flight.slot), []) == []


@pytest.mark.parametrize("num_fragments", [2, 3, 4, 8, 16])
def test_programs_do_not_grow_with_fragments(num_fragments: int) -> None:
    """Two to sixteen fragments of a stack of sixteen need the same seven programs.

    Three do not divide it, and make one kind more: ten.
    """
    sync = SyncSection(
        sync_every=48, num_fragments=num_fragments + 1, overlap_steps=3, rest="own"
    )
    leaves = [Leaf("embed", (9,), "float32"), Leaf("h.w", (16, 8), "float32")]
    of_shape = kinds(lay_out(leaves, {"h": 0}, sync))
    times = Timetable(48, num_fragments + 1, 3, of_shape)

    # A seal and a landing for each kind, and the inner steps beside them.
    programs = len(times.airs) + 2 * len(of_shape)
    assert programs == (10 if 16 % num_fragments else 7)
