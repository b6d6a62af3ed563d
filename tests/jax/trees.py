"""A small tree with blocks and its stacked twin, and inner steps without rounding.

The tree has two containers of different depth and three tensors outside them. An inner
step moves every weight by a multiple of 1/64 that depends on its place, its island and
the step: sums and differences of such numbers are exact, so that nothing is left to
how a compiler contracts an inner step.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from atoll import RunSettings
from atoll.jax import DilocoState, diloco

F32 = NDArray[np.float32]

DEPTHS = {"encoder": 2, "decoder": 4}
STACKS = dict.fromkeys(DEPTHS, 0)
SHAPES = {"embed": (5, 3), "head": (3,), "scale": ()}
LAYER = {"b": (3,), "w": (3, 3)}


def values(name: str, shape: tuple[int, ...], salt: int = 0) -> F32:
    """Return multiples of 1/64 between -2 and 2 that only a name decides."""
    rng = np.random.default_rng(zlib.crc32(f"{name}/{salt}".encode()))
    return (rng.integers(-128, 129, shape) / 64).astype(np.float32)


def tensors() -> dict[str, F32]:
    """Return the tensors of the tree by name, in the order of its leaves."""
    named = {
        f"{container}.{i}.{leaf}": values(f"{container}.{i}.{leaf}", shape)
        for container in sorted(DEPTHS)
        for i in range(DEPTHS[container])
        for leaf, shape in LAYER.items()
    }
    return named | {name: values(name, shape) for name, shape in SHAPES.items()}


def tree(named: dict[str, F32], *, stacked: bool) -> dict[str, Any]:
    """Return tensors as a tree, whose layers are a list or an axis."""
    out: dict[str, Any] = {name: jnp.asarray(named[name]) for name in SHAPES}
    for container, depth in DEPTHS.items():
        layers = [
            {leaf: jnp.asarray(named[f"{container}.{i}.{leaf}"]) for leaf in LAYER}
            for i in range(depth)
        ]
        joined = jax.tree.map(lambda *each: jnp.stack(each), *layers)
        out[container] = joined if stacked else layers
    return out


def flat(made: dict[str, Any], *, lead: int = 0) -> dict[str, F32]:
    """Return the tensors of such a tree by name; `lead` axes come before their own."""
    out = {name: np.asarray(made[name]) for name in SHAPES}
    for container, depth in DEPTHS.items():
        for i in range(depth):
            for leaf in LAYER:
                layers = made[container]
                out[f"{container}.{i}.{leaf}"] = (
                    np.asarray(layers[i][leaf])
                    if isinstance(layers, list)
                    else np.take(np.asarray(layers[leaf]), i, axis=lead)
                )
    return out


def moves(island: int, step: int) -> dict[str, F32]:
    """Return how far an island's tensors move in an inner step."""
    return {
        name: values(name, value.shape, 1 + 97 * island + step) / np.float32(64)
        for name, value in tensors().items()
    }


def batch(num_islands: int, step: int, *, stacked: bool) -> Any:
    """Return the moves of all islands as a batch."""
    each = [tree(moves(i, step), stacked=stacked) for i in range(num_islands)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def train_step(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
    """Add the batch to the parameters, and count."""
    params = jax.tree.map(lambda p, move: p + move, state["params"], batch)
    moved = {"params": params, "count": state["count"] + 1}
    return moved, {"count": moved["count"]}


def run(
    settings: RunSettings,
    *,
    steps: int,
    num_islands: int,
    stacked: bool,
    compiled: bool = False,
    **more: Any,
) -> DilocoState:
    """Return the state of such islands after some inner steps."""
    init, step = diloco(
        train_step,
        lambda state: state["params"],
        settings,
        num_islands=num_islands,
        stacks=STACKS if stacked else None,
        **more,
    )
    state = init({"params": tree(tensors(), stacked=stacked), "count": jnp.int32(0)})
    call = jax.jit(step, donate_argnums=0) if compiled else step
    for number in range(1, steps + 1):
        state, _ = call(state, batch(num_islands, number, stacked=stacked))
    return state
