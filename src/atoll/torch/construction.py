"""Construction of a model without memory, and checks of a model that is joined.

Rule 1: a tensor gets no memory except on the meta device; the operations that made it
        are recorded in their order.
Rule 2: a value can be computed by repeating its operations on the CPU. Operations that
        draw random numbers are never repeated, and memory that was never written has no
        value.
Rule 3: fresh memory on other devices is marked as well, differently in a second
        construction, so that memory that was never written differs between the two.

The operations of torch that draw are known. Numbers from elsewhere, such as numpy,
Python's `random` or the time, are found by constructing the model a second time: values
that differ were drawn. `require_values` and `require_trained` are the checks of `join`:
it refuses an empty model, and an optimizer of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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
    built, recording = record(make)
    empty = _described(built, recording, is_rest)
    if empty.values or _is_one_of_several():
        again, recording = record(make, second=True)
        _drop_random(empty, _described(again, recording, is_rest))
    return built, empty


def put_attributes(empty: EmptyModel, device: torch.device) -> None:
    """Give plain attributes the values of their operations, where these are known.

    Those that a forward pass computes stay empty until then.
    """
    for item in empty.attributes:
        value = empty.values[item.name]
        if value is not None:
            setattr(item.module, item.attribute, value.to(device))


def _described(
    built: object, recording: Recording, is_rest: Callable[[ModelTensor], bool]
) -> EmptyModel:
    targets = model_tensors_of(built)  # type: ignore[arg-type]
    for target in targets:
        require_shape(target.name, target.tensor)
    attributes = list(_attributes(built))
    values = {s.name: recording.value_of(s.tensor) for s in targets if is_rest(s)}
    values |= {item.name: recording.value_of(item.tensor) for item in attributes}
    return EmptyModel(targets, attributes, values)


def _drop_random(empty: EmptyModel, again: EmptyModel) -> None:
    """Drop the values that differ in the second construction."""
    real = {item.name for item in empty.attributes if not item.tensor.is_meta}
    for name, value in empty.values.items():
        if _is_same(value, again.values.get(name)):
            continue
        empty.values[name] = None
        if name in real:
            raise UsageError(
                f"{name!r} is a plain attribute that the constructor draws at random "
                "or leaves empty. Register it as a buffer, which is saved or filled "
                "by initialise=."
            )


def _is_same(value: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether both are known, and have the same bits."""
    if value is None or other is None:
        return False
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


_FROM_DATA = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
"""Factories whose data would be lost on the meta device."""

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_NOT_WRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "empty_permuted")


@dataclass(frozen=True)
class _Operation:
    """One operation, with its arguments and results."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: frozenset[int]
    written: frozenset[int]
    """The memory of its results, and of the arguments that it changes."""

    changed: frozenset[int]
    results: tuple[torch.Tensor, ...]
    """Kept alive: the memory of a tensor is known by its address."""


@dataclass
class Recording:
    """All operations on the meta device, in order."""

    operations: list[_Operation] = field(default_factory=list)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor, on the CPU; None if they are unknown."""
        if not tensor.is_meta:
            value = tensor.detach().clone()
            return None if has_no_value(value) else value
        needed, chosen = {_memory(tensor)}, []
        for recorded in reversed(self.operations):
            if recorded.written & needed:
                if torch.Tag.nondeterministic_seeded in recorded.operation.tags:
                    return None
                needed |= recorded.inputs
                chosen.append(recorded)
        if not chosen or _is_unwritten(chosen):
            return None
        real: dict[int, torch.UntypedStorage] = {}
        try:
            for recorded in reversed(chosen):
                _repeat(recorded, real)
            value = _on(real, tensor).clone()
        except LookupError:
            return None  # not made by an operation of torch
        return None if has_no_value(value) else value


def record(make: Callable[[], M], *, second: bool = False) -> tuple[M, Recording]:
    """Return the model of `make` on the meta device, and its operations."""
    recording = Recording()
    with torch.device("meta"), _Data(), _Recorder(recording, second=second):
        return make(), recording


class _Data(TorchFunctionMode):
    """Makes factories put their data on the CPU first, from where it is recorded."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _FROM_DATA and str(options.get("device") or "meta") == "meta":
            requires_grad = options.pop("requires_grad", False)
            value = func(*args, **{**options, "device": "cpu"}).to("meta")
            return value.requires_grad_(requires_grad)
        return func(*args, **options)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation whose result is on the meta device."""

    def __init__(self, recording: Recording, *, second: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._second = recording, second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ in _NOT_WRITTEN and not result.is_meta:
            _mark(result, second=self._second)
        results = [tensor for tensor in _tensors(result) if tensor.is_meta]
        inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_meta]
        changed = _changed(func, args, kwargs)
        if results or changed:
            self._recording.operations.append(
                _Operation(
                    func,
                    tuple(args),
                    dict(kwargs),
                    frozenset(map(_memory, inputs)),
                    frozenset(map(_memory, [*results, *changed])),
                    frozenset(map(_memory, changed)),
                    tuple([*results, *inputs]),
                )
            )
        return result


def _is_unwritten(chosen: list[_Operation]) -> bool:
    """Return whether unmarkable fresh memory is used that nothing has written."""
    changed = frozenset[int]().union(*(recorded.changed for recorded in chosen))
    return any(
        not _can_mark(result.dtype) and _memory(result) not in changed
        for recorded in chosen
        if recorded.operation.overloadpacket.__name__ in _NOT_WRITTEN
        for result in recorded.results[:1]
    )


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes into."""
    changed: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        changed += [tensor for tensor in _tensors(value) if tensor.is_meta]
    return changed


def _repeat(recorded: _Operation, real: dict[int, torch.UntypedStorage]) -> None:
    """Repeat an operation on the CPU, and store the memory of its results."""

    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            return _on(real, value)
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        return value

    args, kwargs = tree_map(put, recorded.args), tree_map(put, recorded.kwargs)
    result = recorded.operation(*args, **kwargs)
    if recorded.operation.overloadpacket.__name__ in _NOT_WRITTEN:
        _mark(result)
    metas = [tensor for tensor in recorded.results if tensor.is_meta]
    for meta, value in zip(metas, _tensors(result), strict=False):
        real.setdefault(_memory(meta), value.untyped_storage())


def _on(real: dict[int, torch.UntypedStorage], meta: torch.Tensor) -> torch.Tensor:
    """Return the view of real memory that corresponds to a meta tensor."""
    storage = real[_memory(meta)]
    view = torch.empty(0, dtype=meta.dtype)
    offset, size, stride = meta.storage_offset(), meta.size(), meta.stride()
    return view.set_(storage, offset, size, stride)


def _mark(tensor: torch.Tensor, *, second: bool = False) -> None:
    """Fill fresh memory with the marker of memory that was never written."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype in _SIGNED:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    else:  # these dtypes have no marker: the second construction differs instead
        tensor.fill_(second)


def _can_mark(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype in _SIGNED


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
