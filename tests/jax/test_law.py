"""Whole runs against the loops of `reference`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll import RunSettings
from atoll.algorithm import fragments
from tests.jax import trees
from tests.jax.reference import Reference

pytestmark = [pytest.mark.jax, pytest.mark.timeout(600)]


def settings(**tables: dict[str, Any]) -> RunSettings:
    """Return the settings of a streaming run with these differences."""
    sync = {"sync_every": 5, "num_fragments": 3, "rest": "own"}
    tables = {"wire": {"up": "fp32", "down": "fp32"}} | tables
    return RunSettings.from_dict(tables | {"sync": sync | tables.get("sync", {})})


def expected(chosen: RunSettings, steps: int, num_islands: int) -> Reference:
    """Return the reference after as many inner steps."""
    first = trees.tensors()
    parts = fragments.split(
        [(name, value.shape) for name, value in first.items()],
        num_fragments=chosen.sync.num_fragments,
        order=chosen.sync.fragment_order,
        rest=chosen.sync.rest,
    )
    made = Reference(chosen, parts, first, num_islands)
    for step in range(1, steps + 1):

        def inner(island: int, own: dict[str, Any], step: int = step) -> dict[str, Any]:
            move = trees.moves(island, step)
            return {name: value + move[name] for name, value in own.items()}

        made.step(inner)
    return made


def assert_same(got: Any, made: Reference, num_islands: int) -> None:
    """Assert that anchors and all local weights have equal bits."""
    anchor = trees.flat(got.anchor)
    local = trees.flat(got.islands["params"], lead=1)
    for name, value in made.anchor.items():
        np.testing.assert_array_equal(anchor[name], value, err_msg=name)
        for island in range(num_islands):
            np.testing.assert_array_equal(
                local[name][island], made.islands[island][name], err_msg=name
            )


LEAVES = {
    "vanilla": settings(sync={"num_fragments": 1, "rest": "balanced"}),
    "heavy ball": settings(
        sync={"rest": "balanced"}, outer={"optimizer": "heavy_ball"}
    ),
    "int8": settings(
        sync={"overlap_steps": 3}, wire={"up": "int8", "error_feedback": True}
    ),
    "e3m0": settings(sync={"overlap_steps": 2}, wire={"up": "e3m0", "down": "int8"}),
}
STACKED = {
    "streaming": settings(outer={"optimizer": "sgd", "lr": 1.0}),
    "many in flight": settings(
        sync={"overlap_steps": 4, "fragment_order": "sequential"}
    ),
    "mix": settings(
        sync={"overlap_steps": 1, "adopt": "mix", "keep_local": 0.5},
        wire={"up": "bf16", "down": "bf16"},
    ),
    "adam": settings(outer={"optimizer": "adam", "lr": 0.125}),
}


@pytest.mark.parametrize("case", LEAVES)
def test_a_tree_of_blocks_follows_the_law(case: str) -> None:
    """Anchor and local weights have the bits that the text gives on numpy."""
    got = trees.run(LEAVES[case], steps=12, num_islands=3, stacked=False)

    assert_same(got, expected(LEAVES[case], 12, 3), 3)


@pytest.mark.parametrize("case", STACKED)
def test_a_tree_of_stacks_follows_the_law(case: str) -> None:
    """Layers along an axis have the bits that layers of their own have on numpy."""
    got = trees.run(STACKED[case], steps=12, num_islands=3, stacked=True)

    assert_same(got, expected(STACKED[case], 12, 3), 3)


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_inside_a_program_the_bits_are_the_same(overlap_steps: int) -> None:
    """A step that is compiled by the user follows the same law, all in one program."""
    chosen = settings(sync={"overlap_steps": overlap_steps}, wire={"up": "bf16"})
    got = trees.run(chosen, steps=12, num_islands=2, stacked=True, compiled=True)

    assert int(got.inner_steps) == 12
    assert_same(got, expected(chosen, 12, 2), 2)
