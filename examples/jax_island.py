"""One JAX island: `atoll join RUN -- jax_island.py`, in the same run as island.py."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax

import atoll.jax

# Names and order of the parameters of the torch model in island.py.
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def init_params(key: jax.Array) -> dict[str, jax.Array]:
    """Return initial parameters in torch's layout: (outputs, inputs)."""
    first_key, second_key = jax.random.split(key)
    return {
        "0.weight": jax.random.uniform(first_key, (32, 1), minval=-1.0),
        "0.bias": jnp.zeros(32),
        "2.weight": jax.random.uniform(second_key, (1, 32), minval=-0.2, maxval=0.2),
        "2.bias": jnp.zeros(1),
    }


def loss_fn(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """Return the mean squared error of the model against sin(x)."""
    hidden = jnp.tanh(inputs @ params["0.weight"].T + params["0.bias"])
    outputs = hidden @ params["2.weight"].T + params["2.bias"]
    return jnp.mean((outputs - jnp.sin(inputs)) ** 2)


def batches(seed: int) -> Iterator[jax.Array]:
    """Yield random inputs forever; each seed gives different ones."""
    key = jax.random.key(seed % 2**32)
    while True:
        key, batch_key = jax.random.split(key)
        yield jax.random.uniform(batch_key, (64, 1), minval=-3.0, maxval=3.0)


def main() -> None:
    """Train until the run ends: a plain loop plus a few lines."""
    optimizer = optax.adamw(1e-3)

    @jax.jit
    def train_step(params, opt_state, inputs):
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    with atoll.jax.join(init_params(jax.random.key(0)), names=NAMES) as island:
        params = island.params
        opt_state = optimizer.init(params)
        for inputs in batches(seed=island.seed):
            params, opt_state, loss = train_step(params, opt_state, inputs)
            island.report(tokens=len(inputs), loss=loss)
            params = island.stepped(params)
    print(f"{island.name}: round {island.round}, digest {island.digest}")


if __name__ == "__main__":
    main()
