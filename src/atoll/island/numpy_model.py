"""A model of plain numpy vectors: an island without a framework."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll.protocol import ModelSpec, TensorSpec
from atoll.weights import Layout
from atoll.weights.layout import F32


def vector_model(
    shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "float32"
) -> ModelSpec:
    """Return a model whose every tensor is a parameter of the given shape."""
    return ModelSpec(
        tuple(
            TensorSpec(name=name, shape=shape, dtype=dtype, role="parameter")
            for name, shape in shapes.items()
        )
    )


class VectorView:
    """Live weights, one flat vector per fragment. Implements `ParameterView`.

    `local[f]` may be changed freely between inner steps: that is what training does.
    """

    def __init__(self, *, fill: float = 0.0) -> None:
        self._fill = fill
        self.layout: Layout = ()
        self.local: list[F32] = []

    def lay_out(self, layout: Layout) -> None:
        self.layout = layout
        self.local = [
            np.full(fragment.elements, self._fill, np.float32) for fragment in layout
        ]

    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.local[fragment]

    def write(self, fragment: int, values: F32) -> None:
        self.layout[fragment].load(values, self.local[fragment])
