"""What one rank holds of the model: its tensors by the model's names, and their boxes.

A box is the part of a tensor that a rank has: rows `start` to `start + size` of every
dimension. All of it is told to the other ranks; the values stay here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from atoll.errors import ModelError
from atoll.protocol import TensorSpec
from atoll.torch.model import TorchModel, digest_of
from atoll.torch.ranks.kinds import Team
from atoll.torch.stage import Stage

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where in each dimension the rows that a rank has start, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What everybody knows of one tensor that one rank holds."""

    spec: TensorSpec
    stage: int
    start: tuple[int, ...]
    size: tuple[int, ...]
    is_buffer: bool
    is_copy: bool = False
    """Another stage owns it: a tied weight."""

    @property
    def box(self) -> Box:
        return self.start, self.size

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    def to_message(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "name": spec.name,
            "shape": spec.shape,
            "dtype": spec.dtype,
            "role": spec.role,
            "digest": spec.digest,
            "stage": self.stage,
            "start": self.start,
            "size": self.size,
            "is_buffer": self.is_buffer,
            "is_copy": self.is_copy,
        }

    @classmethod
    def from_message(cls, said: dict[str, Any]) -> Holding:
        spec = TensorSpec(
            name=said["name"],
            shape=tuple(said["shape"]),
            dtype=said["dtype"],
            role=said["role"],
            digest=said["digest"],
        )
        return cls(
            spec=spec,
            stage=said["stage"],
            start=tuple(said["start"]),
            size=tuple(said["size"]),
            is_buffer=said["is_buffer"],
            is_copy=said["is_copy"],
        )


class Shelves:
    """The tensors of one rank, by the names that the whole model has for them."""

    def __init__(self, team: Team) -> None:
        self.holdings: list[Holding] = []
        self._values: dict[str, torch.Tensor] = {}
        self._models: list[TorchModel] = []
        self._sharded: list[FSDPModule] = []
        for stage in sorted(team.stages, key=lambda each: each.index):
            self._add(stage)

    def local(self, name: str) -> torch.Tensor:
        """Return this rank's values of a tensor; writing to them changes the model."""
        return local_of(self._values[name])

    def require_same_training(self) -> None:
        """Return when what is trained is what was trained at joining."""
        self.reshard()
        for model in self._models:
            model.require_same_training()

    def reshard(self) -> None:
        """Free gathered parameters: what they were gathered from is about to change."""
        for module in self._sharded:
            module.reshard()

    def _add(self, stage: Stage) -> None:
        self._sharded += [
            part for part in stage.module.modules() if isinstance(part, FSDPModule)
        ]
        self.reshard()
        model = TorchModel.of(stage.module, digest=_digest_here)
        self._models.append(model)
        stage.require_known({spec.name for spec in model.spec.tensors})
        for spec in model.spec.tensors:
            self._add_tensor(stage, spec, model.tensors[spec.name])

    def _add_tensor(self, stage: Stage, spec: TensorSpec, tensor: torch.Tensor) -> None:
        name = stage.model_name(spec.name)
        start, size = box_of(tensor)
        if name in self._values:
            raise ModelError(
                f"{name!r} is the name of two tensors of this rank. Give each of its "
                "stages the names that they have in the model."
            )
        self._values[name] = tensor
        self.holdings.append(
            Holding(
                spec=TensorSpec(
                    name=name,
                    shape=spec.shape,
                    dtype=spec.dtype,
                    role=spec.role,
                    digest=spec.digest,
                ),
                stage=stage.index,
                start=start,
                size=size,
                is_buffer=not isinstance(tensor, torch.nn.Parameter),
                is_copy=spec.name in stage.ties,
            )
        )


def _digest_here(tensor: torch.Tensor) -> str:
    """Return a constant's digest; of one that lies on several ranks none has all."""
    return "" if isinstance(tensor, DTensor) else digest_of(tensor)


def box_of(tensor: torch.Tensor) -> Box:
    """Return where the values that are here start, and how many rows there are."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    size, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if 0 in size:
        return (0,) * tensor.dim(), (0,) * tensor.dim()
    return tuple(start), tuple(size)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that are here, without a graph."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
