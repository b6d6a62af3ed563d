"""A module as the run sees it: its tensors by name, carried, compared or constant.

A `Stage` is a stage of a pipeline, as its rank declares it. `model_tensors_of` lists
the tensors of a model that may still be empty, by the names of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from atoll.errors import ModelError, UsageError
from atoll.exchange.base import PART_BYTES
from atoll.island import Host
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.model import Role
from atoll.weights import FragmentLayout, Layout
from atoll.weights.layout import F32
from atoll.wire import blake3_digest
from atoll.wire.digests import Bytes

Digest = Callable[[torch.Tensor], str]

_COMPILED = "_orig_mod."
"""Prefix that torch.compile adds to names; the run's names do not have it."""


@dataclass(frozen=True)
class CarriedTensor:
    """A carried tensor, the module that holds it, and its dtype at joining."""

    tensor: torch.Tensor
    owner: torch.nn.Module
    attribute: str
    dtype: torch.dtype

    @classmethod
    def of(cls, module: torch.nn.Module, name: str) -> CarriedTensor:
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        tensor = getattr(owner, attribute)
        return cls(tensor, owner, attribute, tensor.dtype)

    def require_same(self, name: str) -> None:
        """Raise unless the module still holds this tensor, in its dtype."""
        if getattr(self.owner, self.attribute) is not self.tensor:
            raise ModelError(
                f"{name!r} is another tensor than when the island joined. "
                "Change weights in place, or move and load them before joining."
            )
        if self.tensor.dtype != self.dtype:
            raise ModelError(
                f"{name!r} was {self.dtype} when the island joined, and is "
                f"{self.tensor.dtype} now. Cast the model before joining."
            )
        is_parameter = isinstance(self.tensor, torch.nn.Parameter)
        if is_parameter and not self.tensor.requires_grad:
            raise ModelError(
                f"{name!r} was trained when the island joined, and is frozen now. "
                "Freeze parameters before joining."
            )


@dataclass(frozen=True)
class TorchModel:
    """The tensors of a module by the names that all islands share.

    A tied tensor appears once, under its first name. Counters (integer buffers without
    dimensions, such as BatchNorm's num_batches_tracked) belong to each island and are
    left out.
    """

    spec: ModelSpec
    carried: dict[str, CarriedTensor]
    frozen: dict[str, torch.nn.Parameter]
    tensors: dict[str, torch.Tensor]
    """All that the spec lists."""

    @classmethod
    def of(cls, module: torch.nn.Module, *, digest: Digest | None = None) -> TorchModel:
        """Return the model of a module; `digest` is that of a constant's bytes.

        Raises:
            UsageError: the module is on the meta device, or trains nothing.
        """
        digest = digest or digest_of
        carried: dict[str, CarriedTensor] = {}
        frozen: dict[str, torch.nn.Parameter] = {}
        tensors: dict[str, torch.Tensor] = {}
        specs: list[TensorSpec] = []
        for path, parameter in module.named_parameters():
            name = path.replace(_COMPILED, "")
            tensors[name] = parameter
            if parameter.requires_grad:
                carried[name] = CarriedTensor.of(module, path)
                specs.append(_carried(name, parameter, "parameter"))
            else:
                frozen[name] = parameter
                specs.append(_constant(name, parameter, digest))
        if not carried:
            raise UsageError(
                "The model has no parameter that requires a gradient: there is "
                "nothing to train. Call requires_grad_() on the parameters to train."
            )
        for path, buffer in _persistent_buffers(module):
            name = path.replace(_COMPILED, "")
            tensors[name] = buffer
            if buffer.is_floating_point():
                carried[name] = CarriedTensor.of(module, path)
                specs.append(_carried(name, buffer, "buffer"))
            elif buffer.dim():
                specs.append(_constant(name, buffer, digest))
        return cls(ModelSpec(tuple(specs)), carried, frozen, tensors)

    def require_same_training(self) -> None:
        """Raise if other parameters are trained than at joining."""
        for name, carried in self.carried.items():
            carried.require_same(name)
        for name, parameter in self.frozen.items():
            if parameter.requires_grad:
                raise ModelError(
                    f"{name!r} was frozen when the island joined, and is trained now. "
                    "Unfreeze parameters before joining."
                )


