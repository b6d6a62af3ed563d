"""An island of JAX on four devices: `python -m tests.jax.sharded_islands`.

A process of its own, because the number of devices is chosen before JAX is loaded. Says
as JSON what became of its shardings, its values and its digest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll import kernels
from atoll.checkpoint import COMPONENTS, Policy
from atoll.jax import join
from tests.jax.islands import Params, moved, run_of

spec: Any = PartitionSpec  # its own has no types
SPECS = {
    "both": spec("data", "model"),
    "columns": spec(None, "model"),
    "everywhere": spec(),
    "rows": spec(("data", "model")),
}
VALUES = np.arange(32, dtype=np.float32).reshape(8, 4)


def spread() -> Params:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    return {
        name: jax.device_put(VALUES, NamedSharding(mesh, spec))
        for name, spec in SPECS.items()
    }


def lived(given: Params, checkpoint: Policy | None = None) -> tuple[Params, str]:
    run = run_of(every=2, outer={"optimizer": "nesterov", "lr": 0.5, "momentum": 0.5})
    with join(given, given, run, checkpoint=checkpoint) as island:
        params = island.params
        for _ in range(4):
            params = moved(params, 1.0)
            params = island.stepped(params, optimizer=params)
        return params, island.digest
    raise AssertionError


def main() -> None:
    kernels.use("numpy")  # starts at once
    given = spread()
    with tempfile.TemporaryDirectory() as directory:
        policy = Policy(directory, components=COMPONENTS)
        params, digest = lived(given, policy)
        again = join(spread(), spread(), "none", checkpoint=policy)
        kept = again.optimizer
        again.leave()
    alone, same = lived({name: jax.device_put(VALUES) for name in SPECS})
    said = {
        "devices": len(jax.devices()),
        "kept": [params[n].sharding == given[n].sharding for n in SPECS],
        "restored": [kept[n].sharding == given[n].sharding for n in SPECS],
        "equal": [np.array_equal(params[n], alone[n]) for n in SPECS],
        "one_digest": digest == same,
    }
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
