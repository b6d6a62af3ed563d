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
from atoll.torch.model import Spot, modules_of, spots_of

M = TypeVar("M")


@dataclass(frozen=True)
class Attribute:
    """A tensor that a module has as neither parameter nor buffer."""

    name: str
    module: torch.nn.Module
    attribute: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Made:
    """A model that was made without memory, and what its constructor's values are."""

    spots: list[Spot]
    attributes: list[Attribute]
    values: dict[str, torch.Tensor | None]
    """Of what no run has, by name; None: nobody can say."""


def make_empty(
    make: Callable[[], M], is_rest: Callable[[Spot], bool]
) -> tuple[M, Made]:
    """Return a model without memory, and the values that its constructor would give.

    `is_rest` says of which of its tensors these are wanted.

    Raises:
        UsageError: naming a tensor that is lazy, or one that chance has filled where
            nothing else does.
    """
    built, recording = record(make)
    made = _made(built, recording, is_rest)
    if made.values or _is_one_of_several():
        again, recording = record(make, second=True)
        _settle(made, _made(again, recording, is_rest))
    return built, made


def put_attributes(made: Made, device: torch.device) -> None:
    """Give plain attributes the values of their operations, where these are known.

    Those that are computed anew in a forward pass stay empty until then.
    """
    for each in made.attributes:
        value = made.values[each.name]
        if value is not None:
            setattr(each.module, each.attribute, value.to(device))


def _made(built: object, recording: Recording, is_rest: Callable[[Spot], bool]) -> Made:
    spots = spots_of(built)  # type: ignore[arg-type]
    for spot in spots:
        require_shape(spot.name, spot.tensor)
    attributes = list(_attributes(built))
    values = {s.name: recording.value_of(s.tensor) for s in spots if is_rest(s)}
    values |= {each.name: recording.value_of(each.tensor) for each in attributes}
    return Made(spots, attributes, values)


def _settle(made: Made, again: Made) -> None:
    """Let no value stand that was another when the model was made again."""
    real = {each.name for each in made.attributes if not each.tensor.is_meta}
    for name, value in made.values.items():
        if _is_same(value, again.values.get(name)):
            continue
        made.values[name] = None
        if name in real:
            raise UsageError(
                f"{name!r} is a plain attribute that the constructor draws at random "
                "or leaves empty. Register it as a buffer, which is saved or given "
                "by initialise=."
            )


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Return whether both are known, and have the same bits."""
    if one is None or other is None:
        return False
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bits(one), _bits(other))


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
class _Made:
    """One operation, with what it was given and what it gave."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: frozenset[int]
    written: frozenset[int]
    """The memory of its results, and of what it changes."""

    changed: frozenset[int]
    results: tuple[torch.Tensor, ...]
    """Kept alive: the memory of a tensor is known by its address."""