class TorchView:
    """The live weights of a module. Implements `ParameterView`."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self._tensors: list[list[torch.Tensor]] = []
        self._sizes: list[list[int]] = []

    def lay_out(self, layout: Layout) -> None:
        for fragment in layout:
            names = [tensor.name for tensor in fragment.tensors]
            self._tensors.append([self._model.carried[name].tensor for name in names])
            self._sizes.append(list(fragment.sizes))

    @torch.no_grad()
    def read(self, fragment: int, out: F32) -> None:
        self._model.require_same_training()
        tensors = self._tensors[fragment]
        torch._foreach_copy_(self._views(fragment, out), tensors)

    @torch.no_grad()
    def write(self, fragment: int, values: F32) -> None:
        tensors = self._tensors[fragment]
        torch._foreach_copy_(tensors, self._views(fragment, values))

    def _views(self, fragment: int, flat: F32) -> list[torch.Tensor]:
        parts = torch.from_numpy(flat).split_with_sizes(self._sizes[fragment])
        tensors = self._tensors[fragment]
        return [
            part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
        ]


class HeldWeights(Protocol):
    """The weights of an island in its model. Its loop calls it, on all ranks alike."""

    def anchor(self) -> dict[str, torch.Tensor]:
        """Return the anchor by name; ranks that are not the leader get none."""
        ...

    def keep_local(self) -> list[F32]:
        """Return a copy of the local weights, for `restore_local`."""
        ...

    def load_anchor(self) -> int:
        """Put the anchor into the model, and return its lowest round."""
        ...

    def restore_local(self, vectors: list[F32]) -> None: ...


class HostWeights:
    """The weights of an island of one process. Implements `HeldWeights`."""

    def __init__(self, host: Host, view: TorchView) -> None:
        self._host, self._view = host, view

    def anchor(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        for slot in self._host.slots:
            flat, _ = self._host.read_anchor(slot.index)
            weights |= by_name(slot.layout, flat)
        return weights

    def keep_local(self) -> list[F32]:
        vectors = [
            np.empty(slot.layout.elements, np.float32) for slot in self._host.slots
        ]
        for index, values in enumerate(vectors):
            self._view.read(index, values)
        return vectors

    def load_anchor(self) -> int:
        return min(self._load_anchor(slot.index) for slot in self._host.slots)

    def restore_local(self, vectors: list[F32]) -> None:
        for index, values in enumerate(vectors):
            self._view.write(index, values)

    def _load_anchor(self, fragment: int) -> int:
        values, round = self._host.read_anchor(fragment)
        self._view.write(fragment, values)
        return round


def by_name(layout: FragmentLayout, flat: F32) -> dict[str, torch.Tensor]:
    """Return the tensors of a fragment's flat vector, which they share."""
    parts = torch.from_numpy(flat).split_with_sizes(list(layout.sizes))
    return {
        tensor.name: part.view(tensor.shape)
        for tensor, part in zip(layout.tensors, parts, strict=True)
    }


