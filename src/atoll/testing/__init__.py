"""Owns what tests of islands and exchanges need, here and in users' projects.

Does not know any test framework.
Start reading at `vectors.Vectors`.
"""

from atoll.testing.vectors import Vectors, vector_model

__all__ = ["Vectors", "vector_model"]
