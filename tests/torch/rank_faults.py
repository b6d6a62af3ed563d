"""What goes wrong at an island of several ranks, and what each of its ranks says."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn.parallel import DistributedDataParallel

import atoll.torch
from atoll import RunSettings
from atoll.checkpoint import Policy
from atoll.errors import UsageError
from atoll.torch import Stage
from tests.torch.rank_loops import (
    Last,
    net,
    place_of,
    rows_of,
    settings,
    stage,
    steps,
    wrapped,
)


def said_by(rank: int, model: Any, run: str | RunSettings, **how: Any) -> list[str]:
    """Join, which fails; return the kind of the error, its words, and "soon"."""
    trained = model.module if isinstance(model, Stage) else model
    optimizer = torch.optim.SGD(list(trained.parameters()), lr=0.1)
    began_s = time.monotonic()
    try:
        atoll.torch.join(model, optimizer, place_of(run), **how)
    except BaseException as exc:
        took_s = time.monotonic() - began_s
        return [type(exc).__name__, str(exc), "soon" if took_s < 45 else f"{took_s} s"]
    return ["nothing", "", ""]


def refused_by_the_run(rank: int, kind: str, run: str | RunSettings) -> list[str]:
    return said_by(rank, wrapped(kind, net(0), 2), run)


def another_model(rank: int, run: str) -> list[str]:
    return said_by(rank, wrapped("ddp", net(0, hidden=5), 2), run, island="other")


def threads(rank: int) -> list[str]:
    return said_by(rank, torch.nn.DataParallel(net(0)), settings(1))


def flat_parameters(rank: int) -> list[str]:
    """A part of the model is in FSDP1, whose own making would need an accelerator."""
    flat = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(flat)
    return said_by(rank, torch.nn.Sequential(net(0), flat), settings(1))


def on_meta(rank: int) -> list[str]:
    with torch.device("meta"):
        model = net(0)
    fully_shard(model)
    return said_by(rank, model, settings(1))


def a_part_alone(rank: int) -> list[str]:
    """Only a part of the model is sharded."""
    model = net(0)
    fully_shard(model.layers[0])
    return said_by(rank, model, settings(1))


def one_rank_differs(rank: int) -> list[str]:
    """The second rank has built another model."""
    model = Last(net(0, hidden=7 + rank))
    return said_by(rank, Stage(module=model, index=0, num_stages=1), settings(1))


def a_stage_twice(rank: int) -> list[str]:
    """Both ranks declare tensors of one name, in different stages."""
    return said_by(rank, Stage(module=net(0), index=rank, num_stages=2), settings(1))


def a_stage_missing(rank: int) -> list[str]:
    """Both ranks declare the first of two stages."""
    module = DistributedDataParallel(net(0))
    return said_by(rank, Stage(module=module, index=0, num_stages=2), settings(1))


def a_tie_to_nothing(rank: int) -> list[str]:
    if rank == 0:
        return said_by(rank, stage(0, 0), settings(1))
    ties = {"layers.1.bias": "nowhere"}
    tied = Stage(module=Last(net(0)), index=1, num_stages=2, ties=ties)
    return said_by(rank, tied, settings(1))


def no_such_name(rank: int) -> list[str]:
    """The second rank declares a name that its module does not have."""
    if rank == 0:
        return said_by(rank, stage(0, 0), settings(1))
    names = {"layer.weight": "layers.1.weight"}
    return said_by(
        rank,
        Stage(module=Last(net(0)), index=1, num_stages=2, names=names),
        settings(1),
    )


def other_numbers_of_stages(rank: int) -> list[str]:
    """The ranks do not agree on how long their pipeline is."""
    part = stage(rank, 0)
    longer = Stage(
        module=part.module, index=rank, num_stages=2 + rank, names=part.names
    )
    return said_by(rank, longer, settings(1))


def dtensors_in_ddp(rank: int) -> list[str]:
    """DDP, which takes no DTensors itself, around a model that has got some since."""
    model = DistributedDataParallel(net(0))
    mesh = init_device_mesh("cpu", (2,))
    first = model.module.layers[0]
    whole = DTensor.from_local(first.weight.detach(), mesh, [Replicate()])
    first.weight = torch.nn.Parameter(whole)
    return said_by(rank, model, settings(1))


def laid_out(rank: int, placement: Placement) -> list[str]:
    """A sharded model has one weight that lies otherwise."""
    model = net(0)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    weight = torch.zeros(7, 6)
    whole = DTensor.from_local(weight, mesh, [placement], run_check=False)
    model.layers[0].weight = torch.nn.Parameter(whole)
    return said_by(rank, model, settings(1))


def unshared(rank: int) -> list[str]:
    return laid_out(rank, Partial())


def replicated(rank: int) -> list[str]:
    return laid_out(rank, Replicate())


def checkpoint_of_one_rank(rank: int, directory: str) -> list[str]:
    """Only the first rank is given a checkpoint."""
    model = wrapped("ddp", net(0), 2)
    how = {"checkpoint": directory} if rank == 0 else {}
    return said_by(rank, model, settings(1), **how)


def misspelt(rank: int, directory: str) -> list[str]:
    """A component that nobody knows, which only the second rank asks for."""
    components = ["modle"] if rank else ["model"]
    model = wrapped("ddp", net(0), 2)
    try:
        policy: object = Policy(directory, components=components)
    except UsageError as exc:
        policy = exc
    return said_by(rank, model, settings(1), checkpoint=policy)


def restored(rank: int, kind: str, run: str, directory: str) -> list[str]:
    """A checkpoint that this island cannot go on from."""
    how = {"island": "a", "checkpoint": directory}
    return said_by(rank, wrapped(kind, net(0), 2), run, **how)


def saved(rank: int, kind: str, run: str, directory: str) -> list[str]:
    """Join, save a first checkpoint, and leave."""
    model = wrapped(kind, net(0), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = Policy(directory, components=["island"])
    atoll.torch.join(model, optimizer, run, island="a", checkpoint=policy).leave()
    return []


def trained_until(rank: int, run: str | RunSettings, fault: Any) -> dict[str, Any]:
    """Train in DDP until something happens; return how it ended."""
    model = wrapped("ddp", net(0), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result: dict[str, Any] = {"error": "", "said": ""}
    try:
        with atoll.torch.join(model, optimizer, place_of(run), island="a") as island:
            result["pid"] = os.getpid()
            for step in steps():
                fault(rank, step)
                model(rows_of(0, step, rank)).square().mean().backward()
                island.report(tokens=1)
                optimizer.step()
                optimizer.zero_grad()
    except Exception as exc:
        result |= {"error": type(exc).__name__, "said": str(exc)}
    return result | {"inner_steps": island.inner_steps, "round": island.round}


def terminated(rank: int, run: RunSettings) -> dict[str, Any]:
    """The second rank is sent SIGTERM while it trains."""

    def fault(rank: int, step: int) -> None:
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    return trained_until(rank, run, fault)


def failing(rank: int, run: RunSettings, who: int) -> dict[str, Any]:
    """A rank's own program fails while it trains."""

    def fault(rank: int, step: int) -> None:
        if rank == who and step == 5:
            raise ValueError("a row could not be read")

    return trained_until(rank, run, fault)


