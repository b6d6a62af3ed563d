"""What streaming costs a JAX train step, on eight host devices.

Beside the bare train step: wall and processor time of an inner step, the most bytes
that one inner step takes from other islands, and what is compiled, against the number
of fragments. Host devices share the machine's cores and run collectives without
starting and ending them apart, so that nothing can be hidden here: the ratios are what
the work itself costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# This file is named as the library is: let its folder not come first.
sys.path = [each for each in sys.path if Path(each or ".").resolve().name != "bench"]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from atoll import RunSettings  # noqa: E402
from atoll.jax import collective_bytes, diloco  # noqa: E402

ISLANDS, LAYERS, WIDTH, WORDS, ROWS = 8, 16, 64, 128, 64
SYNC_EVERY, ROUNDS = 32, 2
CASES = (
    *((1, 0, "bf16"), (3, 4, "bf16"), (9, 4, "bf16"), (17, 4, "bf16")),
    (9, 4, "e3m0"),
)
"""Fragments, steps of overlap, and codec."""

SMOKE_CASES = ((1, 0, "bf16"), (3, 4, "e3m0"))
OPTIMIZER = optax.adam(1e-3)


def loss(params: Any, batch: Any) -> jax.Array:
    """Return the loss of a net with scanned layers."""

    def layer(h: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return h + jax.nn.gelu(h @ own["up"]) @ own["down"], None

    hidden, _ = jax.lax.scan(layer, params["embed"][batch[0]], params["layers"])
    logits = hidden @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def train_step(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
    """Return an island's next state and loss."""
    value, slope = jax.value_and_grad(loss)(state[0], batch)
    change, kept = OPTIMIZER.update(slope, state[1])
    return (optax.apply_updates(state[0], change), kept), {"loss": value}


def first_state() -> Any:
    """Return one island's state: two matrices per layer, and an embedding."""
    data = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(data.standard_normal(shape) * 0.05, jnp.float32)

    layers = {"up": normal(LAYERS, WIDTH, WIDTH), "down": normal(LAYERS, WIDTH, WIDTH)}
    params = {"embed": normal(WORDS, WIDTH), "layers": layers}
    return params, OPTIMIZER.init(params)


def batch() -> Any:
    """Return rows for all islands."""
    data = np.random.default_rng(1)
    tokens = data.integers(0, WORDS, (ISLANDS, ROWS))
    return tokens, (tokens * 3 + 1) % WORDS


def measure(step: Any, state: Any, rows: Any, steps: int) -> tuple[float, float]:
    """Return the median wall and the mean processor seconds of an inner step."""
    walls, spent = [], time.process_time()
    for _ in range(steps):
        begun = time.perf_counter()
        state, _ = step(state, rows)
        jax.block_until_ready(state.islands)
        walls.append(time.perf_counter() - begun)
    return statistics.median(walls), (time.process_time() - spent) / steps


def made(num_fragments: int, *, overlap: int, sync_every: int, up: str) -> Any:
    """Return `init` and `step` of a run on eight devices."""
    sync = {"sync_every": sync_every, "num_fragments": num_fragments}
    sync |= {"overlap_steps": overlap} | ({"rest": "own"} if num_fragments > 1 else {})
    return diloco(
        train_step,
        lambda state: state[0],
        RunSettings.from_dict({"sync": sync, "wire": {"up": up}}),
        num_islands=ISLANDS,
        mesh=Mesh(np.array(jax.devices()), ("island",)),
        stacks={"layers": 0},
    )


def compiled(init: Any, step: Any) -> tuple[int, float, int]:
    """Return programs, seconds to compile them, and the most bytes that one takes."""
    begun = time.perf_counter()
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), batch())
    programs = step.lower(init.abstract(first_state()), rows)
    texts = [lowered.compile().as_text() for lowered in programs.values()]
    spent_s = time.perf_counter() - begun
    sizes = [collective_bytes(text, island_of=range(ISLANDS)) for text in texts]
    return len(texts), spent_s, max(sizes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few steps, few fragments")
    is_smoke = parser.parse_args().smoke
    cases, sync_every = (SMOKE_CASES, 8) if is_smoke else (CASES, SYNC_EVERY)
    never = 10**6
    init, step = made(1, overlap=0, sync_every=never, up="bf16")
    measure(step, init(first_state()), batch(), 3)
    bare_wall, bare_spent = measure(step, init(first_state()), batch(), sync_every)
    print(
        f"bare train step: {bare_wall * 1e3:.1f} ms, {bare_spent * 1e3:.1f} ms of cores"
    )
    print("fragments overlap codec  wall  cores  peak KiB  programs  compile s")
    for count, overlap, up in cases:
        init, step = made(count, overlap=overlap, sync_every=sync_every, up=up)
        number, compile_s, peak = compiled(init, step)
        state, rows = init(first_state()), batch()
        for _ in range(sync_every + overlap):  # all programs have run once
            state, _ = step(state, rows)
        wall, spent = measure(step, state, rows, ROUNDS * sync_every)
        print(
            f"{count:9} {overlap:7} {up:>5} {wall / bare_wall:5.2f} "
            f"{spent / bare_spent:6.2f} {peak / 1024:9.1f} {number:9} {compile_s:10.1f}"
        )


if __name__ == "__main__":
    main()
