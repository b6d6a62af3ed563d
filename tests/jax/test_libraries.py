"""Trees of the libraries that people train with: names, roles, and a few steps."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atoll.errors import UsageError
from atoll.jax import join
from tests.jax.islands import run_of

pytestmark = pytest.mark.jax


def lowered(tree: Any) -> Any:
    """Return every floating array of a tree, a half lower."""
    return jax.tree.map(lambda leaf: leaf - 0.5, tree)


def mean_of(tree: Any) -> float:
    return float(np.mean([np.mean(leaf) for leaf in jax.tree.leaves(tree)]))


def test_parameters_of_nnx_are_named_without_their_wrapping() -> None:
    """A split module is a tree, and merges with what came back."""
    graph, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with join(state, run=run_of()) as island:
        assert list(island.anchor()) == ["bias", "kernel"]
        trained = island.stepped(lowered(island.params))

    merged = nnx.merge(graph, trained)
    assert merged.bias is not None
    assert np.asarray(merged.bias[...]).tolist() == [-0.5] * 3


def test_batch_statistics_of_linen_are_buffers() -> None:
    """All collections are one tree; the statistics are averaged as they are."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, inputs: jax.Array) -> jax.Array:
            normal = nn.BatchNorm(use_running_average=False)(nn.Dense(3)(inputs))
            assert isinstance(normal, jax.Array)
            return normal

    variables = Net().init(jax.random.key(0), jnp.ones((4, 2)))
    with join(variables, run=run_of(), buffers=["batch_stats."]) as island:
        names = list(island.anchor())
        island.stepped(lowered(island.params))

    assert names[-2:] == [
        f"batch_stats.BatchNorm_0.{which}" for which in ("mean", "var")
    ]
    assert "params.Dense_0.kernel" in names


def test_an_equinox_module_is_split_first() -> None:
    """Functions in a tree are refused by name; its arrays alone are trained."""
    module = eqx.nn.MLP(2, 2, width_size=4, depth=1, key=jax.random.key(0))
    with pytest.raises(UsageError, match=r"'activation' is of the type"):
        join(module, run=run_of())

    arrays, rest = eqx.partition(module, eqx.is_array)
    with join(arrays, run=run_of()) as island:
        assert next(iter(island.anchor())) == "layers.0.weight"
        before = mean_of(island.params)
        trained = island.stepped(lowered(island.params))

    assert mean_of(trained) == pytest.approx(before - 0.5)
    assert eqx.combine(trained, rest)(jnp.ones(2)).shape == (2,)
