"""Which rank owns which elements of every fragment, computed alike on all ranks.

A box is the part of a tensor that a rank has: rows `start` to `start + size` of every
dimension. Ranks exchange names and boxes; the values stay where they are.

Ranks with the same box of a tensor are *replicas* of it: they share the fragment's
pieces among them, whole pieces each, so that the owner of a piece can hash it alone.
Buffers belong to the first replica: they may differ from rank to rank, and DDP keeps
those of the first rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from atoll.errors import ModelError
from atoll.protocol import ModelSpec, TensorSpec
from atoll.torch.model import Stage, TorchModel, digest_of
from atoll.torch.ranks.parallelism import RankGroup
from atoll.weights import FragmentLayout, Layout
from atoll.weights.ranges import Ranges, Stretches, box_runs
from atoll.wire import STATE_PIECE

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""In each dimension, the start and the number of the rows that a rank has."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """The description of one tensor on one rank, which all ranks know."""

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

    @classmethod
    def from_message(cls, fields: dict[str, Any]) -> HeldTensor:
        """Return the description that `asdict` has made plain values of."""
        spec = {**fields.pop("spec")}
        shape, start, size = (
            tuple(values)
            for values in (spec.pop("shape"), fields.pop("start"), fields.pop("size"))
        )
        return cls(
            spec=TensorSpec(shape=shape, **spec), start=start, size=size, **fields
        )


class RankTensors:
    """The tensors of one rank, by the names that the whole model has for them."""

    def __init__(self, rank_group: RankGroup) -> None:
        self.held_tensors: list[HeldTensor] = []
        self._values: dict[str, torch.Tensor] = {}
        self._models: list[TorchModel] = []
        self._sharded: list[FSDPModule] = []
        for stage in sorted(rank_group.stages, key=lambda stage: stage.index):
            self._add(stage)

    def local(self, name: str) -> torch.Tensor:
        """Return this rank's values of a tensor; writing to them changes the model."""
        return local_of(self._values[name])

    def require_same_training(self) -> None:
        """Raise if other parameters are trained than at joining."""
        self.reshard()
        for model in self._models:
            model.require_same_training()

    def reshard(self) -> None:
        """Free gathered parameters: their shards are about to change."""
        for module in self._sharded:
            module.reshard()

    def _add(self, stage: Stage) -> None:
        self._sharded += [
            part for part in stage.module.modules() if isinstance(part, FSDPModule)
        ]
        self.reshard()
        model = TorchModel.of(stage.module, digest=_local_digest)
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
        self.held_tensors.append(
            HeldTensor(
                spec=replace(spec, name=name),
                stage=stage.index,
                start=start,
                size=size,
                is_buffer=not isinstance(tensor, torch.nn.Parameter),
                is_copy=spec.name in stage.ties,
            )
        )


def _local_digest(tensor: torch.Tensor) -> str:
    """Return a constant's digest; empty if it is sharded: no rank has all of it."""
    return "" if isinstance(tensor, DTensor) else digest_of(tensor)