@dataclass
class Recording:
    """Everything that was made on the meta device, in order."""

    made: list[_Made] = field(default_factory=list)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return on the CPU what a tensor would hold; None: nobody can say."""
        if not tensor.is_meta:
            value = tensor.detach().clone()
            return None if has_no_value(value) else value
        needed, chosen = {_memory(tensor)}, []
        for each in reversed(self.made):
            if each.written & needed:
                if torch.Tag.nondeterministic_seeded in each.operation.tags:
                    return None
                needed |= each.given
                chosen.append(each)
        if not chosen or _is_unwritten(chosen):
            return None
        real: dict[int, torch.UntypedStorage] = {}
        try:
            for each in reversed(chosen):
                _make_again(each, real)
            value = _on(real, tensor).clone()
        except LookupError:
            return None  # made by something that is no operation
        return None if has_no_value(value) else value


def record(make: Callable[[], M], *, second: bool = False) -> tuple[M, Recording]:
    """Return what `make` makes on the meta device, and how it came about."""
    recording = Recording()
    with torch.device("meta"), _Data(), _Recorder(recording, second=second):
        return make(), recording


class _Data(TorchFunctionMode):
    """Lets a factory have its data on the CPU first, from where it is recorded."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _FROM_DATA and str(given.get("device") or "meta") == "meta":
            requires_grad = given.pop("requires_grad", False)
            value = func(*args, **{**given, "device": "cpu"}).to("meta")
            return value.requires_grad_(requires_grad)
        return func(*args, **given)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation whose result is on the meta device."""

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
        results = [each for each in _tensors(result) if each.is_meta]
        given = [each for each in _tensors((args, kwargs)) if each.is_meta]
        changed = _changed(func, args, kwargs)
        if results or changed:
            self._recording.made.append(
                _Made(
                    func,
                    tuple(args),
                    dict(kwargs),
                    frozenset(map(_memory, given)),
                    frozenset(map(_memory, [*results, *changed])),
                    frozenset(map(_memory, changed)),
                    tuple([*results, *given]),
                )
            )
        return result


def _is_unwritten(chosen: list[_Made]) -> bool:
    """Return whether fresh memory is used that cannot be marked, and nobody wrote."""
    changed = frozenset[int]().union(*(each.changed for each in chosen))
    return any(
        not _can_mark(result.dtype) and _memory(result) not in changed
        for each in chosen
        if each.operation.overloadpacket.__name__ in _NOT_WRITTEN
        for result in each.results[:1]
    )


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes into."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [each for each in _tensors(value) if each.is_meta]
    return found


def _make_again(made: _Made, real: dict[int, torch.UntypedStorage]) -> None:
    def put(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:
            return _on(real, value)
        if isinstance(value, torch.device) and value.type == "meta":
            return torch.device("cpu")
        return value

    args, kwargs = tree_map(put, made.args), tree_map(put, made.kwargs)
    result = made.operation(*args, **kwargs)
    if made.operation.overloadpacket.__name__ in _NOT_WRITTEN:
        _mark(result)
    metas = [each for each in made.results if each.is_meta]
    for meta, value in zip(metas, _tensors(result), strict=False):
        real.setdefault(_memory(meta), value.untyped_storage())


def _on(real: dict[int, torch.UntypedStorage], meta: torch.Tensor) -> torch.Tensor:
    """Return the same view of real memory that a tensor is of its own."""
    storage = real[_memory(meta)]
    here = torch.empty(0, dtype=meta.dtype)
    offset, size, stride = meta.storage_offset(), meta.size(), meta.stride()
    return here.set_(storage, offset, size, stride)


def _mark(tensor: torch.Tensor, *, second: bool = False) -> None:
    """Fill fresh memory with what says that nothing has been written there."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype in _SIGNED:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    else:  # no value of these says that: none is the same in a second making
        tensor.fill_(second)


def _can_mark(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype in _SIGNED


def has_no_value(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements that nothing has been written into."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype not in _SIGNED:
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())


def unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return fresh memory that says of itself that nothing has been written there."""
    tensor = torch.empty_like(like, device=device)
    _mark(tensor)
    return tensor


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def require_values(modules: Sequence[torch.nn.Module]) -> None:
    """Return when every tensor has memory.

    Raises:
        UsageError: naming one that is on the meta device, or has no shape yet.
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
    """Return unless a tensor waits for a first forward pass to get its shape."""
    if is_lazy(tensor):
        raise UsageError(
            f"{name!r} is lazy: it has no shape before a first forward pass. "
            "Give the constructor its size."
        )


def require_trained(
    modules: Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> None:
    """Return when every tensor that is optimized is a parameter of the model.

    `to_empty()` and some casts replace parameters: an optimizer that was made before
    trains tensors that the model does not have any more, and the model stands still.

    Raises:
        UsageError: naming parameters of the model that nobody trains.
    """
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    held = {id(p): name for m in modules for name, p in m.named_parameters()}
    trained = [
        parameter
        for each in several
        for group in each.param_groups
        for parameter in group["params"]
    ]
    foreign = [tuple(each.shape) for each in trained if id(each) not in held]
    if not foreign:
        return
    known = {id(each) for each in trained}
    left = [name for key, name in held.items() if key not in known]
    named = ", ".join(map(repr, left[:8])) or "none of the model's"
    raise UsageError(
        f"The optimizer trains {len(foreign)} tensors that are not the model's, of "
        f"shapes {str(foreign[:4])[1:-1]}, and does not train {named}. "
        "Make the optimizer after the model is materialised, cast and sharded: "
        "to_empty() replaces parameters."
    )
