"""Values of PyTorch in a checkpoint: the adapter that `atoll.checkpoint` loads by name.

Tensors are arrays; of a DTensor each rank writes its piece, with the piece's position
in the whole. torch.distributed.checkpoint stores the list of such pieces in a pickle,
so the pieces are in safetensors with the offsets where its reader of safetensors looks
for them, and the list is in our own tree. Modules, optimizers and generators are saved
and restored by their states.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from atoll.checkpoint.frameworks import (
    FrameworkAdapter,
    Keep,
    Ranks,
    RestoreContext,
    StateHolder,
    TreePath,
)
from atoll.errors import AtollWarning, CorruptError, UsageError
from atoll.torch.checkpoint_arrays import (
    DTYPES,
    decode_piece,
    encode_piece,
    encode_tensor,
    is_piece,
    laid_out,
    tensor_of,
)

TENSOR = "!torch.tensor"
PIECE = "!torch.piece"
SIZE = "!torch.size"
DTYPE = "!torch.dtype"
DEVICE = "!torch.device"

_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


class TorchAdapter:
    """Implements `FrameworkAdapter`."""

    def encode(self, value: object, keep: Keep) -> tuple[str, object] | None:
        if isinstance(value, torch.Tensor):
            if is_piece(value):
                return PIECE, encode_piece(value, keep)
            return TENSOR, encode_tensor(value, keep)
        if isinstance(value, torch.Size):
            return SIZE, list(value)
        if isinstance(value, torch.dtype) and value in DTYPES:
            return DTYPE, str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return DEVICE, str(value)
        return None

    def decode(
        self, tag: str, body: object, path: TreePath, context: RestoreContext
    ) -> object:
        if tag == TENSOR and isinstance(body, str):
            return laid_out(
                tensor_of(context.source.read(body)), path, context.like(path)
            )
        if tag == PIECE and isinstance(body, dict):
            return decode_piece(body, path, context)
        if tag == SIZE and isinstance(body, list) and all(type(n) is int for n in body):
            return torch.Size(body)
        if tag == DTYPE and isinstance(body, str) and body in _DTYPE_NAMES:
            return _DTYPE_NAMES[body]
        if tag == DEVICE and isinstance(body, str):
            return _device(body)
        raise CorruptError(
            f"{tag[:40]!r} with {str(body)[:60]!r} is no value of torch."
        )

    def holder(
        self, value: object, objects: Mapping[str, object]
    ) -> StateHolder | None:
        if isinstance(value, torch.nn.Module):
            return ModuleHolder(value)
        if isinstance(value, torch.optim.Optimizer):
            return OptimizerHolder(value, objects)
        if isinstance(value, torch.Generator):
            return GeneratorHolder(value)
        return None

    def random(self) -> StateHolder:
        return ProcessGenerators()

    def ranks(self) -> Ranks | None:
        return WorldRanks() if world_size() > 1 else None


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as exc:
        raise CorruptError(f"{text[:40]!r} is no device of torch.") from exc


FACE: FrameworkAdapter = TorchAdapter()


_METADATA = "_metadata"
"""Key of a module's versions of its parts, beside its tensors."""

_NAMES = "_parameters"
"""Key of the names of an optimizer's parameters, in its own order."""

_COMPILED = "_orig_mod"
"""Attribute of the module that torch.compile has wrapped."""


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside the wrappers of DDP and torch.compile.

    So a checkpoint of one can be restored into any other.
    """
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif module._modules.get(_COMPILED) is not None:
            module = cast("torch.nn.Module", module._modules[_COMPILED])
        else:
            return module


def is_parallel(module: torch.nn.Module) -> bool:
    """Whether a module is, perhaps under torch.compile, the same on every rank."""
    inside = module._modules.get(_COMPILED)
    return isinstance(module, DistributedDataParallel) or (
        inside is not None and is_parallel(inside)
    )


def parallel_parameters(objects: Mapping[str, object]) -> set[int]:
    """Return the parameters, by identity, that DDP holds alike on every rank."""
    return {
        id(parameter)
        for module in _modules(list(objects.values()))
        if is_parallel(module)
        for parameter in module.parameters()
    }


def parameter_names(objects: Mapping[str, object]) -> dict[int, str]:
    """Return the names of all parameters of the models, by identity."""
    names: dict[int, str] = {}
    for module in _modules(list(objects.values())):
        for name, parameter in unwrapped(module).named_parameters():
            names.setdefault(id(parameter), name)
    return names


def _modules(value: object) -> Iterator[torch.nn.Module]:
    if isinstance(value, torch.nn.Module):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _modules(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _modules(item)


class ModuleHolder:
    """A model, or one stage of it. Implements `StateHolder`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.is_replicated = is_parallel(module)
        self._module = unwrapped(module)
        self._live: Mapping[str, object] | None = None

    def state(self) -> object:
        state = self._module.state_dict()
        metadata: dict[str, dict[str, object]] = state._metadata  # type: ignore[attr-defined]
        versions = {key: dict(value) for key, value in metadata.items()}
        return {**state, _METADATA: versions}

    def restore(self, state: object) -> None:
        self._require_memory()
        tensors = OrderedDict(cast("dict[str, torch.Tensor]", state))
        versions = tensors.pop(_METADATA, None)
        tensors._metadata = versions  # type: ignore[attr-defined]
        self._module.load_state_dict(tensors)

    def like(self, path: TreePath) -> object:
        if self._live is None:
            self._live = self._module.state_dict()
        return self._live.get(str(path[0])) if len(path) == 1 else None

    def _require_memory(self) -> None:
        for name, value in self._module.state_dict().items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UsageError(
                    f"{name} is on the meta device, where nothing can be loaded into "
                    "it. Give the model memory first, with to_empty(device=...), and "
                    "make its optimizer after that."
                )