def box_of(tensor: torch.Tensor) -> Box:
    """Return the start and the number of the rows that this rank has."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    size, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if 0 in size:
        return (0,) * tensor.dim(), (0,) * tensor.dim()
    return tuple(start), tuple(size)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values, without a graph."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


Table = Sequence[Sequence[HeldTensor]]
"""The tensors of each rank, rank by rank."""


def model_of(table: Table, *, stages: int) -> ModelSpec:
    """Return the whole model: stages in order, of each all parameters before buffers.

    Raises:
        ModelError: ranks disagree, a stage is missing, a tensor has no owner or more
            than one, or no rank holds some part of it. The message has its name.
    """
    by_stage: list[dict[str, HeldTensor]] = [{} for _ in range(stages)]
    for rank, held_tensors in enumerate(table):
        for held_tensor in held_tensors:
            first = by_stage[held_tensor.stage].setdefault(
                held_tensor.spec.name, held_tensor
            )
            spec = held_tensor.spec
            if first.spec != spec:
                raise ModelError(
                    f"{spec.name!r} is a {spec} on rank {rank}, and a {first.spec} on "
                    "another rank of the same stage. Build the same model on all of "
                    "them."
                )
    _require_owners(by_stage)
    _require_whole(table)
    owned = [
        held_tensor
        for stage in by_stage
        for held_tensor in stage.values()
        if not held_tensor.is_copy
    ]
    ordered = sorted(owned, key=lambda held_tensor: held_tensor.is_buffer)
    return ModelSpec(tuple(held_tensor.spec for held_tensor in ordered))


class Ownership:
    """Which elements of a fragment each rank holds, and which of them it owns."""

    def __init__(self, table: Table, layout: Layout) -> None:
        self._by_rank = [
            {held_tensor.spec.name: held_tensor for held_tensor in rank}
            for rank in table
        ]
        self.layout = layout
        self.owned = cache(self._owned)
        self.held_ranges = cache(self._held_ranges)
        self.owners = cache(self._owners)

    def shared(self, source: int, to: int, fragment: int) -> Ranges:
        """Return the elements that one rank owns and another holds as well."""
        receiver = self._by_rank[to]
        return Ranges.of(
            runs
            for tensor, runs in self._runs(source, fragment, owned=True)
            if tensor.name in receiver
            and receiver[tensor.name].box == self._by_rank[source][tensor.name].box
        )

    def part(self, rank: int, fragment: int, *, owned: bool = True) -> FragmentLayout:
        """Return the layout of the rank's compact vector of a fragment."""
        layout = self.layout[fragment]
        tensors = [
            TensorSpec(
                name=tensor.name,
                shape=(elements,),
                dtype=tensor.dtype,
                role=tensor.role,
            )
            for tensor, runs in self._runs(rank, fragment, owned=owned)
            if (elements := int((runs[1] - runs[0]).sum()))
        ]
        return FragmentLayout(tuple(tensors), is_buffers=layout.is_buffers)

    def _owners(self, fragment: int) -> list[int | None]:
        """Return the owner of each piece of a fragment; None if it has several."""
        elements, ranks = self.layout[fragment].elements, range(len(self._by_rank))
        return [
            self._owner(fragment, first, min(first + STATE_PIECE, elements), ranks)
            for first in range(0, elements, STATE_PIECE)
        ]

    def _owner(
        self, fragment: int, first: int, last: int, ranks: Sequence[int]
    ) -> int | None:
        for rank in ranks:
            size = self.owned(rank, fragment).cut(first, last).size
            if size:
                return rank if size == last - first else None
        return None

    def _owned(self, rank: int, fragment: int) -> Ranges:
        return Ranges.of(runs for _, runs in self._runs(rank, fragment, owned=True))

    def _held_ranges(self, rank: int, fragment: int) -> Ranges:
        return Ranges.of(runs for _, runs in self._runs(rank, fragment, owned=False))

    def _runs(
        self, rank: int, fragment: int, *, owned: bool
    ) -> list[tuple[TensorSpec, Stretches]]:
        """Return the stretches of each tensor that a rank holds, or owns."""
        layout, held_tensors = self.layout[fragment], self._by_rank[rank]
        stretches = []
        for index, tensor in enumerate(layout.tensors):
            if tensor.name not in held_tensors:
                continue
            held_tensor, first = held_tensors[tensor.name], layout.offsets[index]
            if 0 in held_tensor.size:
                continue
            runs = box_runs(
                tensor.shape, held_tensor.start, held_tensor.size, first=first
            )
            if owned:
                bounds = self._bounds(rank, fragment, held_tensor)
                owned_runs = Ranges(*runs).within(*bounds)
                runs = owned_runs.starts, owned_runs.stops
            stretches.append((tensor, runs))
        return stretches

    def _bounds(
        self, rank: int, fragment: int, held_tensor: HeldTensor
    ) -> tuple[int, int]:
        """Return the elements between which a rank owns its part of a tensor."""
        if held_tensor.is_copy:
            return 0, 0
        name, layout = held_tensor.spec.name, self.layout[fragment]
        replicas = [
            other
            for other, tensors in enumerate(self._by_rank)
            if name in tensors
            and tensors[name].box == held_tensor.box
            and not tensors[name].is_copy
        ]
        number, count = replicas.index(rank), len(replicas)
        if layout.is_buffers:
            return (0, layout.elements) if number == 0 else (0, 0)
        # Small fragments have fewer pieces than there are replicas: they take turns.
        turn = (number - fragment) % count
        pieces = -(-layout.elements // STATE_PIECE)
        first, last = -(-turn * pieces // count), -(-(turn + 1) * pieces // count)
        return first * STATE_PIECE, last * STATE_PIECE


def _require_owners(by_stage: Sequence[dict[str, HeldTensor]]) -> None:
    owner: dict[str, int] = {}
    for index, stage in enumerate(by_stage):
        if not stage:
            raise ModelError(
                f"No rank holds stage {index} of {len(by_stage)}. Let every stage of "
                "the pipeline be joined."
            )
        for name, held_tensor in stage.items():
            if held_tensor.is_copy:
                continue
            if name in owner:
                raise ModelError(
                    f"{name!r} is in stage {owner[name]} and in stage {index} of the "
                    "pipeline, and a tensor has one owner. If it is tied, declare it "
                    f'in one of them: Stage(..., ties={{"name here": {name!r}}}).'
                )
            owner[name] = index
    for index, stage in enumerate(by_stage):
        for name, held_tensor in stage.items():
            if held_tensor.is_copy and name not in owner:
                raise ModelError(
                    f"Stage {index} declares that another one owns {name!r}, and none "
                    "does. Declare it where it is tied to, not where it is owned."
                )


def _require_whole(table: Table) -> None:
    """Raise unless the boxes of every tensor cover it, and every copy has a box."""
    boxes: dict[str, dict[Box, int]] = {}
    held_tensors = [held_tensor for rank in table for held_tensor in rank]
    for held_tensor in held_tensors:
        if not held_tensor.is_copy:
            boxes.setdefault(held_tensor.spec.name, {})[held_tensor.box] = (
                held_tensor.elements
            )
    for held_tensor in held_tensors:
        name, elements = held_tensor.spec.name, math.prod(held_tensor.spec.shape)
        if held_tensor.is_copy and held_tensor.box not in boxes[name]:
            raise ModelError(
                f"{name!r} is cut otherwise where it is tied than where it is owned. "
                "Shard both stages alike."
            )
        if (num_held := sum(boxes[name].values())) != elements:
            raise ModelError(
                f"The ranks hold {num_held} elements of {name!r}, which has "
                f"{elements}. Let all ranks of its mesh join."
            )
