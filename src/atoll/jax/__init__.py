"""Owns what JAX users touch. Does not know how updates travel between machines.

Start reading at `diloco`, then `law` and `programs`.
"""

from atoll.jax.diloco import diloco
from atoll.jax.state import DilocoState
from atoll.jax.traffic import collective_bytes

__all__ = ["DilocoState", "collective_bytes", "diloco"]
