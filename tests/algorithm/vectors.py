"""Small fp32 vectors for tests of the algorithm."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

F32 = NDArray[np.float32]

eighths = st.integers(-1024, 1024).map(lambda n: n / 8)
"""Eleven bits: sums of a few, and products with quarters, are exact in fp32."""


def array(*values: float) -> F32:
    """Return an fp32 vector."""
    return np.array(values, np.float32)


def equal(a: F32, b: F32) -> bool:
    """Return whether two vectors have the same bits."""
    return a.tobytes() == b.tobytes()
