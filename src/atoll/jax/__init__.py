"""Owns what JAX users touch. Does not know how updates travel between machines.

Start reading at `join` for an island in a run; for islands that share a program at
`diloco`, then `programs` and `outer_step`.
"""

from atoll.jax.diloco import diloco
from atoll.jax.island import Evaluation, Island, join
from atoll.jax.programs import collective_bytes
from atoll.jax.state import DilocoState
from atoll.jax.with_orbax import Restored, restore, save

__all__ = [
    "DilocoState",
    "Evaluation",
    "Island",
    "Restored",
    "collective_bytes",
    "diloco",
    "join",
    "restore",
    "save",
]
