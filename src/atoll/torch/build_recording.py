"""A model that is constructed without memory, and what is known of its values.

Rule 1: nothing is allocated for a tensor but on the meta device; what made it is
        recorded, one operation after the other.
Rule 2: a value can be had by making its operations again, on the CPU. Those that draw
        random numbers are never made again, and memory that nothing wrote is no value.
Rule 3: fresh memory elsewhere is marked as well, otherwise in a second making: what
        nothing wrote is then not the same twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

M = TypeVar("M")

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
