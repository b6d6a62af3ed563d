"""The tensors of a model that is still empty, by the names that a run knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from atoll.torch.stage import Stage

Built = torch.nn.Module | Stage | Sequence[Stage]


@dataclass
class Spot:
    """One tensor, and everywhere in the modules where it is held."""

    name: str
    """The model's own name of it: the first one, of a tied tensor."""

    tensor: torch.Tensor
    is_persistent: bool
    holders: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, torch.nn.Parameter)

    def put(self, value: torch.Tensor) -> None:
        """Let every holder have this tensor, so that what was tied stays tied."""
        if self.is_parameter and not isinstance(value, torch.nn.Parameter):
            value = torch.nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        for module, attribute in self.holders:
            if self.is_parameter:
                module._parameters[attribute] = value  # type: ignore[assignment]
            else:
                module._buffers[attribute] = value
        self.tensor = value

    def refresh(self) -> None:
        """Look again which tensor is held: a conversion may have replaced it."""
        module, attribute = self.holders[0]
        self.tensor = getattr(module, attribute)


def modules_of(built: Built) -> list[tuple[torch.nn.Module, Callable[[str], str]]]:
    """Return the modules of what was made, each with what the model calls its names."""
    if isinstance(built, torch.nn.Module):
        return [(built, lambda name: name)]
    stages = [built] if isinstance(built, Stage) else list(built)
    return [(stage.module, stage.model_name) for stage in stages]


def spots_of(built: Built) -> list[Spot]:
    """Return every tensor of what was made, once."""
    spots: dict[int, Spot] = {}
    for module, model_name in modules_of(built):
        saved = set(module.state_dict(keep_vars=True))
        for path, tensor, holder, attribute in _tensors(module):
            name = model_name(path)
            spot = spots.setdefault(
                id(tensor), Spot(name, tensor, is_persistent=path in saved)
            )
            spot.is_persistent |= path in saved
            spot.holders.append((holder, attribute))
            spot.names.append(name)
    return list(spots.values())


def _tensors(
    module: torch.nn.Module,
) -> Iterator[tuple[str, torch.Tensor, torch.nn.Module, str]]:
    for prefix, holder in module.named_modules(remove_duplicate=False):
        held = {**holder._parameters, **holder._buffers}
        for attribute, tensor in held.items():
            if tensor is not None:
                path = f"{prefix}.{attribute}" if prefix else attribute
                yield path, tensor, holder, attribute
