"""Four islands train a small transformer: first on one device, then on a mesh.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_minimal.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import atoll
import atoll.jax

VOCAB, WIDTH, LAYERS, HEADS, LENGTH, ISLANDS, STEPS = 32, 32, 4, 4, 16, 4, 60
SYNC = {"sync_every": 10, "num_fragments": 3, "overlap_steps": 2, "rest": "own"}
SETTINGS = atoll.RunSettings.from_dict({"sync": SYNC, "outer": {"momentum": 0.5}})
OPTIMIZER = optax.adam(3e-3)


def make_params():
    """Return initial parameters; axis 0 of each array in "layers" is the layer."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(0), 5))
    layers = {
        name: jax.random.normal(next(keys), (LAYERS, *shape)) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    embedding = jax.random.normal(next(keys), (VOCAB, WIDTH)) * WIDTH**-0.5
    return {"token_embedding": embedding, "layers": layers}


def layer(x, params):
    """Apply one transformer layer: causal attention, then an MLP."""
    qkv = (jax.nn.standardize(x) @ params["qkv"]).reshape(*x.shape[:2], HEADS, -1)
    heads = jax.nn.dot_product_attention(*jnp.split(qkv, 3, -1), is_causal=True)
    x = x + heads.reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(jax.nn.standardize(x) @ params["up"]) @ params["down"], None


def loss_fn(params, tokens):
    """Return the mean cross-entropy of the next token."""
    embedded = params["token_embedding"][tokens[:, :-1]]
    x, _ = jax.lax.scan(layer, embedded, params["layers"])
    logits = x @ params["token_embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, tokens, rng):
    """Return one island's next state and its metrics."""
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def train(**mesh_options):
    """Train, and return the losses: one row per round, all inner steps and islands."""
    init, step = atoll.jax.diloco(
        *(train_step, lambda state: state[0], SETTINGS),
        **(mesh_options | {"num_islands": ISLANDS, "stacks": {"layers": 0}}),
    )
    state = init((params := make_params(), OPTIMIZER.init(params)))
    rng, losses = np.random.default_rng(0), []
    for _ in range(STEPS):  # each row: start, start + stride, ...
        start, stride = rng.integers((VOCAB, 4), size=(ISLANDS, 8, 2)).T[..., None]
        tokens = (start + stride * np.arange(LENGTH)) % VOCAB
        state, metrics = step(state, tokens.swapaxes(0, 1))
        losses.append(metrics["islands"]["loss"])
    return np.array(losses).reshape(STEPS // 10, -1)


if __name__ == "__main__":
    devices = np.array(jax.devices())[:ISLANDS]
    one_device, on_mesh = train(), train(mesh=jax.sharding.Mesh(devices, ("island",)))
    for name, losses in (("one device", one_device), ("mesh", on_mesh)):
        print(name, f"{losses[0].mean():.4f}", f"{losses[-1].mean():.4f}")
    difference = np.abs(on_mesh / one_device - 1).max(axis=1)
    print("difference", f"{difference[0]:.1e}", f"{difference[-1]:.1e}")
