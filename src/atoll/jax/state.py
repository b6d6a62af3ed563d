"""What a run of `diloco` holds between two inner steps: a tree of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

Array = Any
"""An array; or, where a state is abstract, its shape, dtype and place."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Flights:
    """The slots of one kind of fragment, as the first axis of every array."""

    sealed: tuple[tuple[Array, ...], ...]
    """For each piece its encoded update: slot, island, then the codec's own axes."""

    at_seal: tuple[Array, ...]
    """For each piece the local weights at the seal, if they are to be rebased."""

    mean: tuple[Array, ...]
    """For each piece the merged update, as far as it has been reduced."""

    squares: Array
    """For each slot and island the squared norm of its update."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drift:
    """How far islands are apart, as of each fragment's last round."""

    norm: Array
    """Norm of each island's update: fragment, island."""

    cosine: Array
    """Cosine between the updates of two islands, for each fragment.

    sum_(i != j) <D_i, D_j> / ((N - 1) sum_i |D_i|^2): the mean over pairs where norms
    are equal. NaN with a trimmed mean, which does not show it.
    """


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DilocoState:
    """All that `step` takes and returns; it consumes what it is given."""

    inner_steps: Any
    """Inner steps made: a host's number, so that asking for it waits for no device."""

    islands: Any
    """The train state, with the islands as a first axis of every array."""

    anchor: Any
    """The agreed parameters in fp32, as the tree that `params_of` selects."""

    velocity: tuple[Any, ...]
    """Trees like the anchor: none with sgd, two with adam, else one."""

    residual: Any
    """What encoding lost: a tree like the islands' parameters, or None."""

    flights: tuple[Flights, ...]
    """Updates that are in the air, for each kind of fragment."""

    drift: Drift
