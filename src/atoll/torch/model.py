"""A module as the run sees it: what is carried, what is compared, and where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from atoll.errors import ModelError, UsageError
from atoll.exchange.constants import PART_BYTES
from atoll.protocol import ModelSpec, TensorSpec
from atoll.protocol.messages import Role
from atoll.weights import Layout
from atoll.weights.layout import F32
from atoll.wire import blake3_digest
from atoll.wire.digests import Bytes

Digest = Callable[[torch.Tensor], str]

_COMPILED = "_orig_mod."
"""What torch.compile puts into names; the model is the same without."""


@dataclass(frozen=True)
class Place:
    """A carried tensor, the module that holds it, and its dtype at joining."""

    tensor: torch.Tensor
    owner: torch.nn.Module
    attribute: str
    dtype: torch.dtype

    @classmethod
    def of(cls, module: torch.nn.Module, name: str) -> Place:
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        tensor = getattr(owner, attribute)
        return cls(tensor, owner, attribute, tensor.dtype)

    def require_same(self, name: str) -> None:
        """Return when the module still holds this tensor, in its dtype."""
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

    A tied tensor appears once, under its first name. Whole numbers that count
    (integer buffers without dimensions, such as BatchNorm's num_batches_tracked)
    belong to each island and appear nowhere.
    """

    spec: ModelSpec
    carried: dict[str, Place]
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
        carried: dict[str, Place] = {}
        frozen: dict[str, torch.nn.Parameter] = {}
        tensors: dict[str, torch.Tensor] = {}
        specs: list[TensorSpec] = []
        for path, parameter in module.named_parameters():
            name = path.replace(_COMPILED, "")
            tensors[name] = parameter
            if parameter.requires_grad:
                carried[name] = Place.of(module, path)
                specs.append(_carried(name, parameter, "parameter"))
            else:
                frozen[name] = parameter
                specs.append(_constant(name, parameter, digest))
        if not carried:
            raise UsageError(
                "The model has no parameter that requires a gradient: there is "
                "nothing to train. Call requires_grad_() on what is to be trained."
            )
        for path, buffer in _persistent_buffers(module):
            name = path.replace(_COMPILED, "")
            tensors[name] = buffer
            if buffer.is_floating_point():
                carried[name] = Place.of(module, path)
                specs.append(_carried(name, buffer, "buffer"))
            elif buffer.dim():
                specs.append(_constant(name, buffer, digest))
        return cls(ModelSpec(tuple(specs)), carried, frozen, tensors)

    def require_same_training(self) -> None:
        """Return when what is trained is what was trained at joining."""
        for name, place in self.carried.items():
            place.require_same(name)
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
        for at in range(begin, flat.numel(), step):
            yield raw_bytes(flat[at : at + step])[beyond:]
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
