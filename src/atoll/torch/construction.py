"""Construction of a model without memory, and checks of a model that is joined.

Rule 1: a parameter moves to the meta device when it is registered. Buffers and plain
        attributes are real: their values are those that the constructor gives.
Rule 2: no random number of torch is drawn. Values that depend on a draw, or on memory
        that was never written, are unknown.
Rule 3: values are unknown, too, if they differ in a second construction, because they
        come from numpy, Python's `random` or the time. Fresh memory is marked there, so
        that tensors written only in part are found, unless a parameter was made of it
        in the first one: marking it would allocate the parameter.

`require_values` and `require_trained` are the checks of `join`: it refuses an empty
model, and an optimizer of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from atoll.errors import UsageError
from atoll.torch.model import ModelTensor, model_tensors_of, modules_of

M = TypeVar("M")


@dataclass(frozen=True)
class Attribute:
    """A tensor that a module has as neither parameter nor buffer."""

    name: str
    module: torch.nn.Module
    attribute: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class EmptyModel:
    """A model without memory, and the values that its constructor gives."""

    targets: list[ModelTensor]
    attributes: list[Attribute]
    values: dict[str, torch.Tensor | None]
    """Values of the tensors that no run has, by name; None if unknown."""


def make_empty(
    make: Callable[[], M], is_rest: Callable[[ModelTensor], bool]
) -> tuple[M, EmptyModel]:
    """Return a model without memory, and the values that its constructor would give.

    `is_rest` selects the tensors whose values are wanted.

    Raises:
        UsageError: a tensor is lazy, or a plain attribute is random. The message has
            its name.
    """
    built, memory = construct(make)
    empty = _described(built, memory, is_rest)
    if empty.values or _is_one_of_several():
        again, other = construct(make, memory.of_parameters)
        _drop_random(empty, _described(again, other, is_rest))
    return built, empty


def put_attributes(empty: EmptyModel, device: torch.device) -> None:
    """Put plain attributes on the device; unknown ones stay without memory.

    Those that a forward pass computes get their values then.
    """
    for item in empty.attributes:
        value = empty.values[item.name]
        value = item.tensor.to("meta") if value is None else value.to(device)
        setattr(item.module, item.attribute, value)


def _described(
    built: object, memory: ConstructionMemory, is_rest: Callable[[ModelTensor], bool]
) -> EmptyModel:
    targets = model_tensors_of(built)  # type: ignore[arg-type]
    for target in targets:
        require_shape(target.name, target.tensor)
    attributes = list(_attributes(built))
    wanted = {target.name: target.tensor for target in targets if is_rest(target)}
    wanted |= {item.name: item.tensor for item in attributes}
    values = {
        name: tensor.detach().clone() if memory.is_known(tensor) else None
        for name, tensor in wanted.items()
    }
    return EmptyModel(targets, attributes, values)


def _drop_random(empty: EmptyModel, again: EmptyModel) -> None:
    """Drop the values that differ in the second construction, or were not written."""
    attributes = {item.name for item in empty.attributes}
    for name, value in empty.values.items():
        other = again.values.get(name)
        if value is None or other is None or has_no_value(other):
            empty.values[name] = None
        elif not _is_same(value, other):
            empty.values[name] = None
            if name in attributes:
                raise UsageError(
                    f"{name!r} is a plain attribute that the constructor draws at "
                    "random or leaves empty. Register it as a buffer, which is saved "
                    "or filled by initialise=."
                )


def _is_same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both have the same bits."""
    if (value.shape, value.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bits(value), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _attributes(built: object) -> Iterator[Attribute]:
    for root, model_name in modules_of(built):  # type: ignore[arg-type]
        for prefix, module in root.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    path = f"{prefix}.{attribute}" if prefix else attribute
                    yield Attribute(model_name(path), module, attribute, value)


def _is_one_of_several() -> bool:
    """Return whether other ranks make models: all of them then make the same calls."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_FRESH = ("empty", "empty_like", "new_empty", "empty_strided", "empty_permuted")


@dataclass
class ConstructionMemory:
    """Where the values of one construction come from, by the memory of its tensors."""

    unmarked: set[int] | None = None
    """Numbers of fresh memory that is not marked as never written; None for all."""

    of_parameters: set[int] = field(default_factory=set)
    """Numbers of the fresh memory that a parameter was made of."""

    _fresh: dict[int, tuple[int, torch.Tensor]] = field(default_factory=dict)
    """Numbers of memory that was never written. It is kept: its address is the key."""

    _random: dict[int, torch.Tensor] = field(default_factory=dict)
    """Memory whose values depend on a random draw, or on memory never written."""

    _count: int = 0

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has values, and none of them is random."""
        memory = _memory(tensor)
        return not (tensor.is_meta or memory in self._fresh or memory in self._random)

    def add_fresh(self, tensor: torch.Tensor) -> None:
        """Number the memory of a tensor, and mark it."""
        number, self._count = self._count, self._count + 1
        if self.unmarked is not None and number not in self.unmarked:
            _mark(tensor)
        self._fresh[_memory(tensor)] = number, tensor

    def add_result(
        self,
        inputs: Sequence[torch.Tensor],
        changed: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        *,
        is_random: bool,
    ) -> None:
        """Note an operation: its results are as random as the values that it reads."""
        written = set(map(_memory, changed))
        read = set(map(_memory, inputs)) - written
        is_random |= any(key in self._fresh or key in self._random for key in read)
        for key in written:
            self._fresh.pop(key, None)
        for tensor in (*results, *changed):
            # A view of memory that is only read has no new values.
            if is_random and not tensor.is_meta and _memory(tensor) not in read:
                self._random[_memory(tensor)] = tensor

    def use(self, parameter: torch.Tensor) -> None:
        """Forget the memory of a parameter, which is on the meta device from now on."""
        number, _ = self._fresh.pop(_memory(parameter), (None, None))
        self._random.pop(_memory(parameter), None)
        if number is not None:
            self.of_parameters.add(number)


class _Empty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows values from operation to operation, and draws no random number."""

    def __init__(self, memory: ConstructionMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        results = (_undrawn if is_random else _called)(func, args, kwargs)
        outputs = _tensors(results)
        if func.overloadpacket.__name__ in _FRESH:
            for tensor in outputs:
                if not tensor.is_meta:
                    self._memory.add_fresh(tensor)
            return results
        inputs, changed = _tensors((args, kwargs)), _changed(func, args, kwargs)
        self._memory.add_result(inputs, changed, outputs, is_random=is_random)
        return results


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes into."""
    changed: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            changed += _tensors(value)
    return changed


def _undrawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a random operation would return, with other numbers than random ones.

    torch's generator is not used: other threads may draw from it.
    """
    name = func.overloadpacket.__name__
    if func._schema.is_mutable:
        _fill(args[0], name)
        return args[0]
    inputs = _tensors((args, kwargs))
    device = kwargs.get("device") or (inputs[0].device if inputs else "cpu")

    def to_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    options = {name: to_meta(value) for name, value in kwargs.items()}
    if "device" in options or not inputs:
        options["device"] = "meta"
    if "generator" in options:
        options["generator"] = None
    shapes = func(*tree_map(to_meta, args), **options)
    results = tree_map(lambda shape: torch.empty_like(shape, device=device), shapes)
    for tensor in _tensors(results):
        _fill(tensor, name)
    return results


def _fill(tensor: torch.Tensor, name: str) -> None:
    """Fill with numbers that linear algebra and indices accept."""
    if tensor.is_meta:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator(tensor.device).manual_seed(0)
        tensor.copy_(
            torch.rand(tensor.shape, generator=generator, device=tensor.device)
        )
    elif name == "randperm":
        tensor.copy_(torch.arange(tensor.numel(), device=tensor.device))
    else:
        tensor.zero_()


_current: ContextVar[Callable[[torch.nn.Parameter], torch.nn.Parameter] | None]
_current = ContextVar("_current", default=None)
"""Moves a parameter of the present construction to the meta device."""


def _on_registration(
    module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
) -> torch.nn.Parameter | None:
    to_meta = _current.get()
    if to_meta is None or parameter is None or parameter.is_meta or is_lazy(parameter):
        return None
    return to_meta(parameter)


@cache
def _watch_registrations() -> None:
    # Once for all: torch iterates over its hooks without a lock.
    # torch annotates the hook as one without a result, and uses its result.
    register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]


def construct(
    make: Callable[[], M], unmarked: set[int] | None = None
) -> tuple[M, ConstructionMemory]:
    """Return the model of `make` with its parameters on the meta device.

    Fresh memory is marked as never written, except `unmarked`; by default none is.
    """
    memory = ConstructionMemory(unmarked)
    metas = WeakTensorKeyDictionary()

    def to_meta(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter not in metas:  # tied parameters stay one parameter
            data = parameter.detach().to("meta")
            memory.use(parameter)
            metas[parameter] = torch.nn.Parameter(data, parameter.requires_grad)
            metas[parameter].__dict__.update(parameter.__dict__)
        meta: torch.nn.Parameter = metas[parameter]
        return meta

    _watch_registrations()
    token = _current.set(to_meta)
    try:
        with _Empty(memory):
            return make(), memory
    finally:
        _current.reset(token)


def _mark(tensor: torch.Tensor) -> None:
    """Fill fresh memory with the marker of memory that was never written."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype in _SIGNED:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    else:  # these dtypes have no marker: they are zeros where they are not written
        tensor.zero_()


def has_no_value(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements that were never written."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype not in _SIGNED:
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def unwritten(template: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return fresh memory that is marked as never written."""
    tensor = torch.empty_like(template, device=device)
    _mark(tensor)
    return tensor


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def require_values(modules: Sequence[torch.nn.Module]) -> None:
    """Raise unless every tensor has memory.

    Raises:
        UsageError: a tensor is on the meta device, or has no shape yet.
    """
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            require_shape(name, tensor)
            if tensor.is_meta:
                raise UsageError(
                    f"{name!r} is on the meta device and holds no values. "
                    "Build the model with atoll.torch.build, which fills it."
                )


def require_shape(name: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor gets its shape only in a first forward pass."""
    if is_lazy(tensor):
        raise UsageError(
            f"{name!r} is lazy: it has no shape before a first forward pass. "
            "Give the constructor its size."
        )


def require_trained(
    modules: Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> None:
    """Raise unless every tensor of the optimizer is a parameter of the model.

    `to_empty()` and some casts replace parameters: an optimizer that was made before
    trains tensors that the model no longer has, and the model does not learn.

    Raises:
        UsageError: it has others. The message has the untrained parameters.
    """
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    names = {id(p): name for m in modules for name, p in m.named_parameters()}
    trained = [
        parameter
        for single in several
        for group in single.param_groups
        for parameter in group["params"]
    ]
    foreign = [tuple(tensor.shape) for tensor in trained if id(tensor) not in names]
    if not foreign:
        return
    trained_ids = {id(tensor) for tensor in trained}
    untrained = [name for key, name in names.items() if key not in trained_ids]
    named = ", ".join(map(repr, untrained[:8])) or "none of the model's"
    raise UsageError(
        f"The optimizer trains {len(foreign)} tensors that are not the model's, of "
        f"shapes {str(foreign[:4])[1:-1]}, and does not train {named}. "
        "Make the optimizer after the model is materialised, cast and sharded: "
        "to_empty() replaces parameters."
    )
