"""Train states of the libraries people use: optax, flax and equinox."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from atoll import RunSettings
from atoll.errors import SettingsError, UsageError
from atoll.jax import diloco
from atoll.settings import SyncSection

pytestmark = [pytest.mark.jax, pytest.mark.timeout(600)]

ISLANDS = 2
Made = tuple[Any, Callable[..., Any], Callable[[Any], Any]]


def squared(predicted: Any, wanted: Any) -> jax.Array:
    """Return the mean squared error."""
    return jnp.mean((predicted - wanted) ** 2)


def with_linen() -> Made:
    """Return a train state of flax linen, with optax's AdamW inside."""
    model = flax.linen.Sequential([flax.linen.Dense(4), flax.linen.Dense(1)])
    state = TrainState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), jnp.ones((1, 3))),
        tx=optax.adamw(1e-2),
    )

    def train(state: TrainState, batch: Any, rng: Any) -> tuple[TrainState, Any]:
        def loss(params: Any) -> jax.Array:
            return squared(model.apply(params, batch[0]), batch[1])

        value, slope = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=slope), {"loss": value}

    return state, train, lambda state: state.params


def with_nnx() -> Made:
    """Return a split model of flax nnx, with a batch norm's statistics and Lion."""
    rngs = flax.nnx.Rngs(0)
    model = flax.nnx.Sequential(
        flax.nnx.Linear(3, 4, rngs=rngs),
        flax.nnx.BatchNorm(4, rngs=rngs),
        flax.nnx.Linear(4, 1, rngs=rngs),
    )
    split: Any = flax.nnx.split(model, flax.nnx.Param, ...)
    shape, params, rest = split
    optimizer = optax.lion(1e-2)

    def train(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            net = flax.nnx.merge(shape, params, state["rest"], copy=True)
            value = squared(net(batch[0]), batch[1])
            return value, flax.nnx.state(net, flax.nnx.Not(flax.nnx.Param))

        (value, rest), slope = jax.value_and_grad(loss, has_aux=True)(state["params"])
        change, kept = optimizer.update(slope, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], change)
        return {"params": params, "rest": rest, "optimizer": kept}, {"loss": value}

    state = {"params": params, "rest": rest, "optimizer": optimizer.init(params)}
    return state, train, lambda state: state["params"]


def with_equinox() -> Made:
    """Return the arrays of an equinox model, found by a filter, with SGD."""
    arrays, rest = equinox.partition(
        equinox.nn.MLP(3, 1, 4, 1, key=jax.random.key(0)), equinox.is_array
    )
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def train(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        def loss(arrays: Any) -> jax.Array:
            model = equinox.combine(arrays, rest)
            return squared(jax.vmap(model)(batch[0]), batch[1])

        value, slope = jax.value_and_grad(loss)(state[0])
        change, kept = optimizer.update(slope, state[1])
        return (equinox.apply_updates(state[0], change), kept), {"loss": value}

    state = arrays, optimizer.init(arrays)
    return state, train, lambda s: equinox.filter(s[0], equinox.is_inexact_array)


@pytest.mark.parametrize("make", [with_linen, with_nnx, with_equinox])
def test_any_library_trains_as_islands(make: Callable[[], Made]) -> None:
    """Islands with data of their own learn, and at a round's end have one model."""
    one, train, params_of = make()
    chosen = RunSettings.from_dict({"sync": {"sync_every": 4}, "wire": {"up": "fp32"}})
    init, step = diloco(train, params_of, chosen, num_islands=ISLANDS)
    state, data, losses = init(one), np.random.default_rng(0), []
    for _ in range(16):
        x = data.standard_normal((ISLANDS, 8, 3)).astype(np.float32)
        state, metrics = step(state, (x, x.sum(-1, keepdims=True)), jax.random.key(0))
        losses.append(np.asarray(metrics["islands"]["loss"]))

    assert losses[0].shape == (ISLANDS,)
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    shared = jax.tree.leaves(params_of(state.islands))
    for leaf, anchor in zip(shared, jax.tree.leaves(state.anchor), strict=True):
        np.testing.assert_array_equal(leaf[0], leaf[1])
        np.testing.assert_array_equal(leaf[0], anchor)
    assert metrics["pseudo_norm"].shape == (1, ISLANDS)
    assert -1 <= float(metrics["cosine"][0]) <= 1


@pytest.mark.parametrize(
    ("tables", "more", "message"),
    [
        ({"outer": {"merge": "radial"}}, {}, "radial.*Choose merge='mean'"),
        ({"outer": {"weight": "tokens"}}, {}, "weight='tokens' has no meaning"),
        ({"sync": {"dynamic_local_updates": True}}, {}, "updates=true has no meaning"),
        ({"data": {"order": "run"}}, {}, "order='run' does not work in atoll.jax"),
        ({"wire": {"up": "bf16-stochastic"}}, {}, "wire.up='bf16-stochastic' is not"),
        ({}, {"num_islands": 0}, "num_islands=0 must be at least 1"),
        ({}, {"spread_outer": True}, "spread_outer=True needs a mesh"),
    ],
)
def test_what_a_program_cannot_do_is_refused(
    tables: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    """A setting that would have no effect is an error before anything is compiled."""
    with pytest.raises(UsageError, match=message):
        diloco(
            lambda state, batch, rng: (state, ()),
            lambda state: state,
            RunSettings.from_dict(tables),
            **({"num_islands": 2} | more),
        )


def test_an_asynchronous_run_is_refused() -> None:
    """The islands of one program make every round together."""
    with pytest.raises(SettingsError, match=r"'async' does not work in atoll\.jax"):
        diloco(
            lambda state, batch, rng: (state, ()),
            lambda state: state,
            RunSettings(sync=SyncSection(mode="async")),
            num_islands=2,
        )


def test_a_mesh_without_room_is_refused() -> None:
    """The islands' axis must be there, and hold all islands evenly."""
    devices = np.array(jax.devices()[:1])
    mesh = jax.sharding.Mesh(devices, ("data",))

    def make(mesh: Any) -> None:
        diloco(lambda *a: a, lambda s: s, RunSettings(), num_islands=2, mesh=mesh)

    with pytest.raises(UsageError, match="axis='island' is none of the mesh's axes"):
        make(mesh)
    explicit = (jax.sharding.AxisType.Explicit,)
    with pytest.raises(UsageError, match=r"leave it to the compiler.*AxisType\.Auto"):
        make(jax.sharding.Mesh(devices, ("island",), axis_types=explicit))
