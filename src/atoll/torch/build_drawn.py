"""What a constructor makes that is not the same twice: drawn, or never written.

The operations of torch that draw are known. Numbers that come from elsewhere, such as
numpy, Python's own or the time, are found by making the model a second time: what
differs is not of the constructor, but of chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from atoll.errors import UsageError
from atoll.torch.build_checks import require_shape
from atoll.torch.build_places import Spot, modules_of, spots_of
from atoll.torch.build_recording import Recording, record

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
