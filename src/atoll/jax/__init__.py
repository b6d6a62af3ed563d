"""Owns what JAX users touch. Does not know how updates travel.

Start reading at `join`.
"""

from atoll.jax.island import Evaluation, Island
from atoll.jax.join import join
from atoll.jax.with_orbax import Restored, restore, save

__all__ = ["Evaluation", "Island", "Restored", "join", "restore", "save"]
