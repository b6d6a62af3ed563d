"""Tiny runs of JAX islands whose every number can be worked out by head.

Runs made here are exact unless a test asks otherwise: fp32 both ways and outer SGD with
lr 1, so that the anchor is the mean of the islands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from atoll import RunSettings
from atoll.exchange import MemoryRun
from atoll.jax import Island

T = TypeVar("T")
Table = Mapping[str, object]
Params = dict[str, Any]

PLAIN: dict[str, Table] = {
    "wire": {"up": "fp32", "down": "fp32"},
    "outer": {"optimizer": "sgd", "lr": 1.0},
}
TIMEOUT_S = 90.0
"""The first round of a fresh machine compiles kernels, which takes its time."""


def settings_of(islands: int = 1, *, every: int = 1, **tables: Table) -> RunSettings:
    """Return exact settings; `tables` override them key by key."""
    base: dict[str, Table] = {
        "run": {"start_islands": islands},
        "sync": {"sync_every": every},
        **PLAIN,
    }
    merged = {name: {**table, **tables.get(name, {})} for name, table in base.items()}
    return RunSettings.from_dict({**tables, **merged})


def run_of(islands: int = 1, *, every: int = 1, **tables: Table) -> MemoryRun:
    """Return an empty run with `settings_of` these."""
    return MemoryRun(settings_of(islands, every=every, **tables))


def weights(*values: float, dtype: Any = jnp.float32) -> Params:
    """Return a tree of one parameter, `w`."""
    return {"w": jnp.array(values, dtype)}


@jax.jit
def moved(params: Params, by: float) -> Params:
    """Return what an inner step of a constant gradient makes of every parameter."""
    changed: Params = jax.tree.map(
        lambda leaf: leaf - jnp.asarray(by, leaf.dtype), params
    )
    return changed


def train(island: Island[Params], *, steps: int = 1, slope: float = 1.0) -> Params:
    """Make inner steps that take the slope from every parameter."""
    params = island.params
    for _ in range(steps):
        params = island.stepped(moved(params, slope))
    return params


def values(params: Params, name: str = "w") -> list[float]:
    """Return one parameter's values."""
    found: list[float] = np.asarray(params[name], np.float32).tolist()
    return found


def together(*islands: Callable[[], T]) -> list[T]:
    """Run each island as a thread and return what they return, in order.

    The first error is raised here; an island that never comes back is one.
    """
    returned: dict[int, T] = {}
    errors: list[BaseException] = []

    def live(number: int, island: Callable[[], T]) -> None:
        try:
            returned[number] = island()
        except BaseException as exc:
            errors.append(exc)

    threads = [
        threading.Thread(target=live, args=each, daemon=True)
        for each in enumerate(islands)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        if errors:
            raise errors[0]
        assert not thread.is_alive(), "an island never came back"
    return [returned[number] for number in range(len(islands))]
