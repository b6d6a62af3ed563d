"""One island of JAX in a run: `atoll join RUN -- jax_island.py`, beside island.py."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax

import atoll.jax

# A torch island of the same run calls and orders its parameters so.
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def initial(key: jax.Array) -> dict[str, jax.Array]:
    """Return the parameters of island.py, in torch's shapes: rows are outputs."""
    first, second = jax.random.split(key)
    return {
        "0.weight": jax.random.uniform(first, (32, 1), minval=-1.0),
        "0.bias": jnp.zeros(32),
        "2.weight": jax.random.uniform(second, (1, 32), minval=-0.2, maxval=0.2),
        "2.bias": jnp.zeros(1),
    }


def loss_of(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """Return how far the model is from the curve, on average."""
    hidden = jnp.tanh(inputs @ params["0.weight"].T + params["0.bias"])
    outputs = hidden @ params["2.weight"].T + params["2.bias"]
    return jnp.mean((outputs - jnp.sin(inputs)) ** 2)


def batches(seed: int) -> Iterator[jax.Array]:
    """Yield points without end, other ones for every seed."""
    key = jax.random.key(seed % 2**32)
    while True:
        key, now = jax.random.split(key)
        yield jax.random.uniform(now, (64, 1), minval=-3.0, maxval=3.0)


def main() -> None:
    """Train until the run ends: a plain loop, and a few lines more."""
    optimizer = optax.adamw(1e-3)

    @jax.jit
    def train_step(params, state, inputs):
        loss, slopes = jax.value_and_grad(loss_of)(params, inputs)
        updates, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, updates), state, loss

    with atoll.jax.join(initial(jax.random.key(0)), names=NAMES) as island:
        params = island.params
        state = optimizer.init(params)
        for inputs in batches(seed=island.seed):
            params, state, loss = train_step(params, state, inputs)
            island.report(tokens=len(inputs), loss=loss)
            params = island.stepped(params)
    print(f"{island.name}: round {island.round}, digest {island.digest}")


if __name__ == "__main__":
    main()
