"""What is true on eight devices, measured in a process that has as many.

Prints one JSON object; `test_mesh` judges it.
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
from tests.jax import trees
from tests.jax.hlo import Graph

LAYERS, WIDTH, WORDS, ISLANDS = 4, 16, 32, 4
CROSS = r"= .* (all-gather|all-to-all|all-reduce)\(.*op_name=\"jit\(_inner\)/sharding"
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def mesh(islands: int = ISLANDS) -> Mesh:
    """Return a mesh of eight devices with two axes."""
    return Mesh(np.array(jax.devices()).reshape(islands, -1), ("island", "fsdp"))


def bits(state: Any) -> list[Any]:
    """Return a digest of the anchor and of the local weights."""
    arrays = jax.tree.leaves((state.anchor, state.islands))
    return [int(np.asarray(x).view(np.uint32).astype(np.uint64).sum()) for x in arrays]


def same_bits() -> dict[str, bool]:
    """Return whether runs on the mesh have the bits of one on one device."""
    tables = {
        "sync": {"sync_every": 4, "num_fragments": 3, "overlap_steps": 2, "rest": "own"}
    }
    chosen = RunSettings.from_dict(tables)

    def run(num_islands: int, **more: Any) -> list[Any]:
        return bits(
            trees.run(chosen, steps=9, num_islands=num_islands, stacked=True, **more)
        )

    alone = run(8)
    return {
        "an island each": run(8, mesh=mesh(8)) == alone,
        "two islands at a place": run(8, mesh=mesh(4)) == alone,
        "outer state spread": run(8, mesh=mesh(4), spread_outer=True) == alone,
    }


def loss(params: Any, batch: Any) -> jax.Array:
    """Return the loss of a small net with scanned layers."""

    def layer(h: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return h + jnp.tanh(h @ own["w"] + own["b"]), None

    hidden, _ = jax.lax.scan(layer, params["embed"][batch[0]], params["layers"])
    logits = hidden @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()


def train_step(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
    """Return an island's next state and loss."""
    measured, slope = jax.value_and_grad(loss)(state["params"], batch)
    change, kept = OPTIMIZER.update(slope, state["optimizer"])
    params = optax.apply_updates(state["params"], change)
    return {"params": params, "optimizer": kept}, {"loss": measured}


def sharded() -> tuple[Any, Any]:
    """Return one island's abstract state on the mesh, and a batch of all islands."""

    def shape(*sizes: int, spec: P) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh(), spec)
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=place)

    params = {
        "embed": shape(WORDS, WIDTH, spec=P("fsdp")),
        "layers": {
            "b": shape(LAYERS, WIDTH, spec=P()),
            "w": shape(LAYERS, WIDTH, WIDTH, spec=P(None, "fsdp")),
        },
    }
    tokens = jax.ShapeDtypeStruct((ISLANDS, 8), jnp.int32)
    kept = (optax.TraceState(params), optax.EmptyState())
    return {"params": params, "optimizer": kept}, (tokens, tokens)


def compiled(up: str, names: list[str] | None = None) -> dict[str, str]:
    """Return the texts of the programs of a streaming run."""
    tables = {
        "sync": {
            "sync_every": 8,
            "num_fragments": 2,
            "overlap_steps": 2,
            "rest": "own",
        },
        "wire": {"up": up},
    }
    init, step = diloco(
        train_step,
        lambda state: state["params"],
        RunSettings.from_dict(tables),
        num_islands=ISLANDS,
        mesh=mesh(),
        stacks={"layers": 0},
    )
    one, batch = sharded()
    programs = step.lower(init.abstract(one), batch)
    return {
        name: lowered.compile().as_text()
        for name, lowered in programs.items()
        if names is None or name in names
    }


def taken(text: str) -> int:
    """Return the bytes that a device takes from other islands."""
    return collective_bytes(text, island_of=[i // 2 for i in range(8)])


def independence(text: str) -> dict[str, Any]:
    """Return what the exchange of a program depends on, and what depends on it."""
    graph = Graph(text)
    crossing = [each.name for each in graph.matching(CROSS)]
    num_inner = len(jax.tree.leaves(sharded()[0])) + 1
    inner = graph.behind(list(graph.outputs[:num_inner]))
    return {
        "exchanges": len(crossing),
        "inner outputs depend on": sorted(set(crossing) & inner),
        "exchange reads": sorted(graph.arguments(graph.behind(crossing))),
        "reductions": sorted(
            graph.arguments(graph.behind(list(graph.outputs[num_inner:])))
        ),
    }


def main() -> None:
    """Print all claims."""
    texts = compiled("bf16")
    beside = texts["inner 0 1"]
    claims = {
        "same bits": same_bits(),
        "programs": sorted(texts),
        "bytes": {name: taken(text) for name, text in texts.items()},
        "independence": independence(beside),
        "inside an island": collective_bytes(texts["inner"], island_of=range(8)),
        "bytes by codec": {
            up: taken(compiled(up, ["inner 0 1"])["inner 0 1"])
            for up in ("fp32", "int8", "e3m0")
        },
    }
    json.dump(claims, sys.stdout)


if __name__ == "__main__":
    main()
