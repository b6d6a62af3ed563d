"""Four islands train a small transformer, on one device and on a mesh.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_minimal.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import atoll
import atoll.jax

WORDS, WIDTH, LAYERS, HEADS, LENGTH, ISLANDS, STEPS = 32, 32, 4, 4, 16, 4, 60
SYNC = {"sync_every": 10, "num_fragments": 3, "overlap_steps": 2, "rest": "own"}
SETTINGS = atoll.RunSettings.from_dict({"sync": SYNC, "outer": {"momentum": 0.5}})
OPTIMIZER = optax.adam(3e-3)


def make_params():
    """Return parameters; the layers are stacked along a first axis."""
    shapes = {"attend": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(0), 5))
    layers = {
        name: jax.random.normal(next(keys), (LAYERS, *shape)) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    embed = jax.random.normal(next(keys), (WORDS, WIDTH)) * WIDTH**-0.5
    return {"embed": embed, "layers": layers}


def layer(x, own):
    """Return what a layer makes of activations: attention, then a small net."""
    mixed = (jax.nn.standardize(x) @ own["attend"]).reshape(*x.shape[:2], HEADS, -1)
    heads = jax.nn.dot_product_attention(*jnp.split(mixed, 3, -1), is_causal=True)
    x = x + heads.reshape(x.shape) @ own["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ own["up"]) @ own["down"], None


def loss(params, tokens):
    """Return the mean loss of the next token."""
    x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens, rng):
    """Return an island's next state, and what it measured."""
    params, moments = state
    value, slope = jax.value_and_grad(loss)(params, tokens)
    change, moments = OPTIMIZER.update(slope, moments)
    return (optax.apply_updates(params, change), moments), {"loss": value}


def train(**places):
    """Return the losses of each round's inner steps and islands."""
    init, step = atoll.jax.diloco(
        *(train_step, lambda state: state[0], SETTINGS),
        **(places | {"num_islands": ISLANDS, "stacks": {"layers": 0}}),
    )
    state = init((params := make_params(), OPTIMIZER.init(params)))
    data, losses = np.random.default_rng(0), []
    for _ in range(STEPS):  # each row counts on from a random number, by 1, 2 or 3
        first, by = data.integers((WORDS, 4), size=(ISLANDS, 8, 2)).T[..., None]
        tokens = (first + by * np.arange(LENGTH)) % WORDS
        state, metrics = step(state, tokens.swapaxes(0, 1))
        losses.append(metrics["islands"]["loss"])
    return np.array(losses).reshape(STEPS // 10, -1)


if __name__ == "__main__":
    devices = np.array(jax.devices())[:ISLANDS]
    alone, spread = train(), train(mesh=jax.sharding.Mesh(devices, ("island",)))
    for name, losses in (("one device", alone), ("mesh", spread)):
        print(name, f"{losses[0].mean():.4f}", f"{losses[-1].mean():.4f}")
    apart = np.abs(spread / alone - 1).max(axis=1)
    print("apart", f"{apart[0]:.1e}", f"{apart[-1]:.1e}")
