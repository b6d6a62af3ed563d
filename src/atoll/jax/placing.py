"""Where arrays lie on a mesh: islands along one axis, all else as the user laid it.

Without a mesh nothing is said of any place, and the same programs run on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from atoll.errors import UsageError

Spec = tuple[Any, ...]
"""One entry per axis of an array: an axis of the mesh, several of them, or None."""


@dataclass(frozen=True)
class Place:
    """The mesh of a run, and the axis of it along which its islands lie."""

    mesh: Mesh | None
    axis: str
    num_islands: int
    spread_outer: bool = False
    """Whether anchor and velocity lie along the islands' axis as well."""

    def __post_init__(self) -> None:
        if self.mesh is None:
            if self.spread_outer:
                raise UsageError(
                    "spread_outer=True needs a mesh to spread the outer state over. "
                    "Give one, or leave it out."
                )
            return
        if self.axis not in self.mesh.axis_names:
            raise UsageError(
                f"axis={self.axis!r} is none of the mesh's axes "
                f"{self.mesh.axis_names}. Name the one that islands lie along."
            )
        if any(kind != AxisType.Auto for kind in self.mesh.axis_types):
            raise UsageError(
                f"the mesh's axes are {self.mesh.axis_types}, and programs leave it to "
                "the compiler where things lie. Make it with "
                "axis_types=(jax.sharding.AxisType.Auto,) * number of axes."
            )
        if self.num_islands % self.width:
            raise UsageError(
                f"num_islands={self.num_islands} must be a multiple of the "
                f"{self.width} places along the mesh's axis {self.axis!r}."
            )

    @property
    def width(self) -> int:
        """Places along the islands' axis."""
        return 1 if self.mesh is None else int(self.mesh.shape[self.axis])

    def wait(self, made: Any) -> Any:
        """Return what a program has made: once it is there, on several host devices.

        XLA has as many threads for these as there are devices. Programs that are queued
        may take all of them to wait for one another's results: then none goes on, and
        nothing is told.
        """
        if self.mesh is None or self.mesh.size == 1:
            return made
        is_host = self.mesh.devices.flat[0].platform == "cpu"
        return jax.block_until_ready(made) if is_host else made

    def spec_of(self, leaf: Any) -> Spec:
        """Return how the axes of one island's array lie on the mesh.

        Raises:
            UsageError: it already lies along the islands' axis.
        """
        sharding = getattr(leaf, "sharding", None)  # numpy arrays and tracers have none
        if self.mesh is None or not isinstance(sharding, NamedSharding):
            return ()
        if sharding.mesh.axis_names != self.mesh.axis_names:
            return ()
        spec = tuple(sharding.spec)
        if self.axis in _axes(spec):
            raise UsageError(
                f"an array of one island lies along the islands' own axis "
                f"{self.axis!r}: {sharding.spec}. Give each island's state whole."
            )
        return spec

    def outer_spec(self, spec: Spec, shape: Sequence[int]) -> Spec:
        """Return how a leaf of the outer state lies: as the parameter, or spread."""
        if not self.spread_outer:
            return spec
        padded = [*spec, *[None] * (len(shape) - len(spec))]
        free = [
            axis
            for axis, size in enumerate(shape)
            if padded[axis] is None and size and size % self.width == 0
        ]
        if not free:
            return spec
        padded[max(free, key=lambda axis: shape[axis])] = self.axis
        return tuple(padded)

    def named(self, *spec: Any) -> NamedSharding | None:
        """Return the place of an array with these axes."""
        return (
            None
            if self.mesh is None
            else NamedSharding(self.mesh, PartitionSpec(*spec))
        )

    def apart(self, x: Array) -> Array:
        """Return `x`, whose first axis is the islands', each at its own place."""
        return self._pin(x, self.axis)

    def together(self, x: Array, spec: Spec | None = None) -> Array:
        """Return `x`, whose first axis is the islands', with all of them everywhere.

        Or, with `spec`, with all of them wherever their elements belong.
        """
        return self._pin(x, None, spec)

    def _pin(self, x: Array, first: str | None, spec: Spec | None = None) -> Array:
        if self.mesh is None:
            return x
        # The other axes are left to the compiler, which keeps them where they are.
        free: Spec = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
        where = PartitionSpec(first, *(free if spec is None else spec))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, where))


def _axes(spec: Spec) -> set[Any]:
    names: set[Any] = set()
    for each in spec:
        names |= set(each) if isinstance(each, tuple) else {each}
    return names