class TorchConstants:
    """The constants of a module in this process. Implements `Constants`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def parts(self, constant: TensorSpec, first: int = 0) -> Iterator[Bytes]:
        # A part of a tensor on a device comes to the host alone.
        flat = self._tensors[constant.name].detach().contiguous().reshape(-1)
        width = flat.element_size()
        begin, beyond = divmod(first, width)
        step = PART_BYTES // width
        for start in range(begin, flat.numel(), step):
            yield raw_bytes(flat[start : start + step])[beyond:]
            beyond = 0


def _persistent_buffers(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.Tensor]]:
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in saved:
            yield name, buffer


def _carried(name: str, tensor: torch.Tensor, role: Role) -> TensorSpec:
    _require_values(name, tensor)
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=_dtype(tensor),
        role=role,
    )


def _constant(name: str, tensor: torch.Tensor, digest: Digest) -> TensorSpec:
    _require_values(name, tensor)
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=_dtype(tensor),
        role="constant",
        digest=digest(tensor),
    )


def _require_values(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise UsageError(
            f"{name!r} is on the meta device and holds no values. "
            "Materialise the model before joining."
        )


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes, in hex."""
    return blake3_digest(raw_bytes(tensor)).hex()


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the values as they lie in memory, end to end."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """One stage of a pipeline: pass it to `join` instead of a model.

    Stages in the order of their index are the model: the names of all of them, each in
    its own order, must be those of the whole model, in its order.
    A rank that holds several stages passes a list of them.
    """

    module: torch.nn.Module
    """This rank's part of the stage: plain, in DDP, or fully_shard'ed."""

    index: int
    """Index of the stage, from 0."""

    num_stages: int
    """Number of stages of the pipeline."""

    names: Mapping[str, str] = field(default_factory=dict)
    """From names in the module to names in the model. A key that ends in a dot stands
    for all names that begin with it; other tensors have the same name in both."""

    ties: Mapping[str, str] = field(default_factory=dict)
    """From names in the module to names in the model of tensors that *another* stage
    owns: the copy here is trained as that one is, and takes its values from it."""

    group: dist.ProcessGroup | None = None
    """The ranks of the whole island; None: all of torch.distributed's world."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_stages:
            raise UsageError(
                f"Stage(index={self.index}, num_stages={self.num_stages}) is not in "
                f"the pipeline. Choose an index from 0 to {self.num_stages - 1}."
            )

    def model_name(self, name: str) -> str:
        """Return the name in the whole model of a tensor of the module."""
        if name in self.ties:
            return self.ties[name]
        if name in self.names:
            return self.names[name]
        prefixes = [key for key in self.names if key.endswith(".")]
        for prefix in sorted(prefixes, key=len, reverse=True):
            if name.startswith(prefix):
                return self.names[prefix] + name.removeprefix(prefix)
        return name

    def require_known(self, names: set[str]) -> None:
        """Raise unless all declared names are in the module."""
        for key in (*self.names, *self.ties):
            is_prefix = key.endswith(".") and key in self.names
            if key not in names and not (
                is_prefix and any(name.startswith(key) for name in names)
            ):
                raise UsageError(
                    f"Stage {self.index} declares {key!r}, and its module has no such "
                    f"tensor. It has {', '.join(sorted(names)[:8])}."
                )


Built = torch.nn.Module | Stage | Sequence[Stage]


@dataclass
class ModelTensor:
    """One tensor, and all modules that hold it."""

    name: str
    """Its name in the model; of a tied tensor, the first one."""

    tensor: torch.Tensor
    is_persistent: bool
    holders: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, torch.nn.Parameter)

    def put(self, value: torch.Tensor) -> None:
        """Put a tensor into every holder, so that tied tensors stay tied."""
        if self.is_parameter and not isinstance(value, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        for module, attribute in self.holders:
            if self.is_parameter:
                module._parameters[attribute] = value  # type: ignore[assignment]
            else:
                module._buffers[attribute] = value
        self.tensor = value

    def refresh(self) -> None:
        """Read the tensor from its holder again: a conversion may have replaced it."""
        module, attribute = self.holders[0]
        self.tensor = getattr(module, attribute)


def modules_of(built: Built) -> list[tuple[torch.nn.Module, Callable[[str], str]]]:
    """Return the modules of a model, each with a function to the model's names."""
    if isinstance(built, torch.nn.Module):
        return [(built, lambda name: name)]
    stages = [built] if isinstance(built, Stage) else list(built)
    return [(stage.module, stage.model_name) for stage in stages]


def model_tensors_of(built: Built) -> list[ModelTensor]:
    """Return every tensor of a model, once."""
    targets: dict[int, ModelTensor] = {}
    for module, model_name in modules_of(built):
        saved = set(module.state_dict(keep_vars=True))
        for path, tensor, holder, attribute in _tensors(module):
            name = model_name(path)
            target = targets.setdefault(
                id(tensor), ModelTensor(name, tensor, is_persistent=path in saved)
            )
            target.is_persistent |= path in saved
            target.holders.append((holder, attribute))
            target.names.append(name)
    return list(targets.values())


def _tensors(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.Tensor, torch.nn.Module, str]]:
    for prefix, holder in module.named_modules(remove_duplicate=False):
        members = {**holder._parameters, **holder._buffers}
        for attribute, tensor in members.items():
            if tensor is not None:
                path = f"{prefix}.{attribute}" if prefix else attribute
                yield path, tensor, holder, attribute