def killed(rank: int, run: RunSettings) -> dict[str, Any]:
    """The second rank is killed where it trains alone: no collective waits for it."""
    model = Stage(module=wrapped("ddp", net(0), 2), index=0, num_stages=1)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    island = atoll.torch.join(model, optimizer, place_of(run), island="a")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began_s = time.monotonic()
    try:
        while time.monotonic() < began_s + 45:
            optimizer.step()
    except Exception as exc:
        return {"error": type(exc).__name__, "said": str(exc)}
    finally:
        island.leave()
    return {"error": "", "said": ""}


def terminated_waiting(rank: int, url: str) -> dict[str, Any]:
    """Every rank is sent SIGTERM while the leader waits for an island that never comes.

    So does a launcher that is told to stop.
    """

    def fault(rank: int, step: int) -> None:
        if step == 0:
            ends = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM))
            ends.daemon = True
            ends.start()

    return trained_until(rank, url, fault)


def other_calls(rank: int) -> list[str]:
    """The ranks call different things at the same time."""
    model = wrapped("ddp", net(0), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = settings(1)
    island = atoll.torch.join(model, optimizer, place_of(run), island="a")
    try:
        if rank == 0:
            island.anchor()
        else:
            island.sync_now()
    except Exception as exc:
        return [type(exc).__name__, str(exc), "soon"]
    finally:
        island.leave()
    return ["nothing", "", ""]
