"""Three lines in a loop that was there already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from atoll.errors import UsageError
from atoll.exchange import MemoryRun
from atoll.island import join_run
from atoll.torch.island import Island
from atoll.torch.model import TorchModel, TorchView

OnEnd = Literal["raise", "flag"]
Count = Literal["hook", "manual"]


def join(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    run: MemoryRun | str | None = None,
    *,
    island: str | None = None,
    on_end: OnEnd = "raise",
    count: Count = "hook",
    checkpoint: object = None,
) -> Island:
    """Make the model one island of a run, and return the island.

    Afterwards the model's weights are the run's; the first island of an empty run
    founds it with its own. Every call of `optimizer.step()` is an inner step.

    Args:
        optimizer: with several, inner steps are counted on the last.
        run: a `MemoryRun`, a coordinator's address, an object store's URL or a path, or
            None to read ATOLL_RUN; "none" trains alone.
        island: this island's name in the run; None reads ATOLL_ISLAND, and without it
            lets the run choose one.
        on_end: "raise" ends the loop with `RunEnded`, which the `with` block swallows;
            "flag" sets `island.should_stop`.
        count: "manual" counts by `island.stepped()`, for optimizers without hooks.
        checkpoint: not available yet.

    Raises:
        ModelError: the model is not the run's, naming the tensor and both sides.
        UsageError: an argument is impossible, or the name is taken.
    """
    _require_choice("on_end", on_end, ("raise", "flag"))
    _require_choice("count", count, ("hook", "manual"))
    if checkpoint is not None:
        raise UsageError(
            f"checkpoint={checkpoint!r} is not available yet. "
            "Save the model and optimizer yourself."
        )
    counted = _last_of(optimizer) if count == "hook" else None
    torch_model = TorchModel.of(model)
    view = TorchView(torch_model)
    host = join_run(run, view, torch_model.spec, island=island)
    return Island(host, view, model, counted, on_end=on_end)


def _last_of(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Return the optimizer whose steps are the inner steps."""
    several = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if several and isinstance(several[-1], torch.optim.Optimizer):
        return several[-1]
    raise UsageError(
        f"optimizer={optimizer!r} is no torch.optim.Optimizer, nor a list of them. "
        "Pass what trains the model; one without hooks is counted by "
        'count="manual" and island.stepped().'
    )


def _require_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r} is not one of {', '.join(known)}.")
