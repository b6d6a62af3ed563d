"""`join`: three lines in an existing training loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

import torch

from atoll.checkpoint import Policy
from atoll.errors import UsageError
from atoll.exchange import CollectiveRun, MemoryRun
from atoll.island import Host, join_run
from atoll.island.checkpoints import (
    CheckpointLike,
    IslandCheckpoints,
    as_policy,
    warn_fresh_optimizer,
)
from atoll.island.join import EarlierIncarnation, is_alone
from atoll.torch.construction import require_trained, require_values
from atoll.torch.from_run import bundle_of
from atoll.torch.island import Island
from atoll.torch.model import (
    HostWeights,
    Stage,
    TorchConstants,
    TorchModel,
    TorchView,
    modules_of,
)

OnEnd = Literal["raise", "flag"]
Count = Literal["hook", "manual"]


def join(
    model: torch.nn.Module | Stage | Sequence[Stage],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    run: MemoryRun | CollectiveRun | str | None = None,
    *,
    island: str | None = None,
    on_end: OnEnd = "raise",
    count: Count = "hook",
    checkpoint: str | os.PathLike[str] | Policy | None = None,
) -> Island:
    """Make the model one island of a run, and return the island.

    A model in DDP, under FSDP2, or a stage of a pipeline is one part of an island: all
    its ranks call this alike, and the first of them talks to the run.

    Afterwards the model's weights are the run's; the first island of an empty run
    founds it with its own. Every call of `optimizer.step()` is an inner step.

    Args:
        model: a module, or this rank's `Stage` or stages of a pipeline.
        optimizer: with several, inner steps are counted on the last.
        run: a `MemoryRun`, a coordinator's address, an object store's URL or a path, or
            None to read ATOLL_RUN; "none" trains alone. A `CollectiveRun` is a
            coordinator's whose islands share a process group.
        island: this island's name in the run; None reads ATOLL_ISLAND. If that is
            unset too, the run chooses one.
        on_end: "raise" ends the loop with `RunEnded`, which the `with` block swallows;
            "flag" sets `island.should_stop`.
        count: "manual" counts by `island.stepped()`, for optimizers without hooks.
        checkpoint: a directory, or an `atoll.checkpoint.Policy`. The newest checkpoint
            there is restored, and new ones are saved by the policy.

    Raises:
        ModelError: the model is not the run's; with the tensor and both sides.
        UsageError: an argument is impossible, the name is taken, or the checkpoint is
            of another run.
        CorruptError: there are checkpoints, and none is valid.
    """
    _require_choice("on_end", on_end, ("raise", "flag"))
    _require_choice("count", count, ("hook", "manual"))
    counted = _last_of(optimizer) if count == "hook" else None
    modules = [module for module, _ in modules_of(model)]

    def check() -> None:
        require_values(modules)
        require_trained(modules, optimizer)

    if not isinstance(model, torch.nn.Module) or is_perhaps_spread(model):
        # A plain model does not pay for loading the code of sharded ranks.
        from atoll.torch.ranks import join_ranks

        joined = join_ranks(
            model,
            run,
            island=island,
            checkpoint=checkpoint,
            check=check,
            optimizer=optimizer,
        )
        if joined is not None:
            handle, modules, saves = joined
            return Island(
                handle, handle, modules, counted, on_end=on_end, checkpointing=saves
            )
    assert isinstance(model, torch.nn.Module)
    check()
    checkpointing = checkpoints_of(checkpoint, model, optimizer, run)
    host, view = enter_alone(model, run, island=island, checkpointing=checkpointing)
    if checkpointing is None:
        warn_fresh_optimizer(host.joined, is_fresh=True)
    else:
        checkpointing.begin(host)
    return Island(
        host,
        HostWeights(host, view),
        [model],
        counted,
        on_end=on_end,
        checkpointing=checkpointing,
    )


def checkpoints_of(
    checkpoint: CheckpointLike | None,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    run: object,
) -> IslandCheckpoints | None:
    """Restore the newest checkpoint, and return its saver; None without `checkpoint=`.

    Raises:
        UsageError: it is neither a policy nor a directory, or its objects do not fit.
        CorruptError: there are checkpoints, and none is valid.
    """
    if checkpoint is None:
        return None
    several = list(optimizer) if isinstance(optimizer, Sequence) else optimizer
    objects = {"model": model, "optimizer": several}
    return IslandCheckpoints(as_policy(checkpoint), objects, is_alone=is_alone(run))


def enter_alone(
    model: torch.nn.Module,
    run: MemoryRun | CollectiveRun | str | None,
    *,
    island: str | None,
    checkpointing: EarlierIncarnation | None,
) -> tuple[Host, TorchView]:
    """Join a run as an island of one process, and return its host and view."""
    torch_model = TorchModel.of(model)
    view = TorchView(torch_model)
    host = join_run(
        run,
        view,
        torch_model.spec,
        island=island,
        checkpointing=checkpointing,
        constants=TorchConstants(torch_model.tensors),
        bundle=bundle_of([model]),
    )
    return host, view


def _last_of(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Return the optimizer whose steps are the inner steps."""
    several = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if several and isinstance(several[-1], torch.optim.Optimizer):
        return several[-1]
    raise UsageError(
        f"optimizer={optimizer!r} is no torch.optim.Optimizer, nor a list of them. "
        "Pass the optimizer of the model; one without hooks is counted by "
        'count="manual" and island.stepped().'
    )


def is_perhaps_spread(model: torch.nn.Module) -> bool:
    """Return whether several ranks may train a model, by its modules and parameters.

    Loads nothing: a module or a parameter has its class only if that class is loaded.
    """
    wrappers: tuple[type, ...] = (
        torch.nn.parallel.DistributedDataParallel,
        torch.nn.DataParallel,
    )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        wrappers += (fsdp.FullyShardedDataParallel,)
    if any(isinstance(module, wrappers) for module in model.modules()):
        return True
    # Every optimizer loads this module, so only the parameters decide.
    sharded = sys.modules.get("torch.distributed.tensor")
    return sharded is not None and any(
        isinstance(parameter, sharded.DTensor) for parameter in model.parameters()
    )


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not one of {', '.join(choices)}.")