class OptimizerHolder:
    """An optimizer's own state. Implements `StateHolder`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, objects: Mapping[str, object]
    ) -> None:
        self._optimizer = optimizer
        self._parameters = _in_order(optimizer)
        self._objects = objects
        parallel = parallel_parameters(objects)
        self.is_replicated = bool(self._parameters) and all(
            id(parameter) in parallel for parameter in self._parameters
        )

    def state(self) -> object:
        return {**self._optimizer.state_dict(), _NAMES: self._names()}

    def restore(self, state: object) -> None:
        own_state = dict(cast("dict[str, Any]", state))
        self._require_order(own_state.pop(_NAMES, []))
        self._optimizer.load_state_dict(own_state)

    def like(self, path: TreePath) -> object:
        """Return the parameter that a value belongs to: most states have its layout."""
        if len(path) < 3 or path[0] != "state" or path[2] == "step":
            return None
        index = path[1]
        is_known = isinstance(index, int) and index < len(self._parameters)
        return self._parameters[cast("int", index)] if is_known else None

    def _names(self) -> list[str | None]:
        names = parameter_names(self._objects)
        return [names.get(id(parameter)) for parameter in self._parameters]

    def _require_order(self, saved: list[str | None]) -> None:
        # A state belongs to its parameter's index, so another order would silently pair
        # one parameter's momentum with another's weights.
        for index, (was, now) in enumerate(zip(saved, self._names(), strict=False)):
            if was is not None and now is not None and was != now:
                raise UsageError(
                    f"Parameter {index} of the optimizer is {now} here and {was} in "
                    "the checkpoint. Give the optimizer its parameters in the same "
                    "order."
                )


def _in_order(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters as an optimizer numbers them in its state."""
    parameters: dict[int, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameters.setdefault(id(parameter), parameter)
    return list(parameters.values())


class GeneratorHolder:
    """A generator that the program has made. Implements `StateHolder`."""

    is_replicated = False

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state(self) -> object:
        return self._generator.get_state()

    def restore(self, state: object) -> None:
        self._generator.set_state(cast("torch.Tensor", state))

    def like(self, path: TreePath) -> object:
        return None


class ProcessGenerators:
    """The default generators of torch on every device. Implements `StateHolder`."""

    is_replicated = False

    def state(self) -> object:
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if in_use else [],
        }

    def restore(self, state: object) -> None:
        states = cast("dict[str, Any]", state)
        torch.set_rng_state(states["cpu"])
        devices = states["cuda"]
        present = torch.cuda.device_count() if devices else 0
        if len(devices) > present:
            warnings.warn(
                f"The checkpoint has the random states of {len(devices)} CUDA devices, "
                f"and there are {present}: the other states are ignored.",
                AtollWarning,
                stacklevel=2,
            )
        for index, device_state in enumerate(devices[:present]):
            torch.cuda.set_rng_state(device_state, index)

    def like(self, path: TreePath) -> object:
        return None


def world_size() -> int:
    """Return the number of processes; 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size()


class WorldRanks:
    """All processes of the default group. Implements `Ranks`.

    Texts are sent as bytes in tensors: torch would pickle objects.
    """

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def gather(self, text: str) -> list[str]:
        data = text.encode("utf-8", "replace")
        device = _device_of_group()
        sizes = [
            torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)
        ]
        dist.all_gather(sizes, torch.tensor([len(data)], device=device))
        room = max(1, max(int(size) for size in sizes))
        padded = torch.zeros(room, dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(
            bytearray(data or b"\0"), dtype=torch.uint8
        )[: len(data)]
        texts = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in sizes]
        dist.all_gather(texts, padded.to(device))
        return [
            bytes(data[: int(size)].cpu().numpy()).decode("utf-8", "replace")
            for data, size in zip(texts, sizes, strict=True)
        ]


def _device_of_group() -> torch.device:
    """Return the device of the default group's tensors."""
    if "gloo" in dist.get_backend() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
