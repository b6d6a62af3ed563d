"""What `join` refuses: a model that is empty, and an optimizer of another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from atoll.errors import UsageError


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
