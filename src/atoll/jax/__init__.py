"""Owns what JAX users touch. Does not know how updates travel.

Start reading at `join`.
"""

from atoll.jax.island import Evaluation, Island
from atoll.jax.join import join

__all__ = ["Evaluation", "Island", "join"]
