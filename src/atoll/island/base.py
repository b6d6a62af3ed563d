"""The port of an island's host to the training framework: the live model."""

from __future__ import annotations

from typing import Protocol

from atoll.weights import Layout
from atoll.weights.layout import F32


class ParameterView(Protocol):
    """The live weights of a model, fragment by fragment.

    The host is the only caller, from the thread that trains, between inner steps.
    """

    def lay_out(self, layout: Layout) -> None:
        """Learn which tensors make up each fragment. Called once, before the rest."""
        ...

    def read(self, fragment: int, out: F32) -> None:
        """Copy the fragment's live weights into `out`, as fp32."""
        ...

    def write(self, fragment: int, values: F32) -> None:
        """Make `values` the fragment's live weights, each cast to its own dtype.

        The optimizer's state is not touched, and tensors keep their storage.
        """
        ...
