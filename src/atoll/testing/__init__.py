"""Owns what tests of islands and exchanges need, here and in users' projects.

Does not know any test framework.
Start reading at `Vectors`.
"""

from atoll.island.vectors import Vectors, vector_model

__all__ = ["Vectors", "vector_model"]
