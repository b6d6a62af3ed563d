"""Gemma 2 2B as shapes, streaming over islands: every program, without memory.

Prints how many programs there are, of how many parameters, and on what. With the word
`tpu` as an argument the programs are compiled for a slice that nobody has here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from atoll import RunSettings
from atoll.jax import collective_bytes, diloco

LAYERS, WIDTH, HIDDEN, WORDS = 26, 2304, 9216, 256_000
HEADS, KEYS, HEAD = 8, 4, 256
LENGTH = 128
SYNC = {"sync_every": 100, "num_fragments": 14, "overlap_steps": 5, "rest": "own"}
OPTIMIZER = optax.adam(1e-4)


def shapes(mesh: Mesh) -> dict[str, Any]:
    """Return the parameters in bf16, each laid along the second axis of the mesh."""

    def of(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

    rows = P(None, "fsdp")
    layers = {
        "norm": of(LAYERS, 4, WIDTH, spec=P()),
        "q": of(LAYERS, WIDTH, HEADS * HEAD, spec=rows),
        "kv": of(LAYERS, WIDTH, 2 * KEYS * HEAD, spec=rows),
        "out": of(LAYERS, HEADS * HEAD, WIDTH, spec=rows),
        "gate": of(LAYERS, WIDTH, 2 * HIDDEN, spec=rows),
        "down": of(LAYERS, HIDDEN, WIDTH, spec=rows),
    }
    norm = of(WIDTH, spec=P())
    return {"embed": of(WORDS, WIDTH, spec=P("fsdp")), "layers": layers, "norm": norm}


def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
    """Return what a layer makes of activations, roughly as Gemma does."""
    length = x.shape[0]
    h = jax.nn.standardize(x) * own["norm"][0]
    q = (h @ own["q"]).reshape(length, HEADS, HEAD)
    k, v = jnp.split((h @ own["kv"]).reshape(length, KEYS, 2 * HEAD), 2, -1)
    heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + (heads.reshape(length, -1) @ own["out"]) * own["norm"][1]
    h = jax.nn.standardize(x) * own["norm"][2]
    gate, up = jnp.split(h @ own["gate"], 2, -1)
    return x + (jax.nn.gelu(gate) * up @ own["down"]) * own["norm"][3], None


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of the next token."""
    x = params["embed"][tokens[:-1]]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = ((x * params["norm"]) @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()


def train_step(state: Any, tokens: Any, rng: Any) -> tuple[Any, Any]:
    """Return an island's next state and loss."""
    value, slope = jax.value_and_grad(loss)(state[0], tokens[0])
    change, kept = OPTIMIZER.update(slope, state[1])
    return (optax.apply_updates(state[0], change), kept), {"loss": value}


def lowered(mesh: Mesh) -> dict[str, Any]:
    """Return every program of the run."""
    params = shapes(mesh)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    moments = optax.ScaleByAdamState(count, params, params)
    islands = mesh.shape["island"]
    init, step = diloco(
        train_step,
        lambda state: state[0],
        RunSettings.from_dict({"sync": SYNC}),
        num_islands=islands,
        mesh=mesh,
        stacks={"layers": 0},
    )
    one = params, (moments, optax.EmptyState())
    batch = jax.ShapeDtypeStruct((islands, 1, LENGTH + 1), jnp.int32)
    return step.lower(init.abstract(one), batch)


def main() -> None:
    """Print what was lowered, and what was compiled of it."""
    if "tpu" in sys.argv:
        from jax.experimental import topologies

        found = topologies.get_topology_desc("v5e:2x4", "tpu").devices
    else:
        found = jax.devices()
    mesh = Mesh(np.array(found).reshape(2, 4), ("island", "fsdp"))
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes(mesh))]
    programs = lowered(mesh)
    claims = {"programs": sorted(programs), "parameters": int(sum(sizes))}
    if "tpu" in sys.argv:
        text = programs["inner 0 1"].compile().as_text()
        island_of = [i // 4 for i in range(8)]
        claims["bytes"] = collective_bytes(text, island_of=island_of)
    json.dump(claims, sys.stdout)


if __name__ == "__main__":
    main()
