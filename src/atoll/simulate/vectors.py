"""An island's live weights in virtual time: plain vectors."""

from __future__ import annotations

import numpy as np

from atoll.weights import Layout
from atoll.weights.layout import F32


class VectorView:
    """One flat vector per fragment. Implements `ParameterView`."""

    def __init__(self) -> None:
        self._layout: Layout = ()
        self.local: list[F32] = []

    def lay_out(self, layout: Layout) -> None:
        self._layout = layout
        self.local = [np.zeros(each.elements, np.float32) for each in layout]

    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.local[fragment]

    def write(self, fragment: int, values: F32) -> None:
        self._layout[fragment].load(values, self.local[fragment])
